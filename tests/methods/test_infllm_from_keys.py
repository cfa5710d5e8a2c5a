from __future__ import annotations

import pytest
import torch
from infllm_reference import Conversation

from kvstrata.contract.budget import Fraction, Persistent, Rows
from kvstrata.contract.method import Owner, QueryVariant
from kvstrata.errors import ConfigurationError
from kvstrata.kernels.selected import selected_state
from kvstrata.methods.infllm_from_keys import InfLLMFromKeys
from kvstrata.methods.infllm_index import RepresentativeRule
from kvstrata.methods.interface import Index

METHOD = InfLLMFromKeys(block_size=8, representatives=2, top_k=3)


def _built(run: Conversation, stop: int) -> Conversation:
    run.index = run.method.build(run.context(0, stop), 0, None)
    return run


def test_an_index_begins_on_stored_keys_and_grows_to_what_would_be_built() -> None:
    whole = _built(Conversation.random(METHOD, 900, Rows(60), Persistent(4, 24)), 900)
    grown = _built(Conversation.random(METHOD, 900, Rows(60), Persistent(4, 24)), 100)
    for stop in (101, 102, 400, 899, 900):
        selection = grown.step(stop)
        assert selection.variant is QueryVariant.ACTUAL
    assert grown.index is not None
    assert whole.index is not None
    assert torch.equal(grown.index.members, whole.index.members)
    assert torch.equal(grown.index.unit_keys, whole.index.unit_keys)
    assert grown.index.frontier == whole.index.frontier == 900


def test_representatives_speak_for_their_unit() -> None:
    run = _built(Conversation.random(METHOD, 200, Rows(60), Persistent(4, 24)), 200)
    assert run.index is not None
    assert run.index.units == 21
    for unit in range(21):
        keys = run.keys[:, 4 + 8 * unit : 12 + 8 * unit]
        wanted = (keys @ keys.mean(1).unsqueeze(-1)).squeeze(-1).topk(2).indices.sort(-1).values
        assert torch.equal(run.index.members[:, unit] - 4 - 8 * unit, wanted)


@pytest.mark.parametrize("owner", list(Owner))
def test_a_budget_of_all_rows_is_exact(owner: Owner) -> None:
    method = InfLLMFromKeys(block_size=8, representatives=2, selection_owner=owner)
    run = _built(Conversation.random(method, 100, Fraction(1.0), Persistent(4, 24)), 99)
    got = run.attend(run.step(100), 99, 100)
    exact = selected_state(run.queries[:, 99:].contiguous(), run.keys, run.values, run.geometry.scale)
    torch.testing.assert_close(got, exact.output(), rtol=1e-4, atol=1e-5)


def test_only_what_keys_tell_is_used() -> None:
    run = _built(Conversation.random(METHOD, 300, Rows(60), Persistent(4, 24)), 300)
    assert METHOD.observe(run.context(0, 300), 0, None, run.rows(0, 300)) is None
    assert run.index is not None
    assert run.index.queries.nbytes == 0
    assert run.view.positions == set()
    back = METHOD.truncate(run.index, 290)
    assert back is not None
    assert torch.equal(back.members, _built(run, 290).index.members)  # type: ignore[union-attr]
    assert isinstance(back, Index)


def test_what_needs_more_than_keys_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"InfLLMFromKeys\.rule must be KEYS"):
        InfLLMFromKeys(rule=RepresentativeRule.QUERIES)
    with pytest.raises(ConfigurationError, match=r"InfLLMFromKeys\.reposition must be False"):
        InfLLMFromKeys(reposition=True)
