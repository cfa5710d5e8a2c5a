"""The store's benchmark has a row for every figure, with its goal, and counts what it says it counts."""

from __future__ import annotations

from kvstrata.lab.bench import run_bench


def test_rows_goals_and_what_sharing_saves() -> None:
    said: list[str] = []
    report = run_bench("store", progress=said.append, chunks=500, rounds=2, sizes=(64 << 10,))
    rows = {row.name: row for row in report.rows}
    assert len(said) == 3
    assert rows["store.500.lookups"].baseline == 200_000
    assert rows["store.500.entry"].goal.startswith("<= 500 bytes")
    goals = {name for name, row in rows.items() if row.goal.startswith(">= 0.85")}
    assert goals == {
        *(f"store.65536.{tier}.{way}" for tier in ("device", "host", "files") for way in ("put", "get")),
        "store.65536.files.durable.put",
    }
    assert all(row.met is (row.ratio >= 0.85) for row in report.rows if row.ratio is not None and row.name in goals)
    assert rows["store.promotion.p99"].value >= rows["store.promotion.p50"].value > 0
    shared = rows["store.coalescing.8_requests"]
    assert (shared.value, shared.baseline, shared.ratio) == (24 * 196608, 8 * 24 * 196608, 1 / 8)
    assert report.to_json()["bench"] == "store"
