"""What a tier can do, as a record: a tier's name says nothing about which operations are legal on its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["DEVICE", "FILES", "HOST", "Persistence", "TierCapability", "Visibility", "legal_path"]

DEVICE = "device"
HOST = "host"
FILES = "files"


class Persistence(StrEnum):
    """What survives: nothing beyond the process, the process, or the machine."""

    PROCESS = "process"
    MACHINE = "machine"
    SHARED = "shared"


class Visibility(StrEnum):
    """What makes written bytes readable: the write itself, a stream's event, a rename, a remote acknowledgement."""

    WRITE = "write"
    STREAM_EVENT = "stream_event"
    RENAME = "rename"
    ACKNOWLEDGEMENT = "acknowledgement"


@dataclass(frozen=True, slots=True)
class TierCapability:
    """tier: its name. address_space: where its bytes can be addressed, e.g. `host`, `cuda:0`, `file`; two tiers of one
    address space copy to each other directly.

    kernel_readable: attention kernels read it in place. partial_attention: partial states may be computed there.
    dma_source, dma_destination: a copy engine may read or write it. codecs, layouts: representations it keeps; empty
    `layouts` means any. persistence: what survives. tenants: namespaces that may share it; empty means all, kept apart
    by identity. alignment: bytes. checksum: what every read is verified with. visibility: what publishes.
    """

    tier: str
    address_space: str
    kernel_readable: bool
    dma_source: bool
    dma_destination: bool
    persistence: Persistence
    visibility: Visibility
    codecs: frozenset[str] = frozenset({"none"})
    layouts: frozenset[str] = frozenset()
    partial_attention: bool = False
    tenants: frozenset[str] = frozenset()
    alignment: int = 1
    checksum: str = "xxh3_128"

    def __post_init__(self) -> None:
        if not self.tier or not self.address_space:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "TierCapability.tier and address_space must not be empty")
        if self.alignment < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"TierCapability.alignment={self.alignment} must be >= 1")

    def keeps(self, *, codec: str, layout: str, tenant: str) -> bool:
        """Whether a replica of that representation and tenant may lie there."""
        return (
            codec in self.codecs
            and (not self.layouts or layout in self.layouts)
            and (not self.tenants or tenant in self.tenants)
        )


def legal_path(source: str, destination: str, tiers: Mapping[str, TierCapability]) -> tuple[str, ...] | None:
    """The tiers that bytes pass through from `source` to `destination`, both included, or `None` when there is no way.

    Bytes go directly where one side is host memory or both lie in one address space and both permit a copy. Every other
    way stages through the host, whose buffer needs credits of its own: files never reach a device in one hop.
    Errors: `ConfigurationError` for a tier that has no record.
    """
    for name in (source, destination):
        if name not in tiers:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"tier {name!r} has no capability record; known: {', '.join(sorted(tiers))}"
            )
    first, last = tiers[source], tiers[destination]
    if not first.dma_source or not last.dma_destination:
        return None
    if source == destination or "host" in (first.address_space, last.address_space):
        return (source, destination)
    if first.address_space == last.address_space:
        return (source, destination)
    stage = tiers.get(HOST)
    if stage is None or not stage.dma_source or not stage.dma_destination:
        return None
    return (source, HOST, destination)
