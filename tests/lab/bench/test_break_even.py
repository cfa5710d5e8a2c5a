"""The break-even of choosing rows, on a tiny model: which figures it has, not how large they are."""

from __future__ import annotations

from pathlib import Path

from tiny_chat_model import write_tiny_chat_model

from kvstrata.lab.bench import run_bench


def test_each_place_has_its_ratio_and_its_break_even(tmp_path: Path) -> None:
    model = str(write_tiny_chat_model(tmp_path / "model", layers=3))
    said: list[str] = []
    report = run_bench("break-even", source=model, lengths=(300,), rounds=2, rows=96, progress=said.append)
    assert said == ["device, 300 tokens", "files, 300 tokens", "link, 300 tokens"]
    rows = {row.name: row for row in report.rows}
    assert set(rows) == {f"break_even.{place}{end}" for place in ("device", "files", "link") for end in ("", ".300")}
    assert rows["break_even.link.300"].evidence == "synthetic"
    for place in ("device", "files", "link"):
        row = rows[f"break_even.{place}.300"]
        assert row.ratio is not None
        assert row.ratio > 0
        assert rows[f"break_even.{place}"].value in (0.0, 300.0)
    moved = {line[0]: line[5:] for line in report.tables[0].lines}
    assert moved["device"] == (0.0, 0.0)
    for place in ("files", "link"):
        choosing, exact = moved[place]
        assert isinstance(choosing, float)
        assert isinstance(exact, float)
        assert 0 < choosing < exact
