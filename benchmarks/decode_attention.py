"""Decode attention of one layer against PyTorch's, interleaved in one run, beside the read bandwidth of this machine.

    python benchmarks/decode_attention.py --tokens 6144 --query-heads 9 --kv-heads 3 --head-dim 64

Prints the median ms per layer. Every layer has its own rows, so that no pass finds them in cache when there are enough
layers. The PyTorch line is scaled_dot_product_attention over contiguous rows with the query group folded into rows.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvstrata.contract.layout import SegmentLayout
from kvstrata.kernels import BlockTable, DecodeAttention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--query-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    for dtype in options.dtypes:
        for threads in options.threads:
            run(options, dtype, threads)


def run(options: argparse.Namespace, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    layout = SegmentLayout(options.kv_heads, options.query_heads, options.head_dim, dtype)
    tokens, group, dim = options.tokens, layout.query_group, layout.head_dim
    attention = DecodeAttention(layout, threads)
    tables, contiguous = [], []
    for _ in range(options.layers):
        rows = torch.randn(2, 1, layout.kv_heads, tokens, dim).to(DTYPES[dtype])
        table = BlockTable(layout)
        for _ in range(layout.segments(tokens)):
            table.append(torch.zeros(layout.segment_bytes, dtype=torch.uint8))
        attention.append(rows[0], rows[1], table, 0)
        tables.append(table)
        contiguous.append(rows)
    query = torch.randn(1, layout.query_heads, 1, dim).to(DTYPES[dtype])
    key, value = contiguous[0][:, :, :, -1:]
    flat = [rows.view(torch.uint8).view(torch.int64).flatten() for rows in contiguous]

    def ours(i: int) -> object:
        return attention.append_and_attend(key, value, query, tables[i], tokens - 1)

    def folded(i: int) -> object:
        rows = contiguous[i]
        return torch.nn.functional.scaled_dot_product_attention(
            query.view(1, layout.kv_heads, group, dim), rows[0], rows[1]
        )

    def read(i: int) -> object:
        return flat[i].max()

    results: dict[str, list[float]] = {"ours": [], "folded": [], "read": []}
    for _ in range(options.rounds):
        for name, call in (("ours", ours), ("folded", folded), ("read", read)):
            start = time.perf_counter()
            for i in range(options.layers):
                call(i)
            results[name].append((time.perf_counter() - start) / options.layers * 1e3)
    ms = {name: statistics.median(values) for name, values in results.items()}
    gigabytes = tokens * layout.row_bytes / 1e9
    print(
        f"{attention.level} {dtype} threads={threads} T={tokens} heads={layout.query_heads}/{layout.kv_heads} d={dim}: "
        f"kvstrata {ms['ours']:.3f} ms ({gigabytes / ms['ours'] * 1e3:.1f} GB/s), "
        f"torch folded {ms['folded']:.3f} ms ({ms['folded'] / ms['ours']:.2f}x), "
        f"plain read {ms['read']:.3f} ms ({gigabytes / ms['read'] * 1e3:.1f} GB/s)"
    )


if __name__ == "__main__":
    main()
