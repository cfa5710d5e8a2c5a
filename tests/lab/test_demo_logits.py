"""Logits go through a file unchanged, and any difference is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvstrata.lab.demo_logits import LogitsFile, logprob_difference


def written(path: Path, logits: torch.Tensor) -> Path:
    recorder = LogitsFile(path)
    for row in logits:
        assert recorder(torch.zeros(1, 1, dtype=torch.long), row[None]) is not None
    return path


def test_rows_come_back_and_differences_are_measured(tmp_path: Path) -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(0))
    other = logits.clone()
    other[3, 17] += 0.25
    first, second = written(tmp_path / "a", logits), written(tmp_path / "b", other)
    assert logprob_difference(first, first, 5) == 0.0
    expected = (torch.log_softmax(logits.double(), -1) - torch.log_softmax(other.double(), -1)).abs().max()
    assert logprob_difference(first, second, 5) == pytest.approx(float(expected), abs=1e-12)
    assert logprob_difference(written(tmp_path / "c", logits.bfloat16()), written(tmp_path / "c", logits), 5) == 0.0


def test_files_of_other_lengths_are_refused(tmp_path: Path) -> None:
    logits = torch.zeros(3, 8)
    first, second = written(tmp_path / "a", logits), written(tmp_path / "b", logits[:2])
    with pytest.raises(ValueError, match="do not both hold 3 rows"):
        logprob_difference(first, second, 3)
    with pytest.raises(ValueError, match="do not both hold 2 rows"):
        logprob_difference(first, second, 2)
