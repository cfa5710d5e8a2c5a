"""The benchmark of the store, with few rounds of small sizes: which figures it has, not how large they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.contract.layout import SegmentLayout
from kvstrata.lab.bench import BenchRow, run_bench
from kvstrata.lab.bench.plain_files import PlainFiles
from kvstrata.lab.bench.store_chunks import ChunkShape, random_rows
from kvstrata.lab.bench.store_coalescing import bench_coalescing
from kvstrata.lab.bench.store_files import bench_files
from kvstrata.lab.bench.store_lookup import bench_lookups
from kvstrata.lab.bench.store_memory import bench_memory_tiers
from kvstrata.lab.bench.store_promotion import bench_promotion
from kvstrata.lab.bench.store_rates import rate_row

SHAPE = ChunkShape("8KiB", 2, SegmentLayout(1, 1, 8, "bfloat16", chunk_tokens=64))


def quiet(text: str) -> None:
    assert text


def by_name(rows: list[BenchRow]) -> dict[str, BenchRow]:
    found = {row.name: row for row in rows}
    assert len(found) == len(rows)
    assert all(row.value > 0 for row in rows if "overhead" not in row.name)
    return found


def test_a_rate_is_a_share_of_the_plain_rate_of_the_same_round() -> None:
    row = rate_row("x", 2**20, [2.0, 4.0, 4.0], [1.0, 3.0, 4.0])
    assert (row.value, row.baseline, row.unit) == (0.25, pytest.approx(1 / 3), "MiB/s")
    assert (row.ratio, row.met, row.n) == (0.75, False, 3)
    assert rate_row("x", 1, [1.0], [0.85]).met is True
    assert rate_row("x", 1, [1.0], [0.1], goal=False).met is None


def test_lookups_of_a_catalog_in_a_fresh_process() -> None:
    rows = by_name(bench_lookups([50, 300], 2, 0, quiet, tokens=8, asked=100))
    assert rows["lookup.300.entries"].to_json()["class"] == "synthetic"
    assert rows["lookup.300.remembered"].to_json()["class"] == "measured"
    assert rows["lookup.300.remembered"].goal == ">= 200000 a second"
    assert rows["lookup.300.remembered"].n == 2
    assert (rows["lookup.50.remembered"].goal, rows["lookup.50.remembered"].met) == ("", None)
    assert rows["lookup.300.cold"].n == 300
    assert rows["lookup.300.remembered"].value > rows["lookup.300.cold"].value / 2


def test_tiers_in_memory() -> None:
    rows = by_name(bench_memory_tiers([SHAPE], 2, 0, quiet, sample_bytes=4 * SHAPE.nbytes))
    tiers = [f"{tier}.{what}.8KiB" for tier in ("device", "host_arena", "host") for what in ("put", "get")]
    assert set(rows) == {*tiers, "host.put.8KiB.to_bare", "host.get.8KiB.to_bare"}
    for name in tiers:
        row = rows[name]
        assert row.ratio is not None
        assert (row.goal, row.met) == (">= 0.85", row.ratio >= 0.85)
    assert rows["host.put.8KiB.to_bare"].met is None


def test_files() -> None:
    rows = by_name(bench_files([SHAPE], 2, 0, quiet))
    goals = {"files.put.8KiB", "files.get.8KiB", "files.get_open.8KiB", "files.durable.put.8KiB"}
    goals |= {"files.put_together.8KiB", "files.durable.put_together.8KiB"}
    assert {name for name, row in rows.items() if row.goal} == goals
    assert set(rows) - goals == {"files.put.8KiB.to_unread", "files.durable.put.8KiB.to_unread"}


def test_promotion_alone_and_beside_other_threads() -> None:
    rows = by_name(bench_promotion(2, 0, quiet))
    for name in ("readers1.alone", "readers1.beside8", "readers0.alone"):
        median, late = rows[f"promotion.{name}.p50"], rows[f"promotion.{name}.p99"]
        assert median.value <= late.value
        assert (median.unit, median.n) == ("ms/batch", 2)
    batch = rows["promotion.overhead.processor_time.batch"].value
    assert rows["promotion.overhead.processor_time.segment"].value == pytest.approx(batch / 24)
    assert rows["promotion.beside8.cycles"].value > 0


def test_eight_requests_for_one_unit_read_it_once() -> None:
    rows = by_name(bench_coalescing(2, 0, quiet))
    nbytes = rows["coalescing.requests8.bytes"]
    assert (nbytes.value, nbytes.baseline, nbytes.met) == (8 * 196608, 64 * 196608, True)
    assert rows["coalescing.requests8.time"].unit == "ms"


@pytest.mark.parametrize("durable", [False, True])
def test_plain_files_are_checked(tmp_path: Path, durable: bool) -> None:
    files = PlainFiles(tmp_path, durable=durable, read_back=True)
    rows = random_rows(SHAPE, 2, 0)
    assert [len(chunk) for chunk in rows] == [2, 2]
    assert rows[0] != rows[1]
    files.put({"a": rows[0], "b": rows[1]})
    files.remove("b")
    target = [memoryview(bytearray(SHAPE.layout.segment_bytes)) for _ in range(SHAPE.layers)]
    files.get("a", target)
    assert target == rows[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    raw = bytearray((tmp_path / "a").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(ValueError, match="segment 1"):
        files.get("a", target)
    files.remove("a")
    assert not list(tmp_path.iterdir())


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BenchRow("figure", 1.0, "s")
    for part in ("bench_lookups", "bench_memory_tiers", "bench_files", "bench_promotion", "bench_coalescing"):
        monkeypatch.setattr(f"kvstrata.lab.bench.store.{part}", lambda *given, **named: [row])
    report = run_bench("store", quick=True, seed=3)
    assert (report.bench, report.rows) == ("store", (row,) * 5)
    assert report.environment["seed"] == 3
    assert report.environment["quick"] is True
