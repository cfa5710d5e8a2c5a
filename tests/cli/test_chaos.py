"""`kvstrata chaos`: on a copy unless told otherwise, with exit codes that a script can use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chunks_and_faults import make_chunk, tree, write_all

from kvstrata.cli.app import run
from kvstrata.store import Store
from kvstrata.store.credit_pool import CreditPool


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store(tmp_path / "store") as opened:
        write_all(opened.tier, [make_chunk(seed) for seed in range(2)])
    return tmp_path / "store"


def chaos(store: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = run(["chaos", "--store", str(store), "--steps", "40", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("options", [(), ("--in-place",)])
def test_a_sound_store(store: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    before = tree(store)
    code, data = chaos(store, capsys, "--seed", "3", *options)
    assert (code, data["ok"], data["failures"]) == (0, True, [])
    assert (data["seed"], data["steps"], data["sampled"], data["in_place"]) == (3, 40, 2, bool(options))
    assert sum(data["injected"].values()) > 5
    assert tree(store) == before


def test_text(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--store", str(store), "--steps", "20", "--inject", "write:0:fill_up", "--rate", "0"]) == 0
    out = capsys.readouterr().out
    assert "every read was right or refused; nothing was lost, nothing leaked" in out
    assert "1 fill_up" in out


def test_a_failure_is_an_exit_code(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CreditPool, "give_back", lambda self, reservation: True)
    code, data = chaos(store, capsys)
    assert (code, data["ok"]) == (1, False)
    assert "credits leaked" in data["failures"][0]["what"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--faults", "corrupt,flood"), "flood"),
        (("--faults", "hang"), "hang"),
        (("--rate", "1.5"), "--rate=1.5"),
        (("--inject", "write:x:lose"), "write:x:lose"),
        (("--inject", "write:1:flood"), "flood"),
    ],
)
def test_what_makes_no_sense(
    store: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], named: str
) -> None:
    code, data = chaos(store, capsys, *options)
    assert (code, data["error"]["reason"]) == (2, "invalid_argument")
    assert named in data["error"]["cause"]


def test_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = chaos(tmp_path / "none", capsys)
    assert (code, data["error"]["reason"]) == (4, "store_missing")
