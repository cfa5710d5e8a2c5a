"""Logits of an answer in a file, so that comparing processes costs none of them the memory that is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

__all__ = ["LogitsFile", "logprob_difference"]


class LogitsFile:
    """Handed to `generate` among its logits processors: appends every step's logits as float32, and changes nothing.

    path: replaced when the first step comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mode = "wb"

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: [1, vocabulary]."""
        with self._path.open(self._mode) as file:
            file.write(scores.float().numpy().tobytes())
        self._mode = "ab"
        return scores


def logprob_difference(first: Path, second: Path, tokens: int) -> float:
    """Largest absolute difference of log-probabilities of two files of `tokens` rows each."""
    row = first.stat().st_size // tokens // 4
    if not first.stat().st_size == second.stat().st_size == 4 * tokens * row:
        raise ValueError(f"{first.name} and {second.name} do not both hold {tokens} rows of {row} logits")
    largest = 0.0
    with first.open("rb") as one, second.open("rb") as two:
        for _ in range(tokens):
            rows = (torch.from_numpy(np.fromfile(file, np.float32, row)).double() for file in (one, two))
            a, b = (torch.log_softmax(logits, dim=-1) for logits in rows)
            largest = max(largest, float((a - b).abs().max()))
    return largest
