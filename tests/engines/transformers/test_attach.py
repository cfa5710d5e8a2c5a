"""Attaching leaves the model as it was: no forward, no registration, no thread, no descriptor, no memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import attach, generate, logits, patched_layer, prompt, stock
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvstrata
from kvstrata.engines.transformers import parse_bytes
from kvstrata.errors import ConfigurationError, KernelUnavailable, Reason, StateError, StoreError, UnsupportedError
from kvstrata.store import Store


def descriptors() -> set[str]:
    """What this process has open, by number and target; files that come and go with the listing aside."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{link.name} {link.readlink()}")
    return {item for item in found if "/proc/" not in item}


def surroundings(model: Any) -> dict[str, Any]:
    """Everything that attaching could leave behind."""
    return {
        "forward": vars(model).get("forward"),
        "attention": model.config._attn_implementation,
        "functions": sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        "masks": sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": descriptors(),
    }


class OopsError(Exception):
    """What the body of the block does wrong."""


@pytest.mark.parametrize("error", [None, OopsError, KeyboardInterrupt])
@pytest.mark.parametrize("inside", [False, True])
def test_nothing_is_left_behind(
    tiny_llama: Callable[..., Any], tmp_path: Path, error: type[BaseException] | None, inside: bool
) -> None:
    model, ids = tiny_llama(), prompt(200)
    expected, before = stock(model, ids, 3), surroundings(model)
    expected_error = pytest.raises(error) if error is not None else contextlib.nullcontext()
    with expected_error, attach(model, tmp_path / "store", readers=2) as memory:
        generate(model, ids, 3, memory.generate_kwargs())
        memory.save("talk")
        memory.restore("talk")[0].plan.begin_step(1)
        assert surroundings(model) != before
        assert model.config._attn_implementation == before["attention"]
        if error is not None and inside:

            def fail() -> None:
                raise error

            with patched_layer(model, 1, fail):
                generate(model, ids, 3, memory.generate_kwargs())
        elif error is not None:
            raise error
    assert surroundings(model) == before
    assert torch.equal(logits(stock(model, ids, 3)), logits(expected))


def test_the_arena_goes_with_the_block(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Also when the names bound inside the block live on, as they do in a notebook."""
    model = tiny_llama()
    with attach(model, tmp_path / "store") as memory:
        request = memory.prefill(prompt(200)[0].tolist())
        bytes_behind = weakref.ref(memory.arena.backing.memory)
    gc.collect()
    assert bytes_behind() is None
    assert request.closed


def test_attaching_twice(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    with attach(model, tmp_path / "a") as memory:
        before = surroundings(model)
        second = attach(model, tmp_path / "b")
        with pytest.raises(StateError) as refusal:
            second.__enter__()
        assert refusal.value.reason is Reason.ALREADY_ATTACHED
        with pytest.raises(StateError) as refusal:
            memory.__enter__()
        assert refusal.value.reason is Reason.ALREADY_ATTACHED
        assert surroundings(model) == before
        assert generate(model, prompt(20), 2, memory.generate_kwargs()).sequences.shape == (1, 22)
    with attach(model, tmp_path / "b") as memory:
        assert memory.prefill([1, 2, 3]).frontier == 2


def test_two_models_at_once(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    first, second, ids = tiny_llama(), tiny_llama(seed=1), prompt(90)
    with Store(tmp_path / "store") as store, attach(first, store) as one, attach(second, store) as other:
        ours = [generate(model, ids, 4, memory.generate_kwargs()) for model, memory in ((first, one), (second, other))]
        one.save("one")
        other.save("other")
    for model, output in zip((first, second), ours, strict=True):
        assert output.sequences.tolist() == stock(model, ids, 4).sequences.tolist()


def test_a_copy_made_inside_the_block_is_its_own_model(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(20)
    with attach(model, tmp_path / "store") as memory:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.zero_()
            assert not twin(ids).logits.any()
            assert model(ids).logits.any()
        with pytest.raises(StateError) as refusal:
            twin(ids, past_key_values=memory.request().cache)
        assert refusal.value.reason is Reason.OPERATION_UNSUPPORTED


def test_a_store_of_the_caller_stays_open(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        with attach(tiny_llama(), store) as memory:
            memory.save("talk", memory.prefill([1, 2, 3]))
        assert store.usage().sessions == 1


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"chunk_tokens": 100}, ConfigurationError, Reason.INVALID_ARGUMENT),
        ({"chunk_tokens": 0}, ConfigurationError, Reason.INVALID_ARGUMENT),
        ({"prefill_chunk": 0}, ConfigurationError, Reason.INVALID_ARGUMENT),
        ({"readers": 0}, ConfigurationError, Reason.INVALID_ARGUMENT),
        ({"threads": 0}, ConfigurationError, Reason.INVALID_ARGUMENT),
        ({"kernel_level": "abacus"}, (KernelUnavailable, ConfigurationError), None),
    ],
)
def test_a_refused_attachment_opens_nothing(
    tiny_llama: Callable[..., Any], tmp_path: Path, options: dict[str, Any], error: Any, reason: Reason | None
) -> None:
    model, before = tiny_llama(), descriptors()
    with pytest.raises(error) as refusal:
        attach(model, tmp_path / "store", **options)
    assert reason in (None, refusal.value.reason)
    assert descriptors() == before


def test_a_store_that_is_none(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a store")
    with pytest.raises(StoreError) as refusal:
        attach(tiny_llama(), tmp_path / "file")
    assert refusal.value.reason is Reason.STORE_NOT_A_DIRECTORY


def test_a_family_that_is_not_served(tmp_path: Path) -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)).eval()
    with pytest.raises(UnsupportedError) as refusal:
        kvstrata.attach(model, tmp_path / "store")
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED
    assert model.config.model_type in refusal.value.cause
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(1, 1), ("1", 1), ("64MiB", 64 << 20), ("1.5 GB", 1_500_000_000), (" 2kib ", 2048), ("3b", 3)],
)
def test_amounts_of_bytes(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["0", "0.1", "1e3", "MiB", "-1", None, "1 MiB extra"])
def test_amounts_that_are_none(text: Any) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_bytes(text, "max")
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
    assert f"max={text!r}" in refusal.value.cause


@pytest.mark.parametrize("budget", ["99999999999999999GiB", "9" * 30, 10**24])
def test_a_budget_beyond_the_machine_is_refused_at_once(
    tiny_llama: Callable[..., Any], tmp_path: Path, budget: int | str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        kvstrata.attach(tiny_llama("float32"), tmp_path / "store", budget=budget, model_id="tiny")
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
    assert "budget=" in str(refusal.value)
    assert not (tmp_path / "store").exists()
