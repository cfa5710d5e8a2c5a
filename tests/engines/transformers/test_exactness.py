"""Logits against fp64 are as good as the stock cache's own, wherever the rows are and however the steps are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    CHUNK,
    PREFILL,
    attach,
    budget_of,
    double_logits,
    generate,
    least_budget,
    logits,
    prompt,
    require_within_budget,
    rms,
    stock,
)
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvstrata.engines.transformers.versions import cache_keyword
from kvstrata.errors import Reason, UnsupportedError

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 192, 257, 384, 500)
LAYERS = 4
NEW = 6
TOLERANCE = 1.5
MANY_ROWS = 40


def require_as_good_as_stock(
    model: Any, sequence: torch.Tensor, first: int, ours: torch.Tensor, stocks: torch.Tensor
) -> None:
    """The RMS error of rows from position `first` on is at most 1.5 times the stock cache's.

    Two sums of equal precision err differently on a single row. So the error over many rows is compared with the stock
    error over the same rows, and that of one row with the worst row of the stock cache and of a stock forward.
    """
    truth = double_logits(model, sequence)
    with torch.no_grad():
        forward = model(sequence, use_cache=False).logits[0]
    error = rms(ours - truth[first : first + len(ours)])
    allowed = rms(stocks - truth[first : first + len(stocks)])
    assert error.max() <= TOLERANCE * max(allowed.max(), rms(forward - truth).max())
    if len(ours) == len(stocks) >= MANY_ROWS:
        assert rms(error) <= TOLERANCE * rms(allowed)


@pytest.mark.parametrize(
    ("place", "length", "new"),
    [
        *(("files", length, NEW) for length in LENGTHS),
        *(("memory", length, NEW) for length in LENGTHS[::3]),
        ("files", 250, 50),
        ("memory", 250, 50),
    ],
)
def test_generate_is_as_exact_as_the_stock_cache(
    tiny_llama: Callable[..., Any], tmp_path: Path, place: str, length: int, new: int
) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(length)
    expected = stock(model, ids, new)
    budget = None if place == "memory" else least_budget(model, length + new, tmp_path / "probe")
    with attach(model, tmp_path / "store", budget=budget) as memory:
        ours = generate(model, ids, new, memory.generate_kwargs())
        require_within_budget(memory)
        if place == "files" and length > 4 * CHUNK:
            assert memory.ledger().traffic["file"].moved_bytes > 0
    assert ours.sequences.tolist() == expected.sequences.tolist()
    require_as_good_as_stock(model, expected.sequences, length - 1, logits(ours), logits(expected))


@pytest.mark.parametrize(("extra", "depth"), [(0, 1), (8, 2), (13, 2)])
def test_decoding_streams_layers_ahead_of_their_use(
    tiny_llama: Callable[..., Any], tmp_path: Path, extra: int, depth: int
) -> None:
    """Slots for one layer in flight, for two, and for two with some chunks resident: equal bits to all in memory."""
    model, ids = tiny_llama(layers=LAYERS), prompt(8 * CHUNK + 10)
    with attach(model, tmp_path / "a") as memory:
        expected = logits(generate(model, ids, NEW, memory.generate_kwargs()))
    slots = LAYERS + 8 + extra
    with attach(model, tmp_path / "b", budget=budget_of(model, slots, prefill=CHUNK), prefill_chunk=CHUNK) as memory:
        request = memory.request()
        ours = logits(generate(model, ids, NEW, request.generate_kwargs()))
        ledger, step = memory.ledger(), request.last_step
        assert step is not None
        cold = step.moved_segments // LAYERS
        assert step.moved_segments == cold * LAYERS > 0
        assert request.plan.staged_peak == depth * cold
        assert ledger.staging_bytes == request.plan.staged_peak * memory.layout.segment_bytes
        require_within_budget(memory)
    with attach(model, tmp_path / "c", prefill_chunk=CHUNK) as memory:
        resident = logits(generate(model, ids, NEW, memory.generate_kwargs()))
    assert torch.equal(ours, resident)
    assert torch.allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("length", [1, CHUNK, PREFILL + 1, 3 * PREFILL, 450])
@pytest.mark.parametrize("keep", [0, 1, CHUNK + 3])
def test_forward_calls_return_the_stock_logits(
    tiny_llama: Callable[..., Any], tmp_path: Path, length: int, keep: int
) -> None:
    """Long inputs are cut into slices inside; the caller sees the same rows as from one forward."""
    model, ids = tiny_llama(layers=LAYERS), prompt(length)
    with torch.no_grad():
        expected = model(ids, use_cache=True).logits[0, -keep:]
    for budget in (None, least_budget(model, length, tmp_path / "probe")):
        with attach(model, tmp_path / "store", budget=budget) as memory:
            output = model(ids, past_key_values=memory.request().cache, logits_to_keep=keep)
            assert output.logits.shape[1] == min(keep or length, length)
            assert output[cache_keyword(model)] is memory.latest.cache
            require_within_budget(memory)
        require_as_good_as_stock(model, ids, length - len(expected), output.logits[0], expected)


def test_forward_keeps_the_rows_that_a_tensor_names(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids, keep = tiny_llama(), prompt(300), torch.tensor([0, 131, 299])
    with torch.no_grad():
        expected = model(ids, logits_to_keep=keep).logits
    with attach(model, tmp_path / "store") as memory:
        ours = model(ids, past_key_values=memory.request().cache, logits_to_keep=keep).logits
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=1e-4)


def test_forward_returns_tuples_where_they_are_asked_for(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(300)
    with torch.no_grad():
        expected = model(ids, use_cache=True, return_dict=False)
    with attach(model, tmp_path / "store") as memory:
        ours = model(ids, past_key_values=memory.request().cache, return_dict=False)
    assert isinstance(ours, tuple)
    assert ours[0].shape == expected[0].shape
    assert torch.allclose(ours[0], expected[0], atol=1e-4)


def test_labels_and_hidden_states_of_long_inputs(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(2 * PREFILL + 40)
    with torch.no_grad():
        expected = model(ids, labels=ids, output_hidden_states=True)
    with attach(model, tmp_path / "store") as memory:
        ours = model(ids, past_key_values=memory.request().cache, labels=ids, output_hidden_states=True)
    assert torch.allclose(ours.loss, expected.loss, atol=1e-5)
    assert len(ours.hidden_states) == len(expected.hidden_states)
    assert torch.allclose(ours.hidden_states[-1], expected.hidden_states[-1], atol=1e-4)


def test_embeddings_instead_of_ids(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(200)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = stock(model, ids, NEW)
    with attach(model, tmp_path / "store") as memory:
        ours = model.generate(
            inputs_embeds=embeds, **memory.generate_kwargs(), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert memory.latest.frontier == 200 + NEW - 1
    assert ours[0].tolist() == expected.sequences[0, 200:].tolist()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (100, 100, 1, 56), (64, 64, 64, 65), (7, 250, 1, 2), (257,)])
def test_chunked_prefill_by_the_caller(tiny_llama: Callable[..., Any], tmp_path: Path, sizes: tuple[int, ...]) -> None:
    model, ids = tiny_llama(layers=LAYERS), prompt(sum(sizes))
    cache = DynamicCache(config=model.config)
    with attach(model, tmp_path / "store", budget=least_budget(model, sum(sizes), tmp_path / "probe")) as memory:
        request, start = memory.request(), 0
        for size in sizes:
            part = ids[:, start : start + size]
            with memory.stock():
                expected = model(part, **{cache_keyword(model): cache}).logits[0].detach()
            ours = model(part, past_key_values=request.cache).logits[0]
            require_as_good_as_stock(model, ids, start, ours, expected)
            start += size
            assert request.frontier == start
        assert request.token_ids == ids[0].tolist()


@pytest.mark.parametrize("length", [1, 2, PREFILL, PREFILL + 1, 300])
def test_prefill_then_generate_equals_generate(tiny_llama: Callable[..., Any], tmp_path: Path, length: int) -> None:
    """The same slices, so the same bits."""
    model, ids, seen = tiny_llama("bfloat16"), prompt(length), []
    with attach(model, tmp_path / "store") as memory:
        alone = generate(model, ids, NEW, memory.generate_kwargs())
        request = memory.prefill(ids[0].tolist(), progress=lambda done, total: seen.append((done, total)))
        assert request.frontier == length - 1
        ours = generate(model, ids, NEW, request.generate_kwargs())
    assert torch.equal(logits(ours), logits(alone))
    stops = [*range(PREFILL, length - 1, PREFILL), length - 1] if length > 1 else []
    assert seen == [(stop, length - 1) for stop in stops]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evicted_runs_have_the_bits_of_resident_ones(
    tiny_llama: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    model, ids = tiny_llama(dtype, layers=LAYERS), prompt(520)
    runs = []
    for budget in (None, least_budget(model, 560, tmp_path / "probe")):
        with attach(model, tmp_path / "store", budget=budget) as memory:
            runs.append(logits(generate(model, ids, 40, memory.generate_kwargs())))
    assert torch.equal(*runs)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (6, 2), (6, 1), (9, 3)])
def test_any_grouping_of_heads(tiny_llama: Callable[..., Any], tmp_path: Path, query_heads: int, kv_heads: int) -> None:
    model, ids = tiny_llama(query_heads=query_heads, kv_heads=kv_heads), prompt(200)
    expected = stock(model, ids, NEW)
    with attach(model, tmp_path / "store") as memory:
        ours = generate(model, ids, NEW, memory.generate_kwargs())
    require_as_good_as_stock(model, expected.sequences, 199, logits(ours), logits(expected))


def test_sampling_with_a_seed_draws_the_stock_tokens(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(150)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}
    torch.manual_seed(7)
    expected = stock(model, ids, 30, **options)
    with attach(model, tmp_path / "store") as memory:
        torch.manual_seed(7)
        ours = generate(model, ids, 30, memory.generate_kwargs(), **options)
    assert ours.sequences.tolist() == expected.sequences.tolist()


class _Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class _At(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_streamer_and_stopping_criteria(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids, streamer = tiny_llama(), prompt(70), _Collected()
    expected = stock(model, ids, 4)
    with attach(model, tmp_path / "store") as memory:
        ours = generate(
            model, ids, 50, memory.generate_kwargs(), streamer=streamer, stopping_criteria=[_At(74)]
        ).sequences
    assert ours.tolist() == expected.sequences.tolist()
    assert streamer.tokens == ours[0].tolist()
    assert streamer.ended


def test_several_turns_on_one_request(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, history = tiny_llama(layers=LAYERS), prompt(90)
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with attach(model, tmp_path / "store", budget=least_budget(model, 420, tmp_path / "probe")) as memory:
        request = memory.request()
        for turn in range(4):
            with memory.stock():
                expected = generate(model, history, 10, cache)
            ours = generate(model, history, 10, request.generate_kwargs())
            assert ours.sequences.tolist() == expected.sequences.tolist()
            require_as_good_as_stock(model, expected.sequences, history.shape[1] - 1, logits(ours), logits(expected))
            assert request.token_ids == ours.sequences[0, :-1].tolist()
            history = torch.cat([ours.sequences, prompt(67, seed=turn + 10)], dim=1)
        assert request.frontier > 4 * CHUNK


def test_a_stock_call_inside_the_block_is_stock_and_says_so(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(90)
    expected = stock(model, ids, NEW)
    with attach(model, tmp_path / "store") as memory:
        generate(model, ids, NEW, memory.generate_kwargs())
        with memory.stock():
            inside = stock(model, ids, NEW)
        for call in (lambda: stock(model, ids, NEW), lambda: model.generate(ids, max_new_tokens=NEW)):
            with pytest.raises(UnsupportedError, match="DynamicCache") as refusal:
                call()
            assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED
        assert memory.latest.frontier == 90 + NEW - 1
    assert torch.equal(logits(inside), logits(expected))


def test_two_requests_take_memory_from_each_other(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """The budget holds one of them; each step of one evicts the other."""
    model = tiny_llama(layers=LAYERS)
    prompts = [prompt(5 * CHUNK + 3, seed=5), prompt(5 * CHUNK + 40, seed=6)]
    expected = [stock(model, ids, 12) for ids in prompts]
    budget = budget_of(model, 2 * LAYERS + 3 * LAYERS + 6, prefill=CHUNK)
    with attach(model, tmp_path / "store", budget=budget, prefill_chunk=CHUNK) as memory:
        requests = [memory.request() for _ in prompts]
        outputs: list[list[torch.Tensor]] = [[], []]
        for request, ids in zip(requests, prompts, strict=True):
            memory.prefill(ids[0].tolist(), request)
        following = [ids[:, -1:] for ids in prompts]
        for _ in range(12):
            for index, request in enumerate(requests):
                step = model(following[index], past_key_values=request.cache).logits[:, -1]
                outputs[index].append(step)
                following[index] = step.argmax(-1, keepdim=True)
        assert memory.ledger().traffic["file"].moved_bytes > 0
        require_within_budget(memory)
    for index, ids in enumerate(prompts):
        require_as_good_as_stock(
            model, expected[index].sequences, ids.shape[1] - 1, torch.cat(outputs[index]), logits(expected[index])
        )


def test_requests_with_a_common_prefix_share_slots(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, common = tiny_llama(), prompt(3 * CHUNK)
    tails = [prompt(CHUNK + 9, seed=seed) for seed in (8, 9)]
    whole = [torch.cat([common, tail], dim=1) for tail in tails]
    expected = [stock(model, ids, NEW) for ids in whole]
    with attach(model, tmp_path / "store") as memory:
        first, second = memory.request(), memory.request()
        for request, ids in ((first, whole[0]), (second, whole[1])):
            memory.prefill(ids[0].tolist(), request)
        assert [record.users for record in first.history.chunks] == [2, 2, 2, 1]
        assert len(memory.directory) == 3 + 2
        assert memory.arena.used_slots == 2 * (3 + 2 + 2)
        ours = generate(model, whole[0], NEW, first.generate_kwargs())
        assert ours.sequences.tolist() == expected[0].sequences.tolist()
        first.close()
        assert len(memory.directory) == 4
        ours = generate(model, whole[1], NEW, second.generate_kwargs())
        assert ours.sequences.tolist() == expected[1].sequences.tolist()
        second.close()
        assert len(memory.directory) == 0


@pytest.mark.parametrize("level", ["torch", None])
@pytest.mark.parametrize("chunk", [64, 256])
def test_every_kernel_level_and_chunk_size(
    tiny_llama: Callable[..., Any], tmp_path: Path, level: str | None, chunk: int
) -> None:
    model, ids = tiny_llama(), prompt(600)
    expected = stock(model, ids, NEW)
    with attach(model, tmp_path / "store", chunk_tokens=chunk, prefill_chunk=100, kernel_level=level) as memory:
        ours = generate(model, ids, NEW, memory.generate_kwargs())
    require_as_good_as_stock(model, expected.sequences, 599, logits(ours), logits(expected))


def test_step_receipts_account_for_every_row(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """What entered attention was either in memory or moved there, also in the step that seals a chunk."""
    model, ids = tiny_llama(layers=LAYERS), prompt(4 * CHUNK - 3)
    with attach(model, tmp_path / "store", budget=least_budget(model, 5 * CHUNK, tmp_path / "probe")) as memory:
        request = memory.prefill(ids[0].tolist())
        sealed = 0
        for _ in range(6):
            model(torch.tensor([[5]]), past_key_values=request.cache)
            step = request.last_step
            assert step is not None
            assert step.start + step.rows == step.visible == request.frontier
            row = LAYERS * memory.layout.row_bytes
            assert step.resident_bytes + step.moved_bytes == step.visible * row
            sealed += step.sealed
        assert sealed == 1
