"""Requests that choose rows: the right rows, near or far, under a lineage of their own, and never inside exact ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, budget_of, require_within_budget, rms
from fixed_choice import FixedChoice, stock_choice
from tiny_models import tiny_model
from transformers import DynamicCache

from kvstrata.contract.budget import CapFallback, Fraction, Persistent, Rows, Threshold
from kvstrata.contract.method import AnswerClass, ComputeSite, Owner, QueryVariant
from kvstrata.contract.selection_receipts import LayerOutcome
from kvstrata.errors import ConfigurationError, Reason, RetrievalError, StateError, UnsupportedError
from kvstrata.methods.magicpig import MagicPIG

PROMPT = 3 * CHUNK + 7
STEPS = 12
KEEP = Persistent(sinks=2, recent=9)
ALL = Rows(10_000)


def prompt(tokens: int) -> list[int]:
    return torch.randint(1, 190, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def forced(model: Any, ids: list[int], length: int, cache: Callable[[], dict[str, Any]]) -> torch.Tensor:
    """Logits of the positions after `length`, one step each."""
    kwargs = cache()
    with torch.no_grad():
        model(torch.tensor([ids[:length]]), **kwargs)
        return torch.stack([model(torch.tensor([[token]]), **kwargs).logits[0, -1] for token in ids[length:]])


def stock(model: Any, ids: list[int], length: int, method: FixedChoice, dense: tuple[int, ...] = ()) -> torch.Tensor:
    # The first step of one row builds the index and reads everything.
    with stock_choice(model, method, KEEP, length + 2, dense):
        cache = DynamicCache(config=model.config)
        return forced(model, ids, length, lambda: {"past_key_values": cache})


def choosing(model: Any, path: Path, method: FixedChoice, **kwargs: Any) -> Any:
    given: dict[str, Any] = {"budget": ALL, "persistent": KEEP, "min_history": 8} | kwargs
    return attach(model, path, method=method, mode="approximate", **given)


def limited(method: FixedChoice) -> dict[str, Any]:
    return {"budget": Fraction(0.9)}


@pytest.mark.parametrize("of", list(Owner))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "phi3", "gemma3", "gpt_oss", "olmo2"])
def test_the_rows_that_were_chosen_and_no_others_enter_attention(family: str, of: Owner, tmp_path: Path) -> None:
    model, ids = tiny_model(family), prompt(PROMPT + STEPS)
    method = FixedChoice(of=of, step=3, unit=2)
    expected = stock(model, ids, PROMPT, method, dense=(1,))
    with choosing(model, tmp_path, method, dense_layers=[1], **limited(method)) as memory:
        request = memory.request()
        ours = forced(model, ids, PROMPT, request.generate_kwargs)
        step = request.last_step
        assert step is not None
        assert step.contract is AnswerClass.APPROXIMATE
        (receipt,) = step.selections
        outcomes = [layer.outcome for layer in receipt.layers]
        assert LayerOutcome.SELECTED in outcomes
        assert outcomes[1] is LayerOutcome.DENSE
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)
    full = DynamicCache(config=model.config)
    exact = forced(model, ids, PROMPT, lambda: {"past_key_values": full})
    assert (exact[1:] - expected[1:]).abs().max() > 1e-2, "the choice makes a difference here"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("site", list(ComputeSite))
@pytest.mark.parametrize("host", [False, True])
def test_chosen_rows_come_from_wherever_they_are(
    tiny_llama: Callable[..., Any], tmp_path: Path, ahead: bool, site: ComputeSite, host: bool
) -> None:
    model, ids = tiny_llama(layers=4), prompt(8 * CHUNK + STEPS)
    method = FixedChoice(step=5, unit=4, ahead=ahead)
    expected = stock(model, ids, 8 * CHUNK, method)
    slots = 4 + 4 + 8 * 2
    segment = -(-attach_bytes(model) // 4096) * 4096
    extra = {"host_budget": segment * 40} if host else {}
    budget = budget_of(model, slots, prefill=CHUNK)
    limits = {"memory_budget": budget, "prefill_chunk": CHUNK, **extra, **limited(method)}
    with choosing(model, tmp_path, method, **limits) as memory:
        request = memory.request(site=site)
        ours = forced(model, ids, 8 * CHUNK, request.generate_kwargs)
        require_within_budget(memory)
        receipt = request.last_step.selections[0]
        variant = QueryVariant.PREDICTED if ahead else QueryVariant.ACTUAL
        assert {layer.variant for layer in receipt.layers[1:]} == {variant}
        near = sum(layer.near_bytes for layer in receipt.layers)
        assert (near > 0) is (host and site is ComputeSite.NEAR_DATA)
        assert set(receipt.read_bytes) <= {"host", "files"}
        assert receipt.read_bytes or near
        assert any(layer.preserved_not_resident for layer in receipt.layers)
        if not near:
            assert receipt.read_amplification > 1
        ledger = memory.ledger()
        request.close()
        assert memory.arena.used_slots == 0
        if memory.host is not None:
            assert not any(memory.host.arena._holders), "nothing is held after a step"
        assert ledger.peak_device_bytes <= budget
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)


def attach_bytes(model: Any) -> int:
    from kvstrata.engines.transformers.context import segment_layout

    return segment_layout(model, CHUNK).segment_bytes


def test_a_log_bias_enters_the_scores_of_its_units(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    method = FixedChoice(step=2, unit=3, of=Owner.QUERY_HEAD, bias=1.5)
    expected = stock(model, ids, PROMPT, method)
    with choosing(model, tmp_path, method, **limited(method)) as memory:
        ours = forced(model, ids, PROMPT, memory.request().generate_kwargs)
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("site", list(ComputeSite))
def test_rows_that_no_slot_is_a_multiple_of_are_chosen_as_well(
    tiny_llama: Callable[..., Any], tmp_path: Path, site: ComputeSite
) -> None:
    model, ids = tiny_llama("bfloat16", kv_heads=1, query_heads=3, head_dim=24), prompt(PROMPT + STEPS)
    assert (-(-attach_bytes(model) // 4096) * 4096) % (24 * 2)
    method = FixedChoice(step=3, unit=2)
    expected = stock(model, ids, PROMPT, method)
    with choosing(model, tmp_path, method, **limited(method)) as memory:
        ours = forced(model, ids, PROMPT, memory.request(site=site).generate_kwargs)
    assert rms(ours - expected).max() < 0.02 * rms(expected).min(), "as far as bfloat16 says the same twice"


def test_a_share_below_the_persistent_rows_reads_everything(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    with attach(model, tmp_path / "exact") as memory:
        expected = forced(model, ids, PROMPT, memory.request().generate_kwargs)
    with choosing(model, tmp_path / "store", FixedChoice(), budget=Fraction(0.05)) as memory:
        request = memory.request()
        ours = forced(model, ids, PROMPT, request.generate_kwargs)
        assert {layer.outcome for layer in request.last_step.selections[0].layers} == {LayerOutcome.SHORT}
        other = memory.request(budget=Fraction(0.1))
        forced(model, ids, PROMPT, other.generate_kwargs)
        assert {layer.outcome for layer in other.last_step.selections[0].layers} == {LayerOutcome.SELECTED}
    assert torch.equal(ours, expected)


def test_short_histories_and_covering_budgets_are_exact(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    with attach(model, tmp_path / "exact") as memory:
        expected = forced(model, ids, PROMPT, memory.request().generate_kwargs)
    cases = {LayerOutcome.SHORT: {"min_history": 4096}, LayerOutcome.COVERED: {}}
    for outcome, extra in cases.items():
        with choosing(model, tmp_path / outcome.value, FixedChoice(), **extra) as memory:
            request = memory.request()
            ours = forced(model, ids, PROMPT, request.generate_kwargs)
            assert request.last_step.contract is AnswerClass.EXACT
            assert {layer.outcome for layer in request.last_step.selections[0].layers} == {outcome}
            assert request.history.context.lineage == "exact"
        assert torch.equal(ours, expected)


def test_an_exact_request_beside_an_approximate_one(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    with attach(model, tmp_path / "exact") as memory:
        expected = forced(model, ids, PROMPT, memory.request().generate_kwargs)
    method = FixedChoice(unit=2)
    with choosing(model, tmp_path / "store", method, **limited(method)) as memory:
        approximate, exact = memory.request(), memory.request(mode="exact")
        first = forced(model, ids, PROMPT, approximate.generate_kwargs)
        second = forced(model, ids, PROMPT, exact.generate_kwargs)
        assert exact.last_step.contract is AnswerClass.EXACT
        assert not exact.last_step.selections
        assert not torch.equal(first, second)
    assert torch.equal(second, expected)


def test_rows_of_approximate_lineage_come_back_only_to_their_own_policy(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model, ids = tiny_llama(), prompt(2 * CHUNK + 3 + 2 * CHUNK)
    method = FixedChoice(unit=2)
    with choosing(model, tmp_path, method, **limited(method)) as memory:
        request = memory.request()
        forced(model, ids, 2 * CHUNK + 3, request.generate_kwargs)
        lineages = [record.identity.context.lineage for record in request.history.chunks]
        assert lineages[:2] == ["exact", "exact"]
        assert all(each.startswith("policy:") for each in lineages[2:])
        memory.save("talk", request)
    with attach(model, tmp_path) as memory:
        request, receipt = memory.restore("talk")
        assert receipt.restored_tokens == 2 * CHUNK
        assert receipt.reason is Reason.LINEAGE_MISMATCH
        assert [record.identity.context.lineage for record in request.history.chunks] == ["exact", "exact"]
    with choosing(model, tmp_path, method, **limited(method)) as memory:
        request, receipt = memory.restore("talk")
        assert receipt.hit
        assert receipt.restored_tokens == len(ids)
        assert request.history.context.lineage == lineages[-1]
        other, receipt = memory.restore("talk", budget=Fraction(0.5))
        assert receipt.reason is Reason.LINEAGE_MISMATCH
        assert other.frontier == 2 * CHUNK
        exact, receipt = memory.restore("talk", mode="exact")
        assert receipt.restored_tokens == 2 * CHUNK
        assert exact.history.context.lineage == "exact"


def test_what_was_taken_back_is_chosen_no_more(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    method = FixedChoice(unit=2)
    with choosing(model, tmp_path, method, **limited(method)) as memory:
        request = memory.request()
        forced(model, ids[:-3], PROMPT, request.generate_kwargs)
        request.cache.crop(-4)
        with torch.no_grad():
            for token in ids[-7:]:
                logits = model(torch.tensor([[token]]), **request.generate_kwargs()).logits[0, -1]
        assert request.token_ids == ids
        plain = memory.request()
        expected = forced(model, ids, PROMPT, plain.generate_kwargs)[-1]
        request.cache.crop(PROMPT - 1)
        assert request.history.context.lineage.startswith("policy:")
        request.cache.crop(3)
        with torch.no_grad():
            model(torch.tensor([[ids[3]]]), **request.generate_kwargs())
        assert request.history.context.lineage == "exact"
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


def test_beams_and_batches_choose_for_each_sequence(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    first, second = prompt(PROMPT), prompt(PROMPT + 5)[5:]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    method = FixedChoice(unit=2)
    with choosing(model, tmp_path, method, **limited(method)) as memory:
        alone = [model.generate(torch.tensor([ids]), **options, **memory.generate_kwargs()) for ids in (first, second)]
        both = model.generate(torch.tensor([first, second]), **options, **memory.generate_kwargs())
        assert torch.equal(both, torch.cat(alone))
        assert len(memory.latest.last_step.selections) == 2
        beams = model.generate(torch.tensor([first]), num_beams=3, **options, **memory.generate_kwargs())
        assert beams.shape == alone[0].shape
        assert memory.latest.last_step.contract is AnswerClass.APPROXIMATE


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"method": FixedChoice(), "budget": Rows(64)}, Reason.APPROXIMATION_NOT_ALLOWED),
        ({"method": FixedChoice(), "budget": Rows(64), "mode": "exact"}, Reason.APPROXIMATION_NOT_ALLOWED),
        ({"budget": Rows(64)}, Reason.INVALID_ARGUMENT),
        ({"mode": "approximate"}, Reason.INVALID_ARGUMENT),
        ({"method": FixedChoice(), "mode": "approximate"}, Reason.INVALID_ARGUMENT),
        ({"method": "quest", "budget": Rows(128), "mode": "approximate"}, Reason.INVALID_ARGUMENT),
        ({"method": FixedChoice(), "budget": Rows(60), "mode": "approximate"}, Reason.INVALID_ARGUMENT),
        ({"method": FixedChoice(), "budget": Rows(128), "mode": "sometimes"}, Reason.INVALID_ARGUMENT),
        (
            {"method": FixedChoice(), "budget": Rows(128), "mode": "approximate", "dense_layers": [99]},
            Reason.INVALID_ARGUMENT,
        ),
        (
            {"method": FixedChoice(), "budget": Rows(128), "mode": "approximate", "min_history": 0},
            Reason.INVALID_ARGUMENT,
        ),
        (
            {"method": FixedChoice(), "budget": Rows(128), "mode": "approximate", "dense_layers": 5},
            Reason.INVALID_ARGUMENT,
        ),
        ({"method": MagicPIG(), "budget": Threshold(3.0, cap=128), "mode": "approximate"}, Reason.INVALID_ARGUMENT),
        ({"budget": "1GiB", "memory_budget": "1GiB"}, Reason.INVALID_ARGUMENT),
    ],
)
def test_what_cannot_be_asked_for(
    tiny_llama: Callable[..., Any], tmp_path: Path, kwargs: dict[str, Any], reason: Reason
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        attach(tiny_llama(), tmp_path, **kwargs)
    assert caught.value.reason is reason


@pytest.mark.parametrize("choice", [{"rows": 3}, {"shadow": 5}, {"site": "gather"}, {"dense_layers": "01"}])
def test_what_a_request_cannot_change(tiny_llama: Callable[..., Any], tmp_path: Path, choice: dict[str, Any]) -> None:
    with choosing(tiny_llama(), tmp_path, FixedChoice()) as memory:
        with pytest.raises(ConfigurationError, match=next(iter(choice))):
            memory.request(**choice)
        assert memory.request(dense_layers=[1]).policy.dense_layers == (1,)


def test_a_compiled_model_chooses_nothing(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        choosing(tiny_llama(), tmp_path, FixedChoice(), budget=Rows(64), compile=True)


@pytest.mark.parametrize("budget", [Rows, Fraction])
def test_a_budget_below_one_row_is_refused(budget: Any) -> None:
    with pytest.raises(ConfigurationError):
        budget(0)


class Greedy(FixedChoice):
    """Wants more than any cap."""

    def _selection(self, ctx: Any, variant: QueryVariant) -> Any:
        import dataclasses

        return dataclasses.replace(super()._selection(ctx, variant), capped=True)


def test_a_cap_falls_back_as_it_says(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    with attach(model, tmp_path / "exact") as memory:
        expected = forced(model, ids, PROMPT, memory.request().generate_kwargs)
    cap = Threshold(1.0, cap=PROMPT - 20, on_cap=CapFallback.EXACT)
    with choosing(model, tmp_path / "store", Greedy(), budget=cap) as memory:
        request = memory.request()
        assert torch.equal(forced(model, ids, PROMPT, request.generate_kwargs), expected)
        assert {layer.outcome for layer in request.last_step.selections[0].layers} == {LayerOutcome.CAP}
        refusing = memory.request(budget=Threshold(1.0, cap=PROMPT - 20, on_cap=CapFallback.REFUSE))
        with pytest.raises(RetrievalError) as caught:
            forced(model, ids, PROMPT, refusing.generate_kwargs)
        assert caught.value.reason is Reason.SELECTION_CAPPED
        assert refusing.frontier == PROMPT + 1, "the step that was refused has left no row"


def test_an_exact_receipt_takes_no_chosen_rows(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    import dataclasses

    model, ids = tiny_llama(), prompt(PROMPT + STEPS)
    with choosing(model, tmp_path, FixedChoice(ahead=True), budget=Fraction(0.9)) as memory:
        request = memory.request()
        forced(model, ids, PROMPT, request.generate_kwargs)
        with pytest.raises(StateError) as caught:
            dataclasses.replace(request.last_step, contract=AnswerClass.EXACT)
        assert caught.value.reason is Reason.APPROXIMATION_NOT_ALLOWED
