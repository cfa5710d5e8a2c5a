"""The fresh process of the memory benchmark: prints its figures as one line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time

import torch

from kvstrata.engines.transformers import attach, load_model
from kvstrata.engines.transformers.stock import stock_cache, stock_forward
from kvstrata.lab.process_memory import peak_resident_bytes, release_free_memory, reset_peak, resident_bytes

__all__ = ["main"]


def main(source: str, dtype: str, tokens: int, share: int) -> None:
    """Warm up, prefill under the budget, decode, save, and account for it."""
    loaded = load_model(source, dtype=dtype)
    model = loaded.model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=generator)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        stock_forward(model, ids[:, :512], stock_cache(model))
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
        release_free_memory()
        reset_peak()
        before = resident_bytes() or 0
        cpu = time.process_time()
        with attach(loaded, folder, budget=tokens * row // share) as memory:
            request = memory.prefill(ids[0].tolist())
            token, steps = ids[:, -1:], []
            for _ in range(16):
                start = time.perf_counter()
                model(input_ids=token, past_key_values=request.cache, logits_to_keep=1)
                steps.append(time.perf_counter() - start)
            memory.save("bench", request)
            ledger = memory.ledger()
        process_cpu = time.process_time() - cpu
        figures = {
            "budget_bytes": ledger.budget_bytes,
            "peak_device_bytes": ledger.peak_device_bytes,
            "rss_growth_bytes": max(0, (peak_resident_bytes() or 0) - before),
            "publish_cpu_s": ledger.publish_cpu_s,
            "process_cpu_s": process_cpu,
            "publish_overhead": ledger.publish_cpu_s / process_cpu,
            "decode_ms": statistics.median(steps) * 1e3,
            "decode_n": len(steps),
        }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
