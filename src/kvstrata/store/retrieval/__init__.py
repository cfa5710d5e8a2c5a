"""Retrieval over stored history: rows, then a proxy, then an index are published; candidates become rows by a gather.

The protocol that methods use. It knows no method: what a proxy or an index holds is the method's own.
"""

from __future__ import annotations

from kvstrata.store.retrieval.committed_rows import CommittedRows
from kvstrata.store.retrieval.destination import GatherDestination
from kvstrata.store.retrieval.publications import Publications
from kvstrata.store.retrieval.retrieval import Found, Gathered, Retrieval, Search
from kvstrata.store.retrieval.row_tiers import ArenaRows, ChunkTierRows, RowTier
from kvstrata.store.retrieval.searches import Searches
from kvstrata.store.retrieval.snapshots import ReclaimOutcome, Snapshot, SnapshotLine
from kvstrata.store.retrieval.withdrawal import Withdrawal, Withdrawals

__all__ = [
    "ArenaRows",
    "ChunkTierRows",
    "CommittedRows",
    "Found",
    "GatherDestination",
    "Gathered",
    "Publications",
    "ReclaimOutcome",
    "Retrieval",
    "RowTier",
    "Search",
    "Searches",
    "Snapshot",
    "SnapshotLine",
    "Withdrawal",
    "Withdrawals",
]
