"""How much of a model's fp32 rounding error attention could remove: the same forward with attention in float64.

    python benchmarks/precision_floor.py --tokens 600

Runs one forward of SmolLM2 in fp32 under stock `sdpa`, under stock `eager`, and with every attention computed in
float64 and rounded once, and compares each row's logits with a float64 run: root mean square over the vocabulary, as a
ratio to `sdpa` at the same row. One thread. Prints the geometric mean, the 99th percentile and the largest ratio.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
from transformers import AttentionInterface

import kvstrata
from kvstrata.lab.prose import prose


def attend_in_double(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of a whole sequence: [1, heads, rows, dim] to [1, rows, heads, dim]."""
    keys, values = (each.double().repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    scores = query.double() @ keys.transpose(-1, -2) * scaling
    rows = scores.shape[-1]
    scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ values).to(query.dtype).transpose(1, 2).contiguous(), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--start", type=int, default=0, help="paragraph that the text begins with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    AttentionInterface.register("double", attend_in_double)
    loaded = kvstrata.load_model("smollm2", dtype="float32")
    model = loaded.model
    ids = torch.tensor([prose(options.tokens, loaded.tokenizer, start=options.start)])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        truth = copy.deepcopy(model).double()(ids, use_cache=False).logits[0]
        errors = {}
        for name in ("sdpa", "eager", "double"):
            model.set_attn_implementation(name)
            errors[name] = (model(ids, use_cache=False).logits[0] - truth).square().mean(-1).sqrt()
    rows = {
        name: {
            "geometric_mean": (ratio := errors[name] / errors["sdpa"]).log().mean().exp().item(),
            "p99": ratio.quantile(0.99).item(),
            "largest": ratio.max().item(),
        }
        for name in ("eager", "double")
    }
    print(json.dumps({"tokens": ids.shape[1], "start": options.start, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
