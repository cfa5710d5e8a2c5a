"""One sealed chunk as a process knows it: what it is, and the copies of it that lie in the tiers."""

from __future__ import annotations

from collections.abc import Hashable

from kvstrata.contract.capability import DEVICE, FILES, HOST
from kvstrata.contract.identity import ChunkIdentity, Namespace, ReplicaIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.states import FileReplicaState, ResidencyState
from kvstrata.errors import StoreError
from kvstrata.tiers.memory import Grant

__all__ = ["ChunkRecord", "Replica", "SegmentKey"]

SegmentKey = tuple[bytes, int]
"""Owner of a slot that holds a sealed segment: (chunk digest, layer)."""

# An attribute of an enum's class costs as much as a call, and segments come by the thousand.
_FILE_PUBLISHED = FileReplicaState.PUBLISHED


class Replica:
    """The bytes of one chunk in one tier, whole or the segments of some layers.

    tier: its name. state: whether it may be read. generation: publication lifetime of this copy; moves whenever the
    copy comes to life anew. epoch: authority epoch under which it was validated; a copy of an older epoch is fenced
    off. codec, layout: representation; `layout` is `None` where the tier has not said yet. tenant: whose rows.
    payload: keyed digest of the rows, where it is known. grants: its slots by layer, in memory tiers.
    checksums: xxh3_128 by layer, in memory tiers that are copied from.
    """

    __slots__ = ("checksums", "codec", "epoch", "generation", "grants", "layout", "payload", "state", "tenant", "tier")

    def __init__(self, tier: str, tenant: Namespace, layers: int) -> None:
        self.tier = tier
        self.state = FileReplicaState.ABSENT
        self.generation = 0
        self.epoch = 0
        self.codec = "none"
        self.layout: SegmentLayout | None = None
        self.tenant = tenant
        self.payload: bytes | None = None
        self.grants: list[Grant | None] = [None] * layers
        self.checksums: list[bytes | None] = [None] * layers

    def identity(self, chunk: bytes, layer: int = 0) -> ReplicaIdentity:
        """The copy's own identity, apart from the chunk's: a promotion changes this one only."""
        grant = self.grants[layer] if self.grants else None
        return ReplicaIdentity(
            chunk,
            self.tier,
            0 if grant is None else grant.generation,
            self.generation,
            self.epoch,
            self.codec,
            "" if self.layout is None else repr(self.layout),
            self.payload or b"",
        )


class ChunkRecord:
    """A sealed chunk in use.

    identity, digest: what it is. generation: of this record; one that is dropped and made again gets another.
    device, host, durable: its replicas. grants: those of `device`. residency: of each layer between the device and the
    tiers below. moving: by layer, the slot of the promotion that somebody waits for. authority: the tier whose whole,
    valid copy keeps the chunk from being lost, or the empty string while that takes several. epoch: moves with the
    authority. failure: why the last attempt to write it failed. users: open histories that contain it. leased: whether
    the durable replica is held against eviction.
    """

    __slots__ = (
        "authority",
        "device",
        "digest",
        "durable",
        "epoch",
        "failure",
        "generation",
        "grants",
        "host",
        "identity",
        "leased",
        "moving",
        "residency",
        "users",
    )

    def __init__(self, identity: ChunkIdentity, layers: int, generation: int = 0) -> None:
        tenant = identity.context.namespace
        self.identity = identity
        self.digest = identity.digest
        self.generation = generation
        self.device = Replica(DEVICE, tenant, layers)
        self.host = Replica(HOST, tenant, layers)
        self.durable = Replica(FILES, tenant, 0)
        self.grants = self.device.grants
        self.residency = [ResidencyState.DEVICE_RELEASED] * layers
        self.moving: list[Grant | None] = [None] * layers
        self.authority = ""
        self.epoch = 1
        self.failure: StoreError | None = None
        self.users = 0
        self.leased = False

    @property
    def file(self) -> FileReplicaState:
        """State of the durable replica."""
        return self.durable.state

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All of them, the fastest tier first."""
        return (self.device, self.host, self.durable)

    @property
    def resident(self) -> int:
        """Layers whose segment is in the device arena."""
        return sum(grant is not None for grant in self.grants)

    @property
    def evictable(self) -> bool:
        """Whether the device's copy may go in every layer: only when another valid copy of the chunk would survive."""
        return self.valid(self.durable) or (self.valid(self.host) and None not in self.host.grants)

    def valid(self, replica: Replica, layer: int | None = None) -> bool:
        """Whether the replica may be read, in `layer` where one is named: published, and of the current epoch."""
        return (
            replica.state is _FILE_PUBLISHED
            and replica.epoch == self.epoch
            and (layer is None or replica is self.durable or replica.grants[layer] is not None)
        )

    def key(self, layer: int) -> Hashable:
        """Owner of the slots of one segment."""
        return (self.digest, layer)
