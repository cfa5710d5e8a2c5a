"""What cannot be served exactly is refused by name, through the calls that users make, before a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, budget_of, generate, least_budget, logits, prompt, stock

from kvstrata.errors import BudgetError, ConfigurationError, KvstrataError, Reason, StateError, UnsupportedError

NEW = 4


@pytest.fixture
def model(tiny_llama: Callable[..., Any]) -> Any:
    return tiny_llama(positions=512)


@pytest.fixture
def memory(model: Any, tmp_path: Path) -> Any:
    with attach(model, tmp_path / "store") as opened:
        yield opened


def require_still_right(memory: Any, ids: torch.Tensor) -> None:
    """A refusal costs nothing: the memory goes on serving."""
    ours = generate(memory.model, ids, NEW, memory.generate_kwargs())
    with memory.stock():
        assert ours.sequences.tolist() == stock(memory.model, ids, NEW).sequences.tolist()


def test_a_batch_of_another_size_than_before(memory: Any) -> None:
    ids = prompt(20)
    request = memory.prefill(ids[0].tolist())
    with pytest.raises(UnsupportedError, match="batch_repeat_interleave") as refusal:
        generate(memory.model, ids.repeat(2, 1), NEW, request.generate_kwargs())
    assert refusal.value.reason is Reason.BATCH_UNSUPPORTED
    assert request.frontier == 19
    require_still_right(memory, ids)


def test_sequences_that_are_not_there(memory: Any) -> None:
    request = memory.prefill(prompt(20)[0].tolist())
    for call in (
        lambda: request.cache.reorder_cache(torch.tensor([1])),
        lambda: request.cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        lambda: request.cache.batch_repeat_interleave(0),
        lambda: memory.save("talk", request, row=1),
    ):
        with pytest.raises(ConfigurationError) as refusal:
            call()
        assert refusal.value.reason is Reason.INVALID_ARGUMENT
    assert request.frontier == 19


def test_masks_that_change_what_was_said_before(memory: Any) -> None:
    """Rows of the history cannot be hidden later, and padding cannot become rows."""
    ids, mask = prompt(20), torch.ones(1, 20, dtype=torch.long)
    mask[0, :5] = 0
    request = memory.request()
    memory.model(ids, attention_mask=mask, past_key_values=request.cache)
    assert (request.frontier, request.width) == (15, 20)
    later = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], dim=1)
    hiding, showing = later.clone(), torch.ones_like(later)
    hiding[0, 9] = 0
    for wrong, reason in (
        (hiding, Reason.PADDING_UNSUPPORTED),
        (showing, Reason.PADDING_UNSUPPORTED),
        (None, Reason.MASK_UNSUPPORTED),
        (later[:, 1:], Reason.MASK_UNSUPPORTED),
    ):
        with pytest.raises(UnsupportedError) as refusal:
            memory.model(prompt(1), attention_mask=wrong, past_key_values=request.cache)
        assert refusal.value.reason is reason
    memory.model(prompt(1), attention_mask=later, past_key_values=request.cache)
    assert (request.frontier, request.width) == (16, 21)


def test_a_sequence_that_is_all_padding(memory: Any) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(ConfigurationError, match="sequence 1") as refusal:
        memory.model(prompt(20).repeat(2, 1), attention_mask=mask, past_key_values=memory.request().cache)
    assert refusal.value.reason is Reason.EMPTY_PROMPT


def test_masks_of_other_shapes(memory: Any) -> None:
    ids = prompt(5)
    for mask in (torch.ones(1, 1, 5, 5, dtype=torch.bool), {"full_attention": None}):
        with pytest.raises(UnsupportedError) as refusal:
            memory.model(ids, attention_mask=mask, past_key_values=memory.request().cache)
        assert refusal.value.reason is Reason.MASK_UNSUPPORTED


@pytest.mark.parametrize("positions", [[[1, 2, 3]], [[0, 1, 1]], [[0, 2, 4]], [[0]], [[0, 1, 2], [0, 1, 2]]])
def test_positions_that_do_not_continue(memory: Any, positions: list[list[int]]) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        memory.model(prompt(3), position_ids=torch.tensor(positions), past_key_values=memory.request().cache)
    assert refusal.value.reason is Reason.POSITIONS_UNSUPPORTED


def test_a_prompt_that_the_rows_cover_already(memory: Any) -> None:
    """Nothing is left to compute, and `generate` would take the whole prompt for new rows."""
    ids = prompt(30)
    memory.save("talk", memory.prefill(torch.cat([ids, ids[:, :1]], dim=1)[0].tolist()))
    for rows in (30, 12):
        request, _ = memory.restore("talk")
        assert request.frontier == 30
        with pytest.raises(KvstrataError) as refusal:
            generate(memory.model, ids[:, :rows], NEW, request.generate_kwargs())
        assert refusal.value.reason in (Reason.POSITIONS_UNSUPPORTED, Reason.EMPTY_PROMPT)
        assert request.frontier == 30


def test_an_empty_prompt(memory: Any) -> None:
    for call in (
        lambda: memory.prefill([]),
        lambda: memory.model(torch.zeros(1, 0, dtype=torch.long), past_key_values=memory.request().cache),
        lambda: memory.model(past_key_values=memory.request().cache),
    ):
        with pytest.raises(ConfigurationError) as refusal:
            call()
        assert refusal.value.reason is Reason.EMPTY_PROMPT


def test_ids_and_embeddings_at_once(memory: Any) -> None:
    ids = prompt(4)
    embeds = memory.model.get_input_embeddings()(ids)
    with pytest.raises(ConfigurationError) as refusal:
        memory.model(ids, inputs_embeds=embeds, past_key_values=memory.request().cache)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT


def test_more_than_the_context(memory: Any) -> None:
    ids = prompt(513)
    for call in (
        lambda: memory.prefill(ids[0].tolist()),
        lambda: memory.model(ids, past_key_values=memory.request().cache),
    ):
        with pytest.raises(ConfigurationError) as refusal:
            call()
        assert refusal.value.reason is Reason.CONTEXT_EXCEEDED
        assert memory.latest.frontier == 0
    with pytest.raises(ConfigurationError) as refusal:
        generate(memory.model, ids[:, :510], 10, memory.generate_kwargs())
    assert refusal.value.reason is Reason.CONTEXT_EXCEEDED
    assert memory.latest.frontier == 512


def test_attention_weights(memory: Any) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        memory.model(prompt(4), past_key_values=memory.request().cache, output_attentions=True)
    assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED


def test_emptying_the_cache(memory: Any) -> None:
    request = memory.prefill(prompt(20)[0].tolist())
    with pytest.raises(UnsupportedError, match="new request") as refusal:
        request.cache.reset()
    assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED
    assert request.frontier == 19


def test_a_submodule_called_directly(memory: Any) -> None:
    """Stock attention would see the new rows and no history."""
    request = memory.prefill(prompt(20)[0].tolist())
    with pytest.raises(StateError, match="submodules") as refusal:
        memory.model.model(prompt(1), past_key_values=request.cache)
    assert refusal.value.reason is Reason.NOT_COMMITTED
    assert request.frontier == 19


def test_other_tokens_than_the_requests(memory: Any) -> None:
    request = memory.prefill(prompt(20)[0].tolist())
    with pytest.raises(ConfigurationError) as refusal:
        memory.prefill(prompt(30, seed=9)[0].tolist(), request)
    assert refusal.value.reason is Reason.TOKENS_DIFFER


def test_a_closed_request(memory: Any) -> None:
    request = memory.prefill(prompt(20)[0].tolist())
    request.close()
    request.close()
    for call in (
        request.generate_kwargs,
        lambda: memory.prefill([1, 2, 3], request),
        lambda: memory.save("talk", request),
        lambda: memory.model(prompt(1), past_key_values=request.cache),
    ):
        with pytest.raises(StateError) as refusal:
            call()
        assert refusal.value.reason is Reason.CLOSED
    assert memory.arena.used_slots == 0


def test_use_after_the_block(model: Any, tmp_path: Path) -> None:
    with attach(model, tmp_path / "store") as memory:
        request = memory.prefill(prompt(20)[0].tolist())
    for call in (
        memory.request,
        memory.generate_kwargs,
        lambda: memory.prefill([1, 2]),
        lambda: memory.save("talk"),
        lambda: memory.restore("talk"),
        memory.__enter__,
        lambda: model(prompt(1), past_key_values=request.cache),
        lambda: model.generate(prompt(30), past_key_values=request.cache, max_new_tokens=2),
    ):
        with pytest.raises(StateError) as refusal:
            call()
        assert refusal.value.reason is Reason.CLOSED
    memory.close()
    assert "forward" not in vars(model)


def test_before_the_block(model: Any, tmp_path: Path) -> None:
    memory = attach(model, tmp_path / "store")
    for call in (memory.request, lambda: memory.save("talk"), lambda: memory.restore("talk")):
        with pytest.raises(StateError) as refusal:
            call()
        assert refusal.value.reason is Reason.CLOSED
    memory.close()


def test_no_request_yet(memory: Any) -> None:
    with pytest.raises(StateError) as refusal:
        _ = memory.latest
    assert refusal.value.reason is Reason.NOT_COMMITTED


def test_a_request_of_another_memory(memory: Any, tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Its rows come from another model: never attended to by this one."""
    request = memory.prefill(prompt(20)[0].tolist())
    other = tiny_llama(seed=5)
    with attach(other, tmp_path / "other") as second:
        for call in (
            lambda: other(prompt(1), past_key_values=request.cache),
            lambda: second.save("talk", request),
            lambda: second.prefill(prompt(40)[0].tolist(), request),
        ):
            with pytest.raises(StateError) as refusal:
                call()
            assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED
    require_still_right(memory, prompt(20))


def test_a_budget_below_the_least(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """The refusal names a budget that is enough, and not a byte more than that."""
    model = tiny_llama()
    with pytest.raises(BudgetError) as refusal:
        attach(model, tmp_path / "store", budget=1000)
    least = refusal.value.required_bytes
    assert refusal.value.reason is Reason.BUDGET_TOO_SMALL
    assert str(least) in refusal.value.cause
    assert not (tmp_path / "store").exists()
    with attach(model, tmp_path / "store", budget=least) as memory:
        require_still_right(memory, prompt(40))
    with pytest.raises(BudgetError) as refusal:
        attach(model, tmp_path / "store", budget=least - 1)
    assert refusal.value.required_bytes == least


@pytest.mark.parametrize("tokens", [129, 300, 500])
def test_a_prompt_beyond_the_budget(tiny_llama: Callable[..., Any], tmp_path: Path, tokens: int) -> None:
    model, ids = tiny_llama(), prompt(tokens)
    least = least_budget(model, tokens, tmp_path / "store")
    expected = stock(model, ids, 1)
    with attach(model, tmp_path / "store", budget=least) as memory:
        ours = generate(model, ids, 1, memory.prefill(ids[0].tolist()).generate_kwargs())
        assert torch.allclose(logits(ours), logits(expected), atol=1e-4)
    with attach(model, tmp_path / "store", budget=least - 1) as memory:
        with pytest.raises(BudgetError) as refusal:
            memory.prefill(ids[0].tolist())
        assert refusal.value.required_bytes == least
        assert memory.arena.peak_slots == 0


def test_a_budget_that_generation_outgrows(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """The refusal comes when the memory is full; what was computed stays and can be saved and continued elsewhere."""
    model, ids = tiny_llama(), prompt(100)
    expected = stock(model, ids, 200)
    with attach(model, tmp_path / "store", budget=budget_of(model, 2 + 3)) as memory:
        with pytest.raises(BudgetError) as refusal:
            generate(model, ids, 200, memory.generate_kwargs())
        frontier = memory.latest.frontier
        assert frontier % CHUNK == 0
        assert 100 < frontier < 300
        assert refusal.value.required_bytes > memory.budget
        memory.save("talk")
    with attach(model, tmp_path / "store", budget=least_budget(model, 300, tmp_path / "store")) as memory:
        request, receipt = memory.restore("talk")
        assert receipt.restored_tokens == frontier
        ours = generate(model, expected.sequences[:, : frontier + 1], 299 - frontier, request.generate_kwargs())
    assert ours.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("budget", [0, -5, "", "64", "lots", "-1MB", "1e9", "5 parsecs", True, 1.5])
def test_budgets_that_are_none(tiny_llama: Callable[..., Any], tmp_path: Path, budget: Any) -> None:
    expected = BudgetError if budget == "64" else ConfigurationError
    with pytest.raises(expected) as refusal:
        attach(tiny_llama(), tmp_path / "store", budget=budget)
    if expected is ConfigurationError:
        assert refusal.value.reason is Reason.INVALID_ARGUMENT
        assert repr(budget) in refusal.value.cause
