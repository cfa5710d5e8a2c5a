"""What a method knows of a history is about the rows that are there, not those taken back or half taken in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import attach

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.methods.infinigen import InfiniGen
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.infllm_from_keys import InfLLMFromKeys
from kvstrata.methods.infllm_index import RepresentativeRule
from kvstrata.methods.magicpig import MagicPIG
from kvstrata.methods.quest import Quest
from kvstrata.methods.row_buffer import RowBuffer

KEEP = Persistent(sinks=2, recent=9)
METHODS = [
    Quest(page_size=8, dense_layers=0),
    MagicPIG(bits=4, tables=30, dense_layers=()),
    InfiniGen(dense_layers=0, cap_share=1.0),
    InfLLM(block_size=8, representatives=2),
    InfLLM(block_size=8, representatives=2, rule=RepresentativeRule.WEIGHTS),
    InfLLMFromKeys(block_size=8, representatives=2),
]
NAMES = ["quest", "magicpig", "infinigen", "infllm", "infllm-weights", "infllm-from-keys"]
every_method = pytest.mark.parametrize("method", METHODS, ids=NAMES)


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(1, 190, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(model: Any, request: Any, ids: Sequence[int], step: int) -> torch.Tensor:
    """The last logits of each step."""
    with torch.no_grad():
        pieces = [list(ids[first : first + step]) for first in range(0, len(ids), step)]
        return torch.stack([model(torch.tensor([p]), **request.generate_kwargs()).logits[0, -1] for p in pieces])


def choosing(model: Any, store: Path, method: Any, **changes: Any) -> Any:
    given = {"budget": Rows(40), "persistent": KEEP, "min_history": 64} | changes
    return attach(model, store, method=method, mode="approximate", **given)


def outcomes(request: Any) -> set[LayerOutcome]:
    return {layer.outcome for layer in request.last_step.selections[0].layers}


def require_same_as_fresh(model: Any, memory: Any, request: Any, cut: list[int], new: list[int], prompt: int) -> None:
    """`request` has the rows of `cut`; `prompt` tokens of `new` are read as a prompt, the others one by one."""

    def go_on(target: Any) -> torch.Tensor:
        if prompt:
            feed(model, target, new[:prompt], prompt)
        return feed(model, target, new[prompt:], 1)

    fresh = memory.request()
    feed(model, fresh, cut, len(cut))
    ours, expected = go_on(request), go_on(fresh)
    assert outcomes(fresh) == {LayerOutcome.SELECTED}
    if outcomes(request) == {LayerOutcome.MISSING}:
        # Without its evidence a method reads everything.
        fresh = memory.request(mode="exact")
        feed(model, fresh, cut, len(cut))
        expected = go_on(fresh)
    else:
        assert outcomes(request) == {LayerOutcome.SELECTED}
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@every_method
@pytest.mark.parametrize(("min_history", "prompt"), [(64, 0), (305, 210)], ids=["at-once", "later"])
def test_a_prompt_that_was_cut_back_goes_on(
    method: Any, min_history: int, prompt: int, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model, ids, new = tiny_llama(), tokens(3, 300), tokens(4, prompt + 8)
    with choosing(model, tmp_path, method, min_history=min_history) as memory:
        request = memory.request()
        feed(model, request, ids, 300)
        request.cache.crop(100)
        require_same_as_fresh(model, memory, request, ids[:100], new, prompt)


@every_method
def test_a_prompt_that_failed_has_shown_nothing(method: Any, tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), tokens(3, 120)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    with choosing(model, tmp_path, method) as memory:
        request = memory.request()
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            feed(model, request, tokens(5, 100), 100)
        hook.remove()
        feed(model, request, ids, 120)
        require_same_as_fresh(model, memory, request, ids, tokens(4, 8), 0)


class _Halfway:
    """The n-th call ends in Ctrl-C after it has done its work."""

    def __init__(self, inner: Callable[..., Any], calls: int) -> None:
        self.inner, self.left = inner, calls

    def __call__(self, *args: Any) -> Any:
        result = self.inner(*args)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return result


def test_an_index_that_half_a_change_reached_is_used_no_more(
    tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two parts of one append: the keys are in, the frontier is not."""
    model, ids, new = tiny_llama(), tokens(3, 120), tokens(4, 12)
    with choosing(model, tmp_path, InfLLM(block_size=8, representatives=2)) as memory:
        request = memory.request()
        feed(model, request, ids, 120)
        feed(model, request, new[:2], 1)
        with monkeypatch.context() as patch:
            patch.setattr(RowBuffer, "append", _Method(_Halfway(RowBuffer.append, 3)))
            with pytest.raises(KeyboardInterrupt):
                feed(model, request, new[2:3], 1)
        assert request.frontier == 122
        feed(model, request, new[2:], 1)
        first, second = request.last_step.selections[0].layers
        assert (first.outcome, second.outcome) == (LayerOutcome.SELECTED, LayerOutcome.MISSING)


def test_an_index_whose_building_was_interrupted_is_used_no_more(
    tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building may take over what the evidence is in: after half of it, there is no evidence."""
    model, ids, new = tiny_llama(), tokens(3, 120), tokens(4, 6)
    with choosing(model, tmp_path, InfiniGen(dense_layers=0), min_history=121) as memory:
        request = memory.request()
        feed(model, request, ids, 120)
        with monkeypatch.context() as patch:
            patch.setattr(InfiniGen, "build", _Method(_Halfway(InfiniGen.build, 2)))
            with pytest.raises(KeyboardInterrupt):
                feed(model, request, new[:1], 1)
        assert request.frontier == 120
        feed(model, request, new, 1)
        outcomes = [layer.outcome for layer in request.last_step.selections[0].layers]
        assert outcomes == [LayerOutcome.SELECTED, LayerOutcome.MISSING]


class _Method:
    """A callable that is bound like a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return lambda *args: self.call(instance, *args)
