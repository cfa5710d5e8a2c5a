"""A tier behind a slow link: a declared rate and latency, shared by everything that passes at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from kvstrata.contract.capability import TierCapability
from kvstrata.contract.identity import ChunkIdentity
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.ports import Clock
from kvstrata.tiers.chunk_file import ReadReceipt
from kvstrata.tiers.files import WriteReceipt
from kvstrata.tiers.interface import ChunkReader, ChunkTier

__all__ = ["Link", "LinkTotals", "ThrottledReader", "ThrottledTier"]


@dataclasses.dataclass(frozen=True, slots=True)
class LinkTotals:
    """operations, bytes: what passed. busy_s: what the bytes took at the rate. waited_s: slept, in all threads."""

    operations: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0


class Link:
    """Passes bytes in the order of their asking, at `bytes_per_s` in all, each `latency_s` later. Thread-safe.

    Errors: `ConfigurationError` unless the rate is positive and the latency not negative.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        clock: Clock = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"bytes_per_s={bytes_per_s} must be positive, latency_s={latency_s} at least 0"
            )
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.totals = LinkTotals()
        self._clock = clock
        self._sleep = sleep
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def ask(self, nbytes: int = 0) -> float:
        """Take a place on the link for an operation of `nbytes`; returns when it will have passed. Does not block."""
        with self._lock:
            busy = nbytes / self.bytes_per_s
            self._free_at = max(self._clock(), self._free_at) + busy
            totals = self.totals
            self.totals = dataclasses.replace(
                totals, operations=totals.operations + 1, bytes=totals.bytes + nbytes, busy_s=totals.busy_s + busy
            )
            return self._free_at + self.latency_s

    def wait(self, until: float) -> None:
        """Block until then; what the operation took by itself counts towards it."""
        left = until - self._clock()
        if left > 0:
            self._sleep(left)
            with self._lock:
                self.totals = dataclasses.replace(self.totals, waited_s=self.totals.waited_s + left)


class ThrottledTier:
    """`tier` behind `link`: reads and writes cost their payload's bytes, other operations the latency alone.

    name: of this tier in its capability record. Everything else is as in `tier`.
    """

    def __init__(self, tier: ChunkTier, link: Link, name: str = "link") -> None:
        self.tier = tier
        self.link = link
        self.name = name

    @property
    def capability(self) -> TierCapability:
        """The tier's record under this name, in an address space that is only reached over the link."""
        return dataclasses.replace(
            self.tier.capability, tier=self.name, address_space="link", kernel_readable=False, partial_attention=False
        )

    @property
    def durable(self) -> bool:
        return self.tier.durable

    @property
    def read_only(self) -> bool:
        return self.tier.read_only

    def has(self, chunk: bytes) -> bool:
        until = self.link.ask()
        found = self.tier.has(chunk)
        self.link.wait(until)
        return found

    def list(self) -> Iterator[bytes]:
        self.link.wait(self.link.ask())
        return self.tier.list()

    def open(self, chunk: bytes) -> ThrottledReader:
        until = self.link.ask()
        reader = self.tier.open(chunk)
        self.link.wait(until)
        return ThrottledReader(reader, self.link)

    def write(
        self, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]
    ) -> WriteReceipt:
        until = self.link.ask(sum(buffer.nbytes for buffers in segments for buffer in buffers))
        receipt = self.tier.write(identity, layout, segments)
        self.link.wait(until)
        return receipt

    def revoke(self, chunk: bytes) -> bool:
        until = self.link.ask()
        found = self.tier.revoke(chunk)
        self.link.wait(until)
        return found


class ThrottledReader:
    """An open chunk behind a link."""

    def __init__(self, reader: ChunkReader, link: Link) -> None:
        self._reader = reader
        self._link = link
        self.identity = reader.identity
        self.layout = reader.layout
        self.layers = reader.layers
        self.tokens = reader.tokens
        self.segment_bytes = reader.segment_bytes
        self.nbytes = reader.nbytes
        self.stored_bytes = reader.stored_bytes

    def read_into(self, layer: int, buffers: Sequence[memoryview]) -> int:
        until = self._link.ask(self.segment_bytes)
        done = self._reader.read_into(layer, buffers)
        self._link.wait(until)
        return done

    def checksum(self, layer: int) -> bytes:
        return self._reader.checksum(layer)

    def verify_payload(self) -> ReadReceipt:
        until = self._link.ask(self.nbytes)
        receipt = self._reader.verify_payload()
        self._link.wait(until)
        return receipt

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
