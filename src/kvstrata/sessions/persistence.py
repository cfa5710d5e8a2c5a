"""A request's rows go to a named snapshot and come back: only whole, verified, and of the same identity.

Sealed chunks are shared by every snapshot that contains them. The open tail is stored as a short chunk of its own; the
request keeps writing to its copy, the stored one never changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvstrata.contract.identity import EXACT, ChunkContext, ChunkIdentity, first_difference
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.receipts import RestoreReceipt, SaveReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import BudgetError, ConfigurationError, DamagedError, Reason, StateError, StoreError
from kvstrata.ports import Clock
from kvstrata.sessions.names import check_name
from kvstrata.sessions.session_store import SessionStore
from kvstrata.sessions.snapshots import Snapshot
from kvstrata.store.buffers import sealed_pages, used_pages
from kvstrata.store.cost_gate import RestoreDecision, RestoreVerdict
from kvstrata.store.history import History
from kvstrata.store.publication import Publisher
from kvstrata.store.store import Store
from kvstrata.tiers.files import WriteOutcome, payload_bytes

__all__ = ["restore_session", "save_session"]


def save_session(
    history: History,
    publisher: Publisher | None,
    store: Store,
    layout: SegmentLayout,
    name: str,
    clock: Clock = time.perf_counter,
) -> SaveReceipt:
    """Store the committed rows of `history` under `name`. Blocks until every chunk is published.

    Errors: `StoreError` when a chunk cannot be written (nothing becomes visible under the name then), `DamagedError`
    when a chunk has been lost and must be computed again, `SessionError` for a name that is not legal, `StateError` for
    an empty history or one whose rows have no token ids.
    """
    start = clock()
    store.require_writable()
    sessions = SessionStore(store)
    check_name(name)
    history.settle()
    if not history.committed:
        raise StateError(Reason.NOT_COMMITTED, "there are no committed rows to save", "run a forward step first")
    if not history.named or publisher is None:
        raise StateError(Reason.NOT_COMMITTED, "rows computed from embeddings have no token ids and cannot be saved")
    before = publisher.totals
    for record in history.chunks:
        if record.file is FileReplicaState.PUBLISHED and not store.tier.has(record.digest):
            history.directory.mark(record, FileReplicaState.REVOKED)
        if record.file is FileReplicaState.PUBLISHED:
            continue
        if record.file is not FileReplicaState.WRITING and record.resident < history.directory.layers:
            raise DamagedError(
                Reason.CHUNK_MISSING,
                f"chunk {record.digest.hex()} is neither whole in memory nor valid in a file",
                "its rows are recomputed from the tokens",
                chunk=record.digest.hex(),
            )
        publisher.submit(record)
    # All are settled before one is reported: a refused save leaves no write behind that fails later.
    for record in history.chunks:
        publisher.wait(record)
    for record in history.chunks:
        if record.file is not FileReplicaState.PUBLISHED:
            raise record.failure or StoreError(Reason.STORE_IO, f"chunk {record.digest.hex()[:16]} was not written")
    chunks = [record.digest for record in history.chunks]
    written = publisher.totals.written_bytes - before.written_bytes
    tail = history.tail_identity()
    if tail is not None:
        backing = history.directory.arena.backing
        segments = [
            sealed_pages(backing.readable(grant.slot), layout, len(tail.token_ids)) for grant in history.tail[0].grants
        ]
        receipt = store.tier.write(tail, layout, segments)
        chunks.append(tail.digest)
        written += 0 if receipt.outcome is WriteOutcome.ALREADY_PRESENT else receipt.payload_bytes
    rows = history.committed
    began = history.approximate_from
    context = history.context if began is None or began < rows else replace(history.context, lineage=EXACT)
    began = began if context is history.context else None
    snapshot = sessions.save(name, context, history.token_ids[:rows], chunks, rows, began)
    total = history.directory.layers * (
        len(history.chunks) * layout.segment_bytes + (payload_bytes(layout, len(tail.token_ids)) if tail else 0)
    )
    return SaveReceipt(name, snapshot.sequence, rows, len(chunks), written, max(0, total - written), clock() - start)


def restore_session(
    history: History,
    store: Store,
    layout: SegmentLayout,
    name: str,
    token_ids: Sequence[int] | None,
    sequence: int | None = None,
    clock: Clock = time.perf_counter,
    decide: Callable[[int], RestoreDecision] | None = None,
    lineage: str = EXACT,
) -> RestoreReceipt:
    """Give the empty `history` the rows of a snapshot, as far as they can be used.

    token_ids: see `Memory.restore`. Opens and verifies the header of every chunk; full chunks stay in files until a
    step reads them, rows of the open tail are read now. decide: asked whether so many rows are worth reading. lineage:
    rows of this one, and of runs under it, are taken as well as exact ones; of others, the exact rows before them are.
    Blocks.
    Errors: `SessionError` for an unknown name or a damaged manifest, `BudgetError` when the tail does not fit.
    """
    start = clock()
    snapshot = SessionStore(store).load(name, history.context.namespace.tenant, sequence)
    stored = snapshot.token_ids
    wanted = len(stored) if token_ids is None else max(0, min(len(stored), len(token_ids) - 1))
    found = snapshot.context.lineage
    difference = first_difference(replace(snapshot.context, lineage=history.context.lineage), history.context)
    reason: Reason | None = None
    detail, read, metadata = "", 0, 0
    if difference is not None:
        reason, detail = Reason.CONTEXT_DIFFERS, str(difference)
    else:
        usable = wanted if token_ids is None else _agreeing(stored, token_ids, wanted)
        if usable < wanted:
            reason = Reason.TOKENS_DIFFER
            detail = f"token {usable}: stored {stored[usable]}, wanted {token_ids[usable] if token_ids else '-'}"
        exact = len(stored) if snapshot.approximate_from is None else snapshot.approximate_from
        if found.partition("/")[0] != lineage and exact < usable:
            usable, reason = exact, Reason.LINEAGE_MISMATCH
            detail = f"rows from {exact} on were computed over a part of the history ({found})"
        if decide is not None and usable:
            decision = decide(usable)
            if decision.verdict is RestoreVerdict.RECOMPUTE:
                usable, reason, detail = 0, decision.reason, decision.detail
        count = -(-usable // history.context.chunk_tokens)
        held = frozenset(store.in_use.hold(snapshot.chunks[:count])).symmetric_difference(snapshot.chunks[:count])
        try:
            read, metadata = _load(history, store, layout, snapshot, usable)
        except (DamagedError, ConfigurationError) as error:
            reason, detail = error.reason, error.cause
            if isinstance(error, DamagedError) and error.chunk and not store.read_only:
                store.tier.revoke(bytes.fromhex(error.chunk))
                _revoke_records(history, bytes.fromhex(error.chunk))
        finally:
            _lease(history, store, held)
    return RestoreReceipt(
        name=name,
        sequence=snapshot.sequence,
        stored_tokens=len(stored),
        wanted_tokens=wanted,
        restored_tokens=history.frontier,
        read_bytes=read,
        metadata_bytes=metadata,
        seconds=clock() - start,
        reason=reason,
        detail=detail,
        difference=difference,
    )


def _lease(history: History, store: Store, held: Collection[bytes]) -> None:
    """Keep the leases of the chunks that were taken over and had none, and end the others."""
    surplus = set(held)
    for record in history.chunks:
        if record.digest in surplus and not record.leased:
            record.leased = True
            surplus.discard(record.digest)
    store.in_use.drop(surplus)


def _revoke_records(history: History, chunk: bytes) -> None:
    for record in history.directory:
        if record.digest == chunk and record.file is FileReplicaState.PUBLISHED:
            history.directory.mark(record, FileReplicaState.REVOKED)


def _agreeing(stored: Sequence[int], token_ids: Sequence[int], limit: int) -> int:
    if list(stored[:limit]) == list(token_ids[:limit]):
        return limit
    return next(i for i in range(limit) if stored[i] != token_ids[i])


def _load(history: History, store: Store, layout: SegmentLayout, snapshot: Snapshot, usable: int) -> tuple[int, int]:
    """Take `usable` rows over, stopping at the first chunk that cannot be used.

    Returns the bytes of rows read, and those of headers and padding in the files taken over."""
    size, parent, metadata = history.context.chunk_tokens, b"", 0
    for index, digest in enumerate(snapshot.chunks):
        first = index * size
        if first >= usable:
            break
        if first == snapshot.approximate_from:
            history.turn_approximate(snapshot.context.lineage)
        identity = ChunkIdentity(history.context, parent, first, tuple(snapshot.token_ids[first : first + size]))
        with store.tier.open(digest) as file:
            metadata += file.stored_bytes - file.nbytes
            _require_same(file.identity, identity, history.context)
            if file.layout != layout or file.layers != history.directory.layers:
                raise DamagedError(
                    Reason.CHUNK_FOREIGN, f"chunk {digest.hex()[:16]} is stored in another layout", chunk=digest.hex()
                )
            if usable - first < size or len(identity.token_ids) < size:
                rows = min(usable, first + len(identity.token_ids)) - first
                if not history.extend_tail(rows):
                    need = history.directory.layers * layout.segment_bytes
                    raise BudgetError(
                        Reason.BUDGET_TOO_SMALL,
                        f"the open tail of the session needs {need} bytes of free memory",
                        "pass a larger budget, or close other requests",
                        required_bytes=need,
                    )
                backing = history.directory.arena.backing
                read = 0
                for layer, grant in enumerate(history.tail[0].grants):
                    buffers = used_pages(backing.writable(grant.slot), layout, file.tokens)
                    read += file.read_into(layer, buffers)
                    backing.flush(grant.slot)
                history.commit(rows, snapshot.token_ids[first : first + rows])
                return read, metadata
        history.append_stored(identity)
        parent = digest
    return 0, metadata


def _require_same(found: ChunkIdentity, expected: ChunkIdentity, context: ChunkContext) -> None:
    """A digest that agrees is not enough: context, place and token ids are compared one by one."""
    if found.context != context or found.parent != expected.parent or found.start != expected.start:
        raise DamagedError(
            Reason.CHUNK_FOREIGN,
            f"chunk {found.digest.hex()[:16]} belongs to another history: "
            f"{first_difference(found.context, context) or 'another place or parent'}",
            chunk=found.digest.hex(),
        )
    if found.token_ids != expected.token_ids:
        raise DamagedError(
            Reason.TOKENS_DIFFER, f"chunk {found.digest.hex()[:16]} holds other tokens", chunk=found.digest.hex()
        )
