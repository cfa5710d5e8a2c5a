"""Live replicas as records, with the payload digests that show whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.manifest import ChunkState, DirectoryState, ReplicaState
from kvstrata.contract.manifest.source import layout_digest
from kvstrata.contract.states import FileReplicaState
from kvstrata.errors import Reason, RetrievalError
from kvstrata.store.directory import ChunkRecord, Directory, Replica
from kvstrata.store.retrieval.row_tiers import RowTier, payload_digest

__all__ = ["ChunkStates"]


class ChunkStates:
    """Reads what the directory says about chunks. layout: of the rows. tiers: where payloads can be read."""

    def __init__(self, layout: SegmentLayout, tiers: Mapping[str, RowTier]) -> None:
        self._layout = layout
        self._tiers = tiers
        self._layouts: dict[SegmentLayout, str] = {}
        self._bound: dict[tuple[bytes, str], int] = {}

    def directory(self, directory: Directory, chunks: Sequence[ChunkRecord]) -> DirectoryState:
        """The copies of `chunks` now. Reads whole copies whose payload digest is not known; blocks on that."""
        for record in chunks:
            self._bind(record)
        return DirectoryState(directory.generation, directory.survivors, tuple(self.state(record) for record in chunks))

    def state(self, record: ChunkRecord) -> ChunkState:
        """A chunk's copies now. Does not block."""
        return ChunkState(
            record.digest.hex(),
            record.identity.start,
            record.identity.stop,
            record.epoch,
            record.authority,
            tuple(self._state(copy) for copy in record.replicas if copy.state is not FileReplicaState.ABSENT),
        )

    def require_sound(self, record: ChunkRecord, survivors: int) -> None:
        """Errors: `RetrievalError` when too few valid copies exist, or when they are not copies of the same rows."""
        self._bind(record)
        state = self.state(record)
        where = f"rows [{state.start}, {state.stop})"
        if state.valid_replicas < survivors:
            raise RetrievalError(
                Reason.TOO_FEW_REPLICAS,
                f"{where} have {state.valid_replicas} valid copies, {survivors} are demanded",
                "publish their copies first",
                field="directory.survivors",
            )
        if len({copy.payload for copy in state.replicas if copy.published and copy.payload}) > 1:
            raise RetrievalError(
                Reason.REPLICA_PAYLOAD_DIGEST_MISMATCH,
                f"the copies of {where} in {', '.join(copy.tier for copy in state.replicas)} hold different bytes",
                "revoke the copy that is wrong, or recompute the rows",
                field="replica.payload",
            )

    def _bind(self, record: ChunkRecord) -> None:
        for copy in record.replicas:
            if copy.tier not in self._tiers or copy.state is not FileReplicaState.PUBLISHED or None in copy.grants:
                continue
            copy.layout = copy.layout or self._layout
            # A digest that was taken of an earlier copy in that tier says nothing about this one.
            seen = self._bound.setdefault((record.digest, copy.tier), copy.generation)
            if copy.payload is None or seen != copy.generation:
                copy.payload = payload_digest(record, self._tiers[copy.tier], self._layout)
                self._bound[record.digest, copy.tier] = copy.generation

    def _state(self, copy: Replica) -> ReplicaState:
        layout = copy.layout
        if layout is not None and layout not in self._layouts:
            self._layouts[layout] = layout_digest(layout)
        return ReplicaState(
            copy.tier,
            copy.generation,
            copy.epoch,
            copy.codec,
            "" if layout is None else self._layouts[layout],
            copy.tenant,
            "" if copy.payload is None else copy.payload.hex(),
            copy.state is FileReplicaState.PUBLISHED,
            None not in copy.grants,
            tuple(None if grant is None else grant.generation for grant in copy.grants),
        )
