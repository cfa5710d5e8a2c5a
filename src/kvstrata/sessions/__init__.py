"""How a conversation pauses: names, manifests and the sessions of a store. Imports without PyTorch."""

from __future__ import annotations

from kvstrata.sessions.session_store import RemoveResult, SessionStore, SessionSummary
from kvstrata.sessions.snapshots import Snapshot, chunk_identities

__all__ = ["RemoveResult", "SessionStore", "SessionSummary", "Snapshot", "chunk_identities"]
