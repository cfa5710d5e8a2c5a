"""Saved rows come back bit by bit, in this process and in another, or are a miss that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import tree
from engine_cases import CHUNK, attach, chunk_files, generate, least_budget, logits, prompt, rows_of

from kvstrata.errors import Reason, SessionError, StateError
from kvstrata.sessions import SessionStore
from kvstrata.store import Store

NEW = 5
LAYERS = 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [2, 64, 129, 300])
@pytest.mark.parametrize("tight", [False, True])
def test_a_restored_run_has_the_bits_of_the_first(
    tiny_llama: Callable[..., Any], tmp_path: Path, dtype: str, length: int, tight: bool
) -> None:
    model, ids = tiny_llama(dtype, layers=LAYERS), prompt(length)
    budget = least_budget(model, length + NEW, tmp_path / "probe") if tight else None
    with attach(model, tmp_path / "store") as memory:
        first = generate(model, ids, NEW, memory.generate_kwargs())
        saved = memory.save("talk")
    assert saved.frontier == length + NEW - 1
    assert saved.chunks == -(-saved.frontier // CHUNK)
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request, receipt = memory.restore("talk", ids[0].tolist())
        assert receipt.hit
        assert receipt.restored_tokens == receipt.wanted_tokens == request.frontier == length - 1
        second = generate(model, ids, NEW, request.generate_kwargs())
        assert memory.ledger().tokens_computed == NEW
        assert memory.ledger().tokens_restored == length - 1
    assert torch.equal(logits(first), logits(second))


def test_restored_rows_are_the_saved_bytes(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama("bfloat16", layers=LAYERS), prompt(200)
    with attach(model, tmp_path / "store") as memory:
        generate(model, ids, NEW, memory.generate_kwargs())
        before = rows_of(memory, memory.latest, 200)
        memory.save("talk")
    with attach(model, tmp_path / "store") as memory:
        request, receipt = memory.restore("talk")
        assert receipt.restored_tokens == 200 + NEW - 1
        model(torch.tensor([[9]]), past_key_values=request.cache)
        after = rows_of(memory, request, 200)
    for (key, value), (restored_key, restored_value) in zip(before, after, strict=True):
        assert torch.equal(key, restored_key)
        assert torch.equal(value, restored_value)


_OTHER_PROCESS = """
import sys, torch
sys.path[:0] = [{support!r}]
from engine_cases import attach, generate, logits, prompt
torch.set_num_threads(2)
model = torch.load({model!r}, weights_only=False)
with attach(model, {store!r}) as memory:
    request, receipt = memory.restore("talk")
    assert receipt.hit and receipt.restored_tokens == {stored}, receipt
    ids = torch.cat([torch.tensor([request.token_ids]), prompt({more}, seed=3)], dim=1)
    output = generate(model, ids, {new}, request.generate_kwargs())
    memory.save("talk", request)
torch.save((output.sequences, logits(output)), {out!r})
"""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_restored_elsewhere_extended_and_restored_again(
    tiny_llama: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    """Three saves by three attachments, one in a process of its own; the first snapshot never changes."""
    model, ids, more = tiny_llama(dtype, layers=LAYERS), prompt(150), 70
    torch.save(model, tmp_path / "model.pt")
    store = tmp_path / "store"
    with attach(model, store) as memory:
        first = generate(model, ids, NEW, memory.generate_kwargs())
        memory.save("talk")
        # What the other process will compute, by the request that never left the memory.
        rest = torch.cat([first.sequences[:, :-1], prompt(more, seed=3)], dim=1)
        expected = generate(model, rest, NEW, memory.latest.generate_kwargs())
    older = tree(store)
    script = _OTHER_PROCESS.format(
        support=str(Path(__file__).parents[2] / "support"),
        model=str(tmp_path / "model.pt"),
        store=str(store),
        stored=150 + NEW - 1,
        more=more,
        new=NEW,
        out=str(tmp_path / "out.pt"),
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    sequences, elsewhere = torch.load(tmp_path / "out.pt")
    assert torch.equal(sequences, expected.sequences)
    assert torch.equal(elsewhere, logits(expected))
    assert older.items() <= tree(store).items()
    with attach(model, store) as memory:
        request, receipt = memory.restore("talk")
        assert (receipt.sequence, receipt.restored_tokens) == (2, 154 + more + NEW - 1)
        third = generate(model, sequences, NEW, request.generate_kwargs())
        assert memory.save("talk", request).sequence == 3
        request, receipt = memory.restore("talk", sequence=1)
        assert receipt.restored_tokens == 154
        again = generate(model, rest, NEW, request.generate_kwargs())
        assert torch.equal(logits(again), logits(expected))
        longer, _ = memory.restore("talk", third.sequences[0].tolist(), sequence=3)
        assert torch.equal(
            logits(generate(model, third.sequences, 1, longer.generate_kwargs()))[0],
            logits(generate(model, third.sequences, 1, memory.restore("talk")[0].generate_kwargs()))[0],
        )
    assert older.items() <= tree(store).items()


def test_sessions_with_a_common_prefix_share_files(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, common = tiny_llama(), prompt(2 * CHUNK)
    with attach(model, tmp_path / "store") as memory:
        for name, seed in (("a", 4), ("b", 5)):
            ids = torch.cat([common, prompt(CHUNK + 5, seed=seed)], dim=1)
            receipt = memory.save(name, memory.prefill(ids[0].tolist()))
            assert receipt.frontier == 3 * CHUNK + 4
            assert receipt.chunks == 4
        assert receipt.shared_bytes > 0
    assert len(chunk_files(tmp_path / "store")) == 2 + 2 * 2


def test_restore_takes_the_rows_that_agree_with_the_prompt(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """A prompt that turns off in the middle keeps what came before, and the answer is that of a cold run."""
    model, ids = tiny_llama(layers=LAYERS), prompt(300)
    with attach(model, tmp_path / "store") as memory:
        memory.save("talk", memory.prefill(ids[0].tolist()))
        for turn in (0, 1, CHUNK, CHUNK + 7, 298):
            other = ids.clone()
            other[0, turn] = ids[0, turn] % 255 + 1
            cold = generate(model, other, NEW, memory.generate_kwargs())
            request, receipt = memory.restore("talk", other[0].tolist())
            assert (receipt.reason, receipt.restored_tokens) == (Reason.TOKENS_DIFFER, turn)
            assert f"token {turn}:" in receipt.detail
            warm = generate(model, other, NEW, request.generate_kwargs())
            assert warm.sequences.tolist() == cold.sequences.tolist()
            assert torch.allclose(logits(warm), logits(cold), atol=1e-4)


@pytest.mark.parametrize(
    ("field", "saved", "wanted"),
    [
        ("model.artefact", {"model_id": "m"}, {"model_id": "n"}),
        ("model.adapters", {"model_id": "m"}, {"model_id": "m", "adapters": ("style@2",)}),
        ("namespace.salt", {"model_id": "m", "salt": "a"}, {"model_id": "m", "salt": "b"}),
        ("chunk_tokens", {"model_id": "m"}, {"model_id": "m", "chunk_tokens": 128}),
    ],
)
def test_another_context_is_a_miss(
    tiny_llama: Callable[..., Any], tmp_path: Path, field: str, saved: dict[str, Any], wanted: dict[str, Any]
) -> None:
    model, ids = tiny_llama(), prompt(200)
    with attach(model, tmp_path / "store", **saved) as memory:
        memory.save("talk", memory.prefill(ids[0].tolist()))
    with attach(model, tmp_path / "store", **wanted) as memory:
        request, receipt = memory.restore("talk", ids[0].tolist())
        assert receipt.reason is Reason.CONTEXT_DIFFERS
        assert receipt.difference is not None
        assert receipt.difference.field == field
        assert (receipt.restored_tokens, receipt.read_bytes, request.frontier) == (0, 0, 0)
        assert memory.arena.used_slots == 0


@pytest.mark.parametrize(
    "field", ["model.artefact", "abi.dtype", "abi.kv_heads", "position.theta", "position.parameters"]
)
def test_rows_of_another_model_are_a_miss(tiny_llama: Callable[..., Any], tmp_path: Path, field: str) -> None:
    ids = prompt(200)[0].tolist()
    first, other, name = tiny_llama(), tiny_llama(), {"model_id": "m"}
    if field == "model.artefact":
        name = {}
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    elif field == "abi.dtype":
        other = tiny_llama("bfloat16")
    elif field == "abi.kv_heads":
        other = tiny_llama(kv_heads=3)
    elif field == "position.theta":
        other = tiny_llama(theta=20000.0)
    else:
        other.config.rope_parameters["factor"] = 2.0
    with attach(first, tmp_path / "store", **name) as memory:
        memory.save("talk", memory.prefill(ids))
    with attach(other, tmp_path / "store", **name) as memory:
        request, receipt = memory.restore("talk", ids)
        assert receipt.reason is Reason.CONTEXT_DIFFERS
        assert receipt.difference is not None
        assert receipt.difference.field == field
        assert request.frontier == 0


def test_another_tenant_does_not_know_the_session(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    with attach(model, tmp_path / "store", tenant="a") as memory:
        memory.save("talk", memory.prefill(prompt(80)[0].tolist()))
    with attach(model, tmp_path / "store", tenant="b") as memory:
        with pytest.raises(SessionError) as refusal:
            memory.restore("talk")
        assert refusal.value.reason is Reason.SESSION_UNKNOWN


def test_a_failed_restore_leaves_no_request(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """`latest` is still the request that the user works with."""
    model = tiny_llama()
    with attach(model, tmp_path / "store") as memory:
        request = memory.prefill(prompt(80)[0].tolist())
        with pytest.raises(SessionError):
            memory.restore("nobody")
        assert memory.latest is request


def test_saving_twice_writes_no_row_twice(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    with attach(model, tmp_path / "store") as memory:
        memory.prefill(prompt(200)[0].tolist())
        memory.save("talk")
        files = chunk_files(tmp_path / "store")
        second = memory.save("talk")
        assert second.written_bytes == 0
        assert second.sequence == 2
        assert chunk_files(tmp_path / "store") == files


def test_nothing_to_save(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    with attach(model, tmp_path / "store") as memory:
        with pytest.raises(StateError) as refusal:
            memory.save("talk")
        assert refusal.value.reason is Reason.NOT_COMMITTED
        request = memory.request()
        with pytest.raises(StateError) as refusal:
            memory.save("talk", request)
        assert refusal.value.reason is Reason.NOT_COMMITTED
        model(inputs_embeds=model.get_input_embeddings()(prompt(5)), past_key_values=request.cache)
        with pytest.raises(StateError, match="embeddings") as refusal:
            memory.save("talk", request)
        assert refusal.value.reason is Reason.NOT_COMMITTED
        with pytest.raises(SessionError) as unnamed:
            memory.save("", memory.prefill([1, 2, 3]))
        assert unnamed.value.reason is Reason.SESSION_NAME_INVALID
    with Store(tmp_path / "store") as store:
        assert SessionStore(store).list() == []


def test_a_read_only_store_serves_and_does_not_save(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(200)
    with attach(model, tmp_path / "store") as memory:
        first = generate(model, ids, NEW, memory.generate_kwargs())
        memory.save("talk")
    content = tree(tmp_path / "store")
    with Store(tmp_path / "store", read_only=True) as store, attach(model, store) as memory:
        request, receipt = memory.restore("talk", ids[0].tolist())
        assert receipt.hit
        second = generate(model, ids, NEW, request.generate_kwargs())
        with pytest.raises(OSError, match="reading only"):
            memory.save("talk", request)
    assert torch.equal(logits(first), logits(second))
    assert tree(tmp_path / "store") == content


def test_a_chunk_that_went_missing_is_stored_again_by_the_save(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt(200)
    with attach(model, tmp_path / "store") as memory:
        memory.prefill(ids[0].tolist())
        memory.save("before")
        chunk_files(tmp_path / "store")[0].unlink()
        memory.save("after")
        _, receipt = memory.restore("after")
        assert receipt.hit
