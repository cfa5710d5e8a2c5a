"""The committed rows of one history, as the source that proxies and indexes are derived from."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from typing import Any

from kvstrata.contract.identity import ChunkContext, first_difference
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.manifest import SourceBinding, TensorContract, source_digest
from kvstrata.contract.manifest.source import CAUSAL
from kvstrata.errors import Reason, StateError
from kvstrata.store.directory import ChunkRecord

__all__ = ["CommittedRows"]


class CommittedRows:
    """Sealed chunks in order, and the generations under which they may be searched. Used by one thread.

    context, layout: what the rows are and how their segments lie. The generations say where each counter starts; see
    `SourceBinding` for what they mean. start: position of the first row.

    Attributes:
        chunks: their records, in order.
        frontier: position after the last published row.
        digests: the source digest that the history had at each frontier so far.
    """

    def __init__(
        self,
        context: ChunkContext,
        layout: SegmentLayout,
        *,
        request_generation: int = 1,
        cache_generation: int = 1,
        publication_generation: int = 0,
        namespace_generation: int = 1,
        visibility_policy: str = CAUSAL,
        start: int = 0,
    ) -> None:
        self.context = context
        self.layout = layout
        self.chunks: list[ChunkRecord] = []
        self.digests: dict[int, str] = {}
        self._binding = SourceBinding.of(
            context,
            layout,
            namespace_generation=namespace_generation,
            request_generation=request_generation,
            cache_generation=cache_generation,
            publication_generation=publication_generation,
            start=start,
            frontier=start,
            visibility_policy=visibility_policy,
        )
        self._tensor = TensorContract.of(context.abi, 0)

    @property
    def binding(self) -> SourceBinding:
        """The rows as they are now."""
        return self._binding

    @property
    def tensor(self) -> TensorContract:
        """Their geometry now."""
        return self._tensor

    @property
    def frontier(self) -> int:
        """Position after the last published row."""
        return self._binding.frontier

    @property
    def digest(self) -> str:
        """What is derived from the rows now must carry this source digest."""
        return self.digests[self.frontier]

    def publish(self, record: ChunkRecord) -> None:
        """Let the history go on by one sealed chunk. Only what was published may be derived from.

        Errors: `StateError` with CONTEXT_DIFFERS for a chunk of another context, NOT_COMMITTED for one that does not
        continue the history.
        """
        identity = record.identity
        difference = first_difference(identity.context, self.context)
        if difference is not None:
            raise StateError(Reason.CONTEXT_DIFFERS, f"a chunk of another context was to be published: {difference}")
        parent = self.chunks[-1].digest if self.chunks else b""
        if identity.start != self.frontier or (self.chunks and identity.parent != parent):
            raise StateError(
                Reason.NOT_COMMITTED,
                f"rows [{identity.start}, {identity.stop}) do not continue a history of {self.frontier} rows",
                "publish the chunks of one history in their order",
            )
        self.chunks.append(record)
        self._set(
            publication_generation=self._binding.publication_generation + 1,
            frontier=identity.stop,
        )

    def next_request(self) -> None:
        """The request was cancelled, or its number goes to another: what was asked for it is late from now on."""
        self._set(request_generation=self._binding.request_generation + 1)

    def next_history(self) -> None:
        """The rows were taken back or changed: nothing derived from the history so far may be used again."""
        self.chunks.clear()
        self.digests.clear()
        self._binding = dataclasses.replace(
            self._binding, cache_generation=self._binding.cache_generation + 1, frontier=self._binding.start
        )
        self._tensor = TensorContract.of(self.context.abi, 0)

    def next_namespace(self) -> None:
        """The tenant's namespace was emptied or given to another."""
        self._set(namespace_generation=self._binding.namespace_generation + 1)

    def chunk_at(self, position: int) -> ChunkRecord | None:
        """The chunk that holds `position`."""
        found = bisect_right(self.chunks, position, key=lambda record: record.identity.start) - 1
        if found < 0 or position >= self.chunks[found].identity.stop:
            return None
        return self.chunks[found]

    def _set(self, **changes: Any) -> None:
        self._binding = dataclasses.replace(self._binding, **changes)
        self._tensor = TensorContract.of(self.context.abi, self.frontier - self._binding.start)
        self.digests[self.frontier] = source_digest(self._binding, self._tensor)
