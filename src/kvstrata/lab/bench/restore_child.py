"""The fresh process of the restore benchmark: prints the path of a JSON file with its figures."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time

import torch

from kvstrata.contract.identity import ChunkIdentity
from kvstrata.engines.transformers import attach, load_model
from kvstrata.engines.transformers.memory import Memory
from kvstrata.tiers.memory import HostBacking

__all__ = ["main"]


def main(source: str, dtype: str, folder: str, session: str) -> None:
    """Load the model, restore, time the first logits, a verified read of the same bytes and a decode step."""
    loaded = load_model(source, dtype=dtype)
    model = loaded.model
    token = torch.tensor([[11]])
    with attach(loaded, folder) as memory, torch.inference_mode():
        model(input_ids=token.expand(1, 8), logits_to_keep=1)
        model(input_ids=token, **memory.generate_kwargs(), logits_to_keep=1)
        start = time.perf_counter()
        request, receipt = memory.restore(session)
        model(input_ids=token, past_key_values=request.cache, logits_to_keep=1).logits.sum().item()
        first_token = time.perf_counter() - start
        if not receipt.hit or memory.ledger().tokens_recomputed:
            raise SystemExit(f"the session was not restored whole: {receipt}")
        steps = []
        for _ in range(10):
            start = time.perf_counter()
            model(input_ids=token, past_key_values=request.cache, logits_to_keep=1)
            steps.append(time.perf_counter() - start)
        identities = [record.identity for record in request.history.chunks]
        read = _verified_read(memory, identities)
    figures = {"first_token_ms": first_token * 1e3, "read_ms": read * 1e3, "step_ms": statistics.median(steps) * 1e3}
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
        json.dump(figures, file)
    sys.stdout.write(f"{file.name}\n")


def _verified_read(memory: Memory, identities: list[ChunkIdentity]) -> float:
    """Seconds to read and verify every segment once into memory that was never touched, on one thread."""
    layers = memory.context.abi.layers
    backing = HostBacking(memory.layout.segment_bytes, layers * len(identities))
    start = time.perf_counter()
    slot = 0
    for identity in identities:
        with memory.store.tier.open(identity.digest) as file:
            for layer in range(layers):
                file.read_into(layer, [backing.writable(slot)])
                slot += 1
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:5])
