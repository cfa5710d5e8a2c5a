"""Proxy and index of one history: published apart, each after what it stands on."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.contract.manifest import (
    DeletionReceipt,
    Exactness,
    Fallback,
    IndexPublication,
    ResidentSet,
    SelectorPublication,
)
from kvstrata.contract.manifest.checks import PUBLISH_INDEX, PUBLISH_SELECTOR, run_checks
from kvstrata.contract.manifest.evidence import IndexEvidence, SelectorEvidence, extended
from kvstrata.contract.manifest.publication import Positions
from kvstrata.contract.manifest.source import COORDINATES
from kvstrata.errors import Reason, RetrievalError
from kvstrata.store.retrieval.committed_rows import CommittedRows
from kvstrata.store.retrieval.searches import Searches
from kvstrata.store.retrieval.snapshots import ReclaimOutcome, Snapshot, SnapshotLine

__all__ = ["Publications"]


class Publications:
    """Generations of a proxy over `rows` and of an index over the proxy.

    selector_generation, index_generation: the last numbers before the first ones here. searches: look-ups in flight.

    Attributes:
        selectors, indexes: the generations of each.
    """

    def __init__(
        self,
        rows: CommittedRows,
        searches: Searches,
        *,
        selector_id: str = "selector",
        index_id: str = "index",
        selector_generation: int = 0,
        index_generation: int = 0,
    ) -> None:
        self.rows = rows
        self.selectors = SnapshotLine[SelectorPublication](selector_id, generation=selector_generation)
        self.indexes = SnapshotLine[IndexPublication](index_id, generation=index_generation)
        self._searches = searches

    def write_selector(
        self,
        payload: object,
        *,
        basis: str,
        dtype: str,
        shape: tuple[int, ...],
        revision: str,
        exactness: Exactness = Exactness.APPROXIMATE,
    ) -> Snapshot[SelectorPublication]:
        """The next proxy generation, derived from all rows that are published; nobody sees it before it is published.

        payload: the proxy itself, as the method keeps it. Errors: `RetrievalError` while no rows are published.
        """
        binding = self.rows.binding
        source = self.rows.digests.get(binding.frontier)
        if source is None:
            raise RetrievalError(
                Reason.COVERAGE_BEYOND_FRONTIER,
                "a proxy was derived before any row was published",
                "publish the rows first",
                field="selector.source",
            )
        snapshot = self.selectors.reserve()
        record = SelectorPublication(
            self.selectors.name,
            snapshot.generation,
            source,
            binding.start,
            binding.frontier,
            basis,
            dtype,
            shape,
            revision,
            exactness,
        )
        self.selectors.write(snapshot, record, payload)
        return snapshot

    def publish_selector(self, snapshot: Snapshot[SelectorPublication]) -> SelectorPublication:
        """Validate the proxy against the rows and publish it. Errors: `RetrievalError`, with nothing published."""
        self.selectors.publish(snapshot, lambda: run_checks(PUBLISH_SELECTOR, self.selector_evidence(snapshot)))
        return snapshot.record

    def write_index(
        self,
        payload: object,
        selector: Snapshot[SelectorPublication],
        *,
        entries: Positions | None = None,
        resident: ResidentSet | None = None,
        rest_fallback: Fallback | None = None,
    ) -> Snapshot[IndexPublication]:
        """The next index generation over `selector`; nobody sees it before it is published.

        payload: the index itself. entries: positions that it holds, in order; all of the proxy's unless given.
        resident, rest_fallback: see `IndexPublication`.
        """
        proxy, binding = selector.record, self.rows.binding
        snapshot = self.indexes.reserve()
        record = IndexPublication(
            self.indexes.name,
            snapshot.generation,
            proxy.selector_id,
            proxy.generation,
            binding.cache_generation,
            proxy.stop,
            proxy.source,
            COORDINATES,
            ((proxy.start, proxy.stop),) if entries is None else entries,
            binding.tenant,
            resident,
            rest_fallback,
        )
        self.indexes.write(snapshot, record, payload)
        return snapshot

    def publish_index(self, snapshot: Snapshot[IndexPublication]) -> IndexPublication:
        """Validate the chain from index to rows and publish the index. Errors: `RetrievalError`, nothing published."""
        self.indexes.publish(snapshot, lambda: run_checks(PUBLISH_INDEX, self.index_evidence(snapshot)))
        return snapshot.record

    def reclaim_index(self, generation: int, delete: Callable[[], DeletionReceipt]) -> ReclaimOutcome:
        """Delete a retired index once no look-up refers to it; see `SnapshotLine.reclaim`."""
        snapshot = self.indexes.find(generation)
        if snapshot is None:
            return ReclaimOutcome.RECLAIMED
        return self.indexes.reclaim(
            snapshot, lambda: self._searches.obstacle(self._searches.of_index(generation)), delete
        )

    def reclaim_selector(self, generation: int, delete: Callable[[], DeletionReceipt]) -> ReclaimOutcome:
        """Delete a retired proxy once no index stands on it."""
        snapshot = self.selectors.find(generation)
        if snapshot is None:
            return ReclaimOutcome.RECLAIMED

        def obstacle() -> ReclaimOutcome | None:
            standing = any(index.record.selector_generation == generation for index in self.indexes.written())
            return ReclaimOutcome.BUILT_UPON if standing else None

        return self.selectors.reclaim(snapshot, obstacle, delete)

    def selector_evidence(self, snapshot: Snapshot[SelectorPublication]) -> SelectorEvidence:
        """What a proxy's publication is checked against."""
        return SelectorEvidence(self.rows.binding, self.rows.tensor, self.rows.digests, snapshot.record, snapshot.state)

    def index_evidence(self, snapshot: Snapshot[IndexPublication]) -> IndexEvidence:
        """What an index's publication, and every look-up in it, is checked against."""
        selector = self.selectors.find(snapshot.record.selector_generation) or self.selectors.published
        if selector is None:
            raise _nothing_published("proxy")
        evidence = self.selector_evidence(selector)
        return IndexEvidence(**extended(evidence, index=snapshot.record, index_state=snapshot.state))

    def index_for(self, generation: int | None = None) -> Snapshot[IndexPublication]:
        """That generation; the published one where it is gone or none is named.

        Errors: `RetrievalError` with SNAPSHOT_NOT_PUBLISHED when there is neither.
        """
        snapshot = None if generation is None else self.indexes.find(generation)
        snapshot = snapshot or self.indexes.published
        if snapshot is None:
            raise _nothing_published("index")
        return snapshot


def _nothing_published(kind: str) -> RetrievalError:
    return RetrievalError(
        Reason.SNAPSHOT_NOT_PUBLISHED,
        f"no {kind} is published",
        "publish rows, then the proxy, then the index",
        field=f"{kind}.state",
    )
