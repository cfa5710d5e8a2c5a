"""Damaged chunks are recomputed from the tokens: the answer stays, the ledger names the reason, the file comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import flip
from engine_cases import CHUNK, PREFILL, attach, budget_of, generate, least_budget, logits, prompt

from kvstrata.contract.states import FileReplicaState
from kvstrata.engines.transformers.memory import Memory
from kvstrata.errors import DamagedError, Reason
from kvstrata.store import Store
from kvstrata.tiers.files import OsFiles

LAYERS = 3
LENGTH = 6 * CHUNK + 21
NEW = 8

Damage = Callable[[Path], None]


def flip_payload(path: Path) -> None:
    flip(path, path.stat().st_size - 100, bit=3)


def flip_header(path: Path) -> None:
    flip(path, 60)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)


DAMAGES: list[tuple[str, Damage, Reason]] = [
    ("payload", flip_payload, Reason.CHUNK_DAMAGED),
    ("header", flip_header, Reason.CHUNK_DAMAGED),
    ("truncated", truncate, Reason.CHUNK_TRUNCATED),
    ("emptied", lambda path: path.write_bytes(b""), Reason.CHUNK_TRUNCATED),
    ("deleted", Path.unlink, Reason.CHUNK_MISSING),
]
WAYS = pytest.mark.parametrize(("damage", "reason"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])


def verdicts(store: Path) -> set[Reason | None]:
    with Store(store) as opened:
        return {verdict.reason for verdict in opened.verify()}


@WAYS
@pytest.mark.parametrize("index", [0, 3, 6])
def test_damage_before_a_restore(
    tiny_llama: Callable[..., Any], tmp_path: Path, damage: Damage, reason: Reason, index: int
) -> None:
    """Index 6 is the open tail. Chunks before the damaged one are kept; the rest is computed in the same slices."""
    model, ids = tiny_llama("bfloat16", layers=LAYERS), prompt(LENGTH)
    with attach(model, tmp_path / "store") as memory:
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        expected = generate(model, ids, NEW, request.generate_kwargs())
        path = memory.store.tier.path(
            request.history.chunks[index].digest if index < 6 else _tail_digest(memory, "talk")
        )
    damage(path)
    with attach(model, tmp_path / "store") as memory:
        request, receipt = memory.restore("talk", ids[0].tolist())
        missed = reason if receipt.reason is not None else None
        if missed is None:
            # The header was sound: the payload is found out when a step reads it.
            assert receipt.restored_tokens == LENGTH - 1
            assert damage is flip_payload
            assert index < 6
        else:
            assert receipt.reason is reason
            assert receipt.restored_tokens == index * CHUNK
        ours = generate(model, ids, NEW, request.generate_kwargs())
        ledger = memory.ledger()
        assert ours.sequences.tolist() == expected.sequences.tolist()
        if index * CHUNK % PREFILL == 0:
            assert torch.equal(logits(ours), logits(expected))
        else:
            assert torch.allclose(logits(ours), logits(expected), atol=0.5)
        if missed is None:
            assert [item.reason for item in ledger.recomputes] == [Reason.CHUNK_DAMAGED]
            assert (ledger.recomputes[0].start, ledger.recomputes[0].tokens) == (
                index * CHUNK,
                LENGTH - 1 - index * CHUNK,
            )
            assert ledger.tokens_recomputed == LENGTH - 1 - index * CHUNK
            assert ledger.tokens_restored == index * CHUNK
        memory.save("talk", request)
        _, receipt = memory.restore("talk")
        assert receipt.hit
    assert verdicts(tmp_path / "store") == {None}


def _tail_digest(memory: Memory, name: str) -> bytes:
    from kvstrata.sessions import SessionStore

    return SessionStore(memory.store).load(name).chunks[-1]


@WAYS
@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("cached", [True, False])
def test_damage_between_steps_of_a_running_request(
    tiny_llama: Callable[..., Any], tmp_path: Path, damage: Damage, reason: Reason, index: int, cached: bool
) -> None:
    """The chunk is not in memory, so that the next step meets the damage in the middle of a layer."""
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with attach(model, tmp_path / "undamaged", budget=budget) as memory:
        request = memory.prefill(ids[0].tolist())
        expected = generate(model, ids, NEW, request.generate_kwargs())
    with attach(model, tmp_path / "store", budget=budget) as memory:
        request = memory.prefill(ids[0].tolist())
        head = generate(model, ids, 3, request.generate_kwargs()).sequences
        record = request.history.chunks[index]
        memory.save("talk")
        request.plan.yield_memory()
        if not cached:
            memory._attached().files.close()
        damage(memory.store.tier.path(record.digest))
        ours = generate(model, head, NEW - 3, request.generate_kwargs())
        assert ours.sequences.tolist() == expected.sequences.tolist()
        assert torch.allclose(logits(ours), logits(expected)[3:], atol=1e-4)
        ledger = memory.ledger()
        if not cached or damage not in (Path.unlink, flip_header):
            # An open descriptor outlives the name, and a header is read once.
            assert [item.reason for item in ledger.recomputes] == [reason]
            assert ledger.tokens_recomputed == LENGTH + 2 - index * CHUNK == ledger.recomputes[0].tokens
            assert record.digest.hex()[:16] in ledger.recomputes[0].detail
        assert ledger.peak_device_bytes <= budget
        memory.save("talk", request)
        again = request.history.chunks[index]
        assert again.digest == record.digest
        assert again.file is FileReplicaState.PUBLISHED
        assert memory.restore("talk")[1].hit or cached


def test_a_foreign_chunk_under_another_name(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, ids, other = tiny_llama(layers=LAYERS), prompt(LENGTH), prompt(LENGTH, seed=44)
    with attach(model, tmp_path / "store") as memory:
        expected = generate(model, ids, NEW, memory.generate_kwargs())
        memory.save("talk")
        mine = memory.latest.history.chunks[2].digest
        stranger = memory.prefill(other[0].tolist())
        memory.save("other")
        theirs = stranger.history.chunks[2].digest
        tier = memory.store.tier
        tier.path(mine).write_bytes(tier.path(theirs).read_bytes())
    with attach(model, tmp_path / "store") as memory:
        request, receipt = memory.restore("talk", ids[0].tolist())
        assert (receipt.reason, receipt.restored_tokens) == (Reason.CHUNK_FOREIGN, 2 * CHUNK)
        ours = generate(model, ids, NEW, request.generate_kwargs())
        assert ours.sequences.tolist() == expected.sequences.tolist()
        memory.save("talk", request)
        assert memory.restore("talk", ids[0].tolist())[1].hit


def test_two_requests_survive_the_damage_of_a_chunk_they_share(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, common = tiny_llama(layers=LAYERS), prompt(4 * CHUNK)
    whole = [torch.cat([common, prompt(50, seed=seed)], dim=1) for seed in (8, 9)]
    with attach(model, tmp_path / "undamaged") as memory:
        expected = [generate(model, ids, NEW, memory.generate_kwargs()).sequences.tolist() for ids in whole]
    budget = budget_of(model, LAYERS * 4 + 12)
    with attach(model, tmp_path / "store", budget=budget) as memory:
        requests = [memory.prefill(ids[0].tolist()) for ids in whole]
        memory.save("a", requests[0])
        memory.save("b", requests[1])
        for request in requests:
            request.plan.yield_memory()
        record = requests[0].history.chunks[1]
        assert record is requests[1].history.chunks[1]
        memory._attached().files.close()
        flip_payload(memory.store.tier.path(record.digest))
        for ids, request, tokens in zip(whole, requests, expected, strict=True):
            assert generate(model, ids, NEW, request.generate_kwargs()).sequences.tolist() == tokens
        memory.save("a", requests[0])
        memory.save("b", requests[1])
        assert memory.restore("a")[1].hit
        assert memory.restore("b")[1].hit
    assert verdicts(tmp_path / "store") == {None}


def test_rows_from_embeddings_cannot_be_recomputed(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Their tokens are not known: the damage is an error, never a history with a hole."""
    model, ids = tiny_llama(layers=LAYERS), prompt(LENGTH)
    with attach(model, tmp_path / "store", budget=budget_of(model, LAYERS * 5 + 6)) as memory:
        request = memory.prefill(ids[0].tolist())
        model(inputs_embeds=model.get_input_embeddings()(prompt(4)).detach(), past_key_values=request.cache)
        frontier = request.frontier
        memory.publisher.wait()
        request.plan.yield_memory()
        memory._attached().files.close()
        flip_payload(memory.store.tier.path(request.history.chunks[1].digest))
        with pytest.raises(DamagedError) as failure:
            model(torch.tensor([[3]]), past_key_values=request.cache)
        assert failure.value.reason is Reason.CHUNK_DAMAGED
        assert request.frontier == frontier


class _Rotten(OsFiles):
    """Published chunk files never read back right: every read of them flips a bit."""

    def __init__(self) -> None:
        self.rotten = False
        self.published: set[int] = set()

    def open(self, path: Path, flags: int, /) -> int:
        fd = super().open(path, flags)
        self.published.discard(fd)
        if "chunks" in path.parts:
            self.published.add(fd)
        return fd

    def preadv(self, fd: int, buffers: Any, offset: int, /) -> int:
        import os

        done = os.preadv(fd, buffers, offset)
        if self.rotten and fd in self.published and offset >= 4096:
            buffers[0][0] ^= 1
        return done


def test_a_disk_that_never_reads_right_ends_in_an_error(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Recomputing helps once; a chunk that is damaged again each time must not be tried for ever."""
    model, ids, files = tiny_llama(layers=LAYERS), prompt(LENGTH), _Rotten()
    budget = least_budget(model, LENGTH + NEW, tmp_path / "probe")
    with attach(model, tmp_path / "undamaged", budget=budget) as memory:
        expected = generate(model, ids, NEW, memory.generate_kwargs())
    with Store(tmp_path / "store", files=files) as store, attach(model, store, budget=budget) as memory:
        request = memory.prefill(ids[0].tolist())
        files.rotten = True
        with pytest.raises(DamagedError):
            generate(model, ids, NEW, request.generate_kwargs())
        files.rotten = False
        ours = generate(model, ids, NEW, request.generate_kwargs())
        assert ours.sequences.tolist() == expected.sequences.tolist()
