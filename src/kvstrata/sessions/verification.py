"""Whether saved sessions can come back: each manifest, and the chunks that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvstrata.errors import Reason
from kvstrata.sessions.session_store import SessionStore
from kvstrata.sessions.snapshots import Snapshot

__all__ = ["SnapshotVerdict", "verify_snapshots"]


@dataclass(frozen=True, slots=True)
class SnapshotVerdict:
    """The outcome for one manifest. `usable_tokens` is the prefix whose chunks are all sound; `snapshot` is `None` when
    the manifest itself cannot be read."""

    folder: str
    sequence: int
    snapshot: Snapshot | None
    usable_tokens: int
    reason: Reason | None = None
    cause: str = ""


def verify_snapshots(sessions: SessionStore, unsound: Mapping[bytes, Reason]) -> Iterator[SnapshotVerdict]:
    """Verify every manifest; `unsound` are chunks known to be damaged. Chunks that are not there are found here."""
    for folder, sequence, content in sessions.snapshots():
        if not isinstance(content, Snapshot):
            yield SnapshotVerdict(folder, sequence, None, 0, content.reason, content.cause)
            continue
        verdict = SnapshotVerdict(folder, sequence, content, content.frontier)
        for identity in content.identities():
            chunk = identity.digest
            reason = unsound.get(chunk) or (None if sessions.store.tier.has(chunk) else Reason.CHUNK_MISSING)
            if reason is not None:
                cause = f"chunk {chunk.hex()} cannot be used; rows from position {identity.start} on are recomputed"
                verdict = SnapshotVerdict(folder, sequence, content, identity.start, reason, cause)
                break
        yield verdict
