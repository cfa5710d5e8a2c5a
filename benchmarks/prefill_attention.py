"""Attention of a whole chunked prefill of one layer against PyTorch's, interleaved in one run.

    python benchmarks/prefill_attention.py --tokens 6144 --chunk 512 --query-heads 9 --kv-heads 3 --head-dim 64

Prints the median ms per layer. The PyTorch line does what an attention layer does with a growing contiguous cache:
concatenate, repeat K/V heads for the query group, scaled_dot_product_attention under a causal mask.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels import BlockTable, DecodeAttention, PrefillWorkspace, prefill_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--query-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--pieces", nargs="+", type=int, default=[2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    for dtype in options.dtypes:
        run(options, dtype)


def run(options: argparse.Namespace, dtype: str) -> None:
    layout = SegmentLayout(options.kv_heads, options.query_heads, options.head_dim, dtype)
    tokens, chunk, group = options.tokens, options.chunk, layout.query_group
    attention = DecodeAttention(layout, options.threads)
    key, value = torch.randn(2, 1, layout.kv_heads, tokens, layout.head_dim).to(DTYPES[dtype])
    query = torch.randn(1, layout.query_heads, tokens, layout.head_dim).to(DTYPES[dtype])
    table = BlockTable(layout)
    for _ in range(layout.segments(tokens)):
        table.append(torch.zeros(layout.segment_bytes, dtype=torch.uint8))

    def paged(piece: int) -> None:
        workspace = PrefillWorkspace(layout, chunk, piece)
        for start in range(0, tokens, chunk):
            at = slice(start, min(tokens, start + chunk))
            prefill_attention(
                query[:, :, at],
                table,
                start,
                key[:, :, at],
                value[:, :, at],
                attention.scale,
                attention.gather,
                workspace,
            )
            attention.append(key[:, :, at], value[:, :, at], table, start)

    def contiguous() -> None:
        keys, values = key[:, :, :0], value[:, :, :0]
        for start in range(0, tokens, chunk):
            stop = min(tokens, start + chunk)
            keys = torch.cat([keys, key[:, :, start:stop]], dim=2)
            values = torch.cat([values, value[:, :, start:stop]], dim=2)
            mask = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)[None, None]
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                keys.repeat_interleave(group, 1),
                values.repeat_interleave(group, 1),
                attn_mask=mask if start else None,
                is_causal=not start,
            )

    calls = {f"kvstrata piece {piece}": (lambda piece=piece: paged(piece)) for piece in options.pieces}
    calls["torch"] = contiguous
    results: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            results[name].append((time.perf_counter() - start) * 1e3)
    ms = {name: statistics.median(values) for name, values in results.items()}
    shown = ", ".join(f"{name} {value:.1f} ms ({ms['torch'] / value:.2f}x)" for name, value in ms.items())
    print(f"{attention.level} {dtype} threads={options.threads} T={tokens} chunk={chunk}: {shown}")


if __name__ == "__main__":
    main()
