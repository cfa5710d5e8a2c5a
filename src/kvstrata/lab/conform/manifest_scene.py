"""One chunk of known rows in two memory arenas, its proxy and its index, and one query: the topic's fixture, live."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import torch
from xxhash import xxh3_128_digest

from kvstrata.contract.capability import DEVICE, HOST, Persistence, TierCapability, Visibility
from kvstrata.contract.encoding import digest
from kvstrata.contract.identity import CacheAbi, ChunkContext, ChunkIdentity, ModelIdentity, Namespace, PositionRule
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.manifest import (
    Fallback,
    FallbackDecision,
    GatherReceipt,
    LookupReceipt,
    PartialReceipt,
    QueryOperation,
    RetrievalManifest,
)
from kvstrata.kernels.state import PartialState
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.retrieval import ArenaRows, CommittedRows, GatherDestination, Gathered, Retrieval
from kvstrata.store.retrieval.row_tiers import row_views
from kvstrata.tiers.memory import Grant, HostBacking, MemoryArena

__all__ = ["MERGE", "QUERY", "Scene", "sentinel"]

QUERY = (1 / 1024, -1 / 2048, 1 / 4096, -1 / 8192)
"""Powers of two, so that the scores of the sentinel rows are exact in fp32."""

MERGE = "online-softmax/1"
_CODE = {"float32": "f", "float16": "e"}
_REQUEST_GENERATION = 2


def sentinel(layer: int, kv_head: int, position: int, channel: int) -> int:
    """A key that says where it belongs; the value beside it is 500000 more."""
    return 100_000 * layer + 10_000 * kv_head + 10 * position + channel


@dataclass
class Scene:
    """The fixture up to the look-up, and what was asked and answered on the way. Its fields may be changed by a test.

    The store's objects are the real ones: `Directory`, `MemoryArena`, `Retrieval`. now: what the clock says, in
    seconds.
    """

    fixture: dict[str, Any]
    dtype: str = "float32"
    now: float = 0.0
    retrieval: Retrieval = field(init=False)
    record: ChunkRecord = field(init=False)
    manifest: RetrievalManifest = field(init=False)
    operation: QueryOperation = field(init=False)
    lookup: LookupReceipt = field(init=False)
    gathered: Gathered | None = field(init=False, default=None)
    gather: GatherReceipt = field(init=False)
    partial: PartialReceipt = field(init=False)

    def __post_init__(self) -> None:
        self._publish_rows()
        self._publish_snapshots()
        self.manifest = self.retrieval.manifest()
        self.operation = self._ask()
        found = self.look_up()
        assert isinstance(found, LookupReceipt)
        self.lookup = found

    @property
    def state(self) -> PartialState:
        """(m, l, u) of the query over the gathered rows, fp32."""
        assert self.gathered is not None
        keys, values = (
            torch.frombuffer(view, dtype=getattr(torch, self.dtype)).view(self.gather.shape)
            for view in (self.gathered.keys, self.gathered.values)
        )
        return PartialState.of_rows(torch.tensor([QUERY]), keys, values, scale=len(QUERY) ** -0.5)

    def look_up(self) -> LookupReceipt | FallbackDecision:
        """Search the published index."""
        return self.retrieval.lookup(self.manifest, self.operation, self.search)

    def search(self, index: Any) -> list[tuple[int, float]]:
        """The fixture's candidates, which the index holds for this layer and head, with their proxy's scores."""
        candidates, proxy = index
        layer, head = self.operation.layer, self.operation.kv_head
        return [(p, float(proxy[layer][head][p] @ torch.tensor(QUERY[:2]))) for p in candidates]

    def gather_rows(self) -> Gathered | FallbackDecision:
        """Gather the candidates from the fixture's tiers."""
        return self.retrieval.gather(self.manifest, self.operation, self.lookup, self.fixture["gather"]["sources"])

    def finish_gather(self) -> None:
        """Gather, and compute the partial state over the rows."""
        gathered = self.gather_rows()
        assert isinstance(gathered, Gathered)
        self.gathered, self.gather = gathered, gathered.receipt
        state = self.state
        numbers = torch.cat([state.m, state.l, state.u[0]]).tolist()
        self.partial = PartialReceipt(
            self.operation.query,
            self.operation.mask,
            self.operation.layer,
            self.operation.query_head,
            self.operation.kv_head,
            self.gather.positions,
            digest("partial-state/1", numbers).hex(),
            "float32",
            MERGE,
        )

    def admit(self) -> PartialReceipt:
        """Show the partial state to the store."""
        return self.retrieval.partial(self.manifest, self.operation, self.lookup, self.gather, self.partial)

    def row(self, index: int) -> tuple[list[float], list[float]]:
        """K and V of one gathered row."""
        assert self.gathered is not None
        key, value = (
            list(struct.iter_unpack(f"<{self.gather.head_dim}{_CODE[self.dtype]}", view))[index]
            for view in (self.gathered.keys, self.gathered.values)
        )
        return list(key), list(value)

    def _publish_rows(self) -> None:
        shape, counters = self.fixture["geometry"], self.fixture["generations"]
        tokens, heads, layers = shape["positions"], shape["kv_heads"], shape["layers"]
        layout = SegmentLayout(heads, shape["q_heads"], shape["d_h"], self.dtype, tokens, tokens // 2)
        context = ChunkContext(
            ModelIdentity("id:conformance"),
            CacheAbi(layers, shape["q_heads"], heads, shape["d_h"], self.dtype),
            PositionRule("default", 10000.0),
            Namespace("conformance"),
            chunk_tokens=tokens,
        )
        device, host = self._arena(layout.segment_bytes, layers), self._arena(layout.segment_bytes, layers)
        # The record takes one number of the directory, and the host's copy the next.
        directory = Directory(device, layers, host, generation=counters["host_replica"] - 2, survivors=1)
        self.record = directory.acquire(ChunkIdentity(context, b"", 0, tuple(range(tokens))))
        for layer in range(layers):
            grant = self._reserved(host, layer)
            segment = host.backing.writable(grant.slot)
            self._fill(segment, layout, layer)
            directory.publish_host(self.record, layer, grant, xxh3_128_digest(segment))
        for layer in range(layers):
            promoted = directory.reserve(self.record, layer)
            assert promoted is not None
            source = self.record.host.grants[layer]
            assert source is not None
            device.backing.writable(promoted.slot)[:] = host.backing.readable(source.slot)
            directory.publish(self.record, layer, promoted)
        rows = CommittedRows(
            context,
            layout,
            request_generation=_REQUEST_GENERATION,
            cache_generation=counters["cache"],
            publication_generation=counters["publication"] - 1,
        )
        room = len(self.fixture["lookup"]["candidates"]) * 2 * shape["d_h"] * layout.itemsize
        staging = self._arena(room, 1, generation=counters["destination_allocation"] - 1)
        self.retrieval = Retrieval(
            directory,
            rows,
            {DEVICE: ArenaRows(device, _memory(DEVICE)), HOST: ArenaRows(host, _memory(HOST))},
            GatherDestination(staging, DEVICE, event=counters["event"] - 1),
            clock=lambda: self.now,
            clock_origin="conformance",
            selector_generation=counters["selector"] - 1,
            index_generation=counters["index"] - 1,
        )
        self.retrieval.publish_rows(self.record)

    def _publish_snapshots(self) -> None:
        publications, shape = self.retrieval.publications, self.fixture["proxy_shape"]
        proxy = torch.tensor(
            [
                [[[sentinel(la, h, p, c) for c in range(shape[3])] for p in range(shape[2])] for h in range(shape[1])]
                for la in range(shape[0])
            ],
            dtype=torch.float32,
        )
        selector = publications.write_selector(
            proxy, basis="channels 0, 1", dtype="float32", shape=tuple(proxy.shape), revision="1"
        )
        publications.publish_selector(selector)
        index = publications.write_index((self.fixture["lookup"]["candidates"], proxy), selector)
        publications.publish_index(index)

    def _ask(self) -> QueryOperation:
        lookup = self.fixture["lookup"]
        return QueryOperation(
            request_generation=_REQUEST_GENERATION,
            cache_generation=self.manifest.source.cache_generation,
            manifest_generation=self.manifest.generation,
            decode_position=lookup["decode_position"],
            layer=lookup["layer"],
            query_head=lookup["query_head"],
            kv_head=lookup["kv_head"],
            query=digest("query/1", QUERY).hex(),
            mask=digest("mask/1", "causal").hex(),
            deadline_s=1.0,
            clock_origin="conformance",
            fallback=Fallback.EXACT_PROMOTE,
        )

    def _fill(self, segment: memoryview, layout: SegmentLayout, layer: int) -> None:
        if self.dtype == "float16":
            return  # The sentinels are larger than its largest number.
        channels = range(layout.head_dim)
        for head in range(layout.kv_heads):
            for position in range(layout.chunk_tokens):
                numbers = [sentinel(layer, head, position, channel) for channel in channels]
                key, value = row_views(segment, layout, head, position)
                key[:] = struct.pack(f"<{layout.head_dim}f", *numbers)
                value[:] = struct.pack(f"<{layout.head_dim}f", *(500_000 + number for number in numbers))

    def _reserved(self, arena: MemoryArena, layer: int) -> Grant:
        grant = arena.reserve(self.record.key(layer))
        assert grant is not None
        return grant

    @staticmethod
    def _arena(slot_bytes: int, slots: int, generation: int = 0) -> MemoryArena:
        return MemoryArena(slot_bytes, HostBacking(slot_bytes, slots), generation=generation)


def _memory(tier: str) -> TierCapability:
    return TierCapability(
        tier,
        "host",
        kernel_readable=True,
        dma_source=True,
        dma_destination=True,
        persistence=Persistence.PROCESS,
        visibility=Visibility.WRITE,
        partial_attention=True,
    )
