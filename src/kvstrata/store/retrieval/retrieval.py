"""Look-up, gather and partial attention over one history: each call checks what it is shown before it does anything.

    publish rows -> publish proxy -> publish index -> look up -> gather -> partial state

A look-up hands out identifiers under a search lease. A gather turns them into rows. A partial state is tied to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.contract.manifest import (
    FallbackDecision,
    GatherReceipt,
    LookupReceipt,
    PartialReceipt,
    QueryOperation,
    RetrievalManifest,
)
from kvstrata.contract.manifest.checks import GATHER, LOOKUP, PARTIAL, SEARCH_RESULT, run_checks
from kvstrata.contract.manifest.evidence import (
    GatherEvidence,
    LookupEvidence,
    PartialEvidence,
    ReceiptEvidence,
    RowEvidence,
    extended,
)
from kvstrata.errors import ConfigurationError, Reason, RetrievalError
from kvstrata.ports import Clock
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.leases import LeaseTable
from kvstrata.store.retrieval.chunk_states import ChunkStates
from kvstrata.store.retrieval.committed_rows import CommittedRows
from kvstrata.store.retrieval.destination import GatherDestination
from kvstrata.store.retrieval.gathering import RowPlan, gather_rows
from kvstrata.store.retrieval.publications import Publications
from kvstrata.store.retrieval.row_tiers import RowTier
from kvstrata.store.retrieval.searches import Searches
from kvstrata.store.retrieval.withdrawal import Withdrawals
from kvstrata.tiers.memory import Grant

__all__ = ["Found", "Gathered", "Retrieval", "Search"]

Found = Sequence[tuple[int, float]]
"""Original positions with their scores, best first."""

Search = Callable[[object], Found]
"""What a method does with the payload of its index."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows that may enter attention until they are released.

    keys, values: views of the destination slot, C-contiguous [rows, head_dim] of the cache dtype.
    """

    receipt: GatherReceipt
    grant: Grant
    keys: memoryview
    values: memoryview


class Retrieval:
    """The searchable history `rows`, whose copies `directory` knows. Used by one thread, as `rows` is.

    tiers: where rows can be copied from, by name. destination: where they go. clock, clock_origin: of deadlines, in
    seconds. lease_s: how long a look-up may take until its rows are gathered. manifest_generation: the last number
    before the first manifest here. selector_generation, index_generation: see `Publications`.

    Attributes:
        publications: proxy and index.
        searches: look-ups in flight.
        withdrawals: rows on their way out.
    """

    def __init__(
        self,
        directory: Directory,
        rows: CommittedRows,
        tiers: Mapping[str, RowTier],
        destination: GatherDestination,
        *,
        clock: Clock = time.monotonic,
        clock_origin: str = "monotonic",
        lease_s: float = 30.0,
        manifest_generation: int = 0,
        selector_generation: int = 0,
        index_generation: int = 0,
    ) -> None:
        self.directory = directory
        self.rows = rows
        self.tiers = dict(tiers)
        self.destination = destination
        self.clock_origin = clock_origin
        self.searches = Searches(LeaseTable(clock), lease_s)
        self.publications = Publications(
            rows, self.searches, selector_generation=selector_generation, index_generation=index_generation
        )
        self.withdrawals = Withdrawals(self.searches)
        self._clock = clock
        self._states = ChunkStates(rows.layout, self.tiers)
        self._manifest_generation = manifest_generation

    def publish_rows(self, record: ChunkRecord) -> None:
        """Let the searchable history go on by one sealed chunk, whose copies are read once and compared.

        Blocks on those reads. Errors: `RetrievalError` with TOO_FEW_REPLICAS or REPLICA_PAYLOAD_DIGEST_MISMATCH;
        `StateError` as `CommittedRows.publish`.
        """
        self._states.require_sound(record, self.directory.survivors)
        self.rows.publish(record)

    def manifest(self) -> RetrievalManifest:
        """What holds now, for later calls to be checked against.

        Reads copies that came to life since the last manifest once, to know their payload digest; blocks on that.
        Errors: `RetrievalError` while no index is published.
        """
        index = self.publications.index_for()
        evidence = self.publications.index_evidence(index)
        self._manifest_generation += 1
        return RetrievalManifest(
            self._manifest_generation,
            self.rows.binding,
            self.rows.tensor,
            tuple(tier.capability for tier in self.tiers.values()),
            self._states.directory(self.directory, self.rows.chunks),
            evidence.selector,
            evidence.index,
        )

    def lookup(
        self, manifest: RetrievalManifest, operation: QueryOperation, search: Search
    ) -> LookupReceipt | FallbackDecision:
        """Search the index that the manifest names, under a lease that lasts until `gather` or `finish`.

        search: gets the index's payload. What it finds among withdrawn rows is left out and counted. Returns the
        declared fallback when the deadline passes. Errors: `RetrievalError` of the first check that fails;
        `StateError` with LEASE_EXPIRED when the search outlived its lease.
        """
        number = self.searches.begin(f"request {operation.request_generation}", manifest.index.generation)
        try:
            evidence = self._evidence(manifest, operation)
            run_checks(LOOKUP, evidence)
            late = self._late(operation, "lookup")
            if late is None:
                with self.searches.reading(number):
                    found = search(self.publications.index_for(manifest.index.generation).payload)
                late = self._late(operation, "lookup")
            if late is not None:
                self.searches.finish(number)
                return late
            receipt = self._receipt(number, evidence, found)
            run_checks(SEARCH_RESULT, ReceiptEvidence(**extended(evidence, lookup=receipt)))
        except BaseException:
            self.searches.finish(number)
            raise
        return receipt

    def gather(
        self,
        manifest: RetrievalManifest,
        operation: QueryOperation,
        lookup: LookupReceipt,
        sources: Sequence[str],
    ) -> Gathered | FallbackDecision:
        """Copy K and V of every candidate into one slot of the destination, and end the look-up.

        sources: the tier that each candidate's row comes from. When the deadline passes before the rows are visible,
        the slot is given back and the declared fallback is returned: rows that had arrived are not used. Blocks on
        reads. Errors: `RetrievalError` of the first check that fails, after which the look-up goes on;
        `ConfigurationError` for sources of another number; `StateError` with LEASE_EXPIRED; `BudgetError`; those of the
        tiers.
        """
        if len(sources) != len(lookup.candidates):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"sources names {len(sources)} tiers for {len(lookup.candidates)} candidates"
            )
        evidence = self._gather_evidence(manifest, operation, lookup, sources)
        run_checks(GATHER, evidence)
        late = self._late(operation, "gather")
        if late is None:
            with self.searches.reading(lookup.number):
                outcome = self._gather(evidence)
        self.searches.finish(lookup.number)
        return outcome if late is None else late

    def partial(
        self,
        manifest: RetrievalManifest,
        operation: QueryOperation,
        lookup: LookupReceipt,
        gather: GatherReceipt,
        partial: PartialReceipt,
    ) -> PartialReceipt:
        """Admit a partial state that was computed over gathered rows; returns its receipt for the merge.

        The state itself is the caller's. Errors: `RetrievalError` of the first check that fails: the state must not be
        merged then.
        """
        evidence = self._evidence(manifest, operation)
        slot = gather.destination_slot
        run_checks(
            PARTIAL,
            PartialEvidence(
                **extended(
                    evidence,
                    lookup=lookup,
                    gather=gather,
                    partial=partial,
                    allocation=self.destination.allocation(slot),
                    event=self.destination.event(slot),
                )
            ),
        )
        return partial

    def finish(self, lookup: LookupReceipt) -> None:
        """End a look-up whose rows are not wanted. May be repeated."""
        self.searches.finish(lookup.number)

    def release(self, gathered: Gathered) -> None:
        """Give the slot of gathered rows back. Errors: `StateError` when it was given back before."""
        self.destination.arena.release(gathered.grant)

    def _evidence(self, manifest: RetrievalManifest, operation: QueryOperation) -> LookupEvidence:
        chain = self.publications.index_evidence(self.publications.index_for(manifest.index.generation))
        return LookupEvidence(**extended(chain, manifest=manifest, operation=operation, clock_origin=self.clock_origin))

    def _gather_evidence(
        self, manifest: RetrievalManifest, operation: QueryOperation, lookup: LookupReceipt, sources: Sequence[str]
    ) -> GatherEvidence:
        live = {}
        rows = []
        for position, tier in zip(lookup.candidates, sources, strict=True):
            record = self.rows.chunk_at(position)
            if record is not None and record.digest not in live:
                live[record.digest] = self._states.state(record)
            now = None if record is None else live[record.digest]
            rows.append(RowEvidence(position, tier, now, manifest.directory.chunk_at(position)))
        return GatherEvidence(
            **extended(
                self._evidence(manifest, operation),
                lookup=lookup,
                rows=tuple(rows),
                survivors=self.directory.survivors,
                tiers={name: tier.capability for name, tier in self.tiers.items()},
                destination=self.destination.tier,
            )
        )

    def _receipt(self, number: int, evidence: LookupEvidence, found: Found) -> LookupReceipt:
        cache = evidence.source.cache_generation
        kept = [(position, score) for position, score in found if not self.withdrawals.hides(cache, position)]
        operation = evidence.operation
        return LookupReceipt(
            number,
            operation.query,
            operation.layer,
            operation.query_head,
            operation.kv_head,
            evidence.index.generation,
            evidence.selector.generation,
            cache,
            evidence.source.frontier,
            tuple(position for position, _ in kept),
            tuple(score for _, score in kept),
            len(found) - len(kept),
        )

    def _gather(self, evidence: GatherEvidence) -> Gathered | FallbackDecision:
        operation, lookup = evidence.operation, evidence.lookup
        layout, destination = self.rows.layout, self.destination
        plan = self._plan(evidence)
        rows = gather_rows(
            plan,
            self.tiers,
            layout,
            operation.layer,
            operation.kv_head,
            destination,
            f"gather {lookup.number}",
            lambda: self._clock() < operation.deadline_s,
        )
        if isinstance(rows, int):
            return self._decision(operation, "gather", rows)
        receipt = GatherReceipt(
            lookup.query,
            operation.layer,
            operation.query_head,
            operation.kv_head,
            lookup.candidates,
            tuple(row.tier for row in evidence.rows),
            tuple(-1 if row.replica is None else row.replica.generation for row in evidence.rows),
            destination.tier,
            rows.grant.slot,
            rows.grant.generation,
            rows.event,
            layout.head_dim,
            layout.dtype,
            rows.size,
            rows.digest,
        )
        visible = destination.arena.backing.readable(rows.grant.slot)
        return Gathered(receipt, rows.grant, visible[: rows.size // 2], visible[rows.size // 2 : rows.size])

    def _plan(self, evidence: GatherEvidence) -> list[RowPlan]:
        plan = []
        for row in evidence.rows:
            record = self.rows.chunk_at(row.position)
            if record is None or row.tier not in self.tiers:
                raise RetrievalError(
                    Reason.REPLICA_MISSING,
                    f"position {row.position} lies in no chunk of the history, or tier {row.tier!r} gives out no rows",
                    field="lookup.candidates",
                )
            plan.append(RowPlan(row.position, record, row.tier))
        return plan

    def _late(self, operation: QueryOperation, stage: str) -> FallbackDecision | None:
        return None if self._clock() < operation.deadline_s else self._decision(operation, stage, 0)

    def _decision(self, operation: QueryOperation, stage: str, arrived: int) -> FallbackDecision:
        return FallbackDecision(operation.fallback, stage, self._clock() - operation.deadline_s, arrived)
