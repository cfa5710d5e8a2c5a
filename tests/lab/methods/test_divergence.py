"""Divergence of next-token distributions, by hand and through live requests that leave rows out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvstrata.contract.budget import Rows
from kvstrata.engines.transformers import attach
from kvstrata.errors import ConfigurationError
from kvstrata.lab.methods.divergence import LiveText, next_token_divergence
from kvstrata.methods.exact_top_k import ExactTopK
from kvstrata.methods.streaming import Streaming

IDS = torch.randint(1, 190, (220,), generator=torch.Generator().manual_seed(3)).tolist()


def test_divergence_by_hand() -> None:
    dense, other = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.5, 0.25]).log() + 7
    kl, agrees = next_token_divergence(dense, other)
    assert kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert not agrees
    assert next_token_divergence(dense, dense.bfloat16())[1]


def test_a_token_that_cannot_come_adds_nothing() -> None:
    kl, _ = next_token_divergence(torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, 0.0]))
    assert kl == pytest.approx(math.log(2))
    assert next_token_divergence(torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, -torch.inf]))[0] == 0


@given(st.integers(0, 1000))
def test_it_is_never_negative_and_zero_only_for_itself(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dense, other = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    assert next_token_divergence(dense, dense)[0] == 0
    assert next_token_divergence(dense, other)[0] > 0


def test_live_methods_diverge_as_far_as_they_leave_rows_out(tmp_path: Path) -> None:
    with attach(tiny_model("llama"), tmp_path, chunk_tokens=64) as memory:
        text = LiveText(memory, IDS, 6)
        assert (text.history, text.dense.shape) == (213, (6, 199))
        none = text.diverge(ExactTopK(), Rows(1000))
        assert none.kl.max() < 1e-9
        assert none.chose.tolist() == [0.0] * 6
        some, few = text.diverge(ExactTopK(), Rows(200)), text.diverge(Streaming(), Rows(69))
        # The first step of a history that came back reads everything, and builds the index.
        assert some.chose.tolist() == few.chose.tolist() == [0.0] + [1.0] * 5
        assert some.kl[0] < 1e-9
        assert 0 < some.kl[1:].mean() < few.kl[1:].mean()
        assert few.dense_surprise == pytest.approx(none.surprise, abs=1e-4)
        assert few.agrees.shape == (6,)
        with torch.no_grad():
            logits = memory.model(torch.tensor([IDS[:215]]), use_cache=False).logits[0, -2:]
        expected = torch.log_softmax(logits.double(), -1)
        assert text.dense[0] == pytest.approx(logits[0], abs=1e-3)
        assert none.dense_surprise[0] == pytest.approx(-float(expected[0, IDS[214]]), abs=1e-3)


def test_a_text_without_a_history_is_refused(tmp_path: Path) -> None:
    with attach(tiny_model("llama"), tmp_path) as memory, pytest.raises(ConfigurationError, match="cannot be had"):
        LiveText(memory, IDS[:7], 6)
