"""Rows for methods and frame, from wherever they are: device, host arena in place, or files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from chunks_and_faults import LAYERS, LAYOUT
from directory_parts import make_ids
from torch import Tensor

from kvstrata.contract.identity import ChunkContext
from kvstrata.contract.method import ComputeSite, Owner
from kvstrata.kernels.decode import DecodeAttention
from kvstrata.methods.interface import Geometry
from kvstrata.methods.selection import NO_UNIT
from kvstrata.placement.expansion import Support
from kvstrata.placement.on_demand import OnDemand
from kvstrata.placement.row_access import RowAccess
from kvstrata.placement.support_attention import SupportAttention
from kvstrata.store.directory import Directory
from kvstrata.store.eviction import Lru
from kvstrata.store.history import History
from kvstrata.store.host_cache import HostCache, host_arena
from kvstrata.store.promotion import Promoter
from kvstrata.store.publication import Publisher
from kvstrata.tiers.device import HostTensorBacking
from kvstrata.tiers.files import FileTier
from kvstrata.tiers.memory import MemoryArena

from chunks_and_faults import make_context  # isort: skip

CHUNKS, SIZE = 4, LAYOUT.chunk_tokens
GEOMETRY = Geometry(LAYERS, LAYOUT.query_heads, LAYOUT.kv_heads, LAYOUT.head_dim, 0.25, (None,) * LAYERS)
LAYER = 1


class Scene:
    """A history of `CHUNKS` chunks and some rows, all of random floats; keys [layer] is [kv_heads, rows, head_dim]."""

    def __init__(self, root: Path, site: ComputeSite) -> None:
        context: ChunkContext = make_context()
        self.backing = HostTensorBacking(LAYOUT.segment_bytes, (CHUNKS + 2) * LAYERS)
        self.directory = Directory(MemoryArena(LAYOUT.segment_bytes, self.backing), LAYERS)
        self.directory.host = host_arena(LAYOUT.segment_bytes, CHUNKS * LAYERS)
        self.cache = HostCache(self.directory, Lru())
        self.tier = FileTier(root)
        self.publisher = Publisher(self.directory, self.tier, LAYOUT)
        self.publisher.start()
        self.promoter = Promoter(self.directory, self.tier, LAYOUT, host=self.cache)
        self.history = History(self.directory, context)
        self.plan = OnDemand(
            [self.history], LAYOUT, self.backing.segment, self.promoter, self.publisher, lambda slots: slots,
            host=self.cache,
        )  # fmt: skip
        kernel = DecodeAttention(LAYOUT)
        attention = SupportAttention(kernel, GEOMETRY, lambda: self.backing.whole, self.backing.stride)
        self.charged: Counter[str] = Counter()
        self.access = RowAccess(self.history, attention, site, self.charge)
        generator = torch.Generator().manual_seed(0)
        rows = CHUNKS * SIZE + 5
        shape = (LAYERS, LAYOUT.kv_heads, rows, LAYOUT.head_dim)
        self.keys, self.values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        for start in (*range(0, CHUNKS * SIZE, SIZE), CHUNKS * SIZE):
            count = min(SIZE, rows - start)
            assert self.history.extend_tail(count)
            self.plan.tables[0].rebuild(self.history)
            for layer, table in enumerate(self.plan.tables[0].layers):
                new = (tensor[layer, :, start : start + count].unsqueeze(0) for tensor in (self.keys, self.values))
                kernel.append(*new, table, start)
            self.history.commit(count, make_ids(count, start))
        for record in self.history.chunks:
            self.publisher.submit(record)
        self.publisher.wait()

    def charge(self, nbytes: Iterable[tuple[str, int]]) -> None:
        for tier, count in nbytes:
            self.charged[tier] += count

    def begin(self, host: Iterable[int] = (), files: Iterable[int] = ()) -> None:
        """A step in which all layers choose, with these chunks in the host tier and in files alone."""
        for chunk in host:
            for layer in range(LAYERS):
                self.cache.demote(self.history.chunks[chunk], layer)
        for chunk in (*host, *files):
            for layer in range(LAYERS):
                self.directory.evict(self.history.chunks[chunk], layer)
        self.plan.dirty = True
        self.plan.begin_choosing(range(LAYERS), 1)
        self.access.chosen = frozenset(range(LAYERS))
        self.access.bind(self.plan, 0)

    def expected(self, rows: Tensor) -> Tensor:
        heads = torch.arange(rows.shape[0]) // max(1, rows.shape[0] // LAYOUT.kv_heads)
        found = self.keys[LAYER][heads.unsqueeze(-1), rows.clamp_min(0)]
        return found.masked_fill((rows == NO_UNIT).unsqueeze(-1), 0.0)

    @property
    def held(self) -> int:
        return sum(self.cache.arena._holders)

    def close(self) -> None:
        self.access.give_back()
        self.plan.close()
        self.publisher.stop()
        self.promoter.close()


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    found = Scene(tmp_path, getattr(request, "param", ComputeSite.GATHER))
    yield found
    found.close()


near = pytest.mark.parametrize("scene", [ComputeSite.NEAR_DATA], indirect=True)
either = pytest.mark.parametrize("scene", list(ComputeSite), indirect=True)


def support(rows: list[list[int]], sinks: int = 0, recent: int = 5) -> Support:
    chosen = torch.tensor(rows)
    visible = CHUNKS * SIZE + 5
    zeros = torch.zeros_like(chosen)
    return Support(Owner.KV_HEAD, chosen, zeros, zeros, sinks, visible - recent, visible, None, chosen.numel(), 0)


@either
@pytest.mark.parametrize("owners", [LAYOUT.kv_heads, LAYOUT.query_heads])
def test_single_rows_come_from_every_tier(scene: Scene, owners: int) -> None:
    scene.begin(host=[0, 1], files=[2])
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, CHUNKS * SIZE + 5, (owners, 40), generator=generator)
    rows[:, 3] = NO_UNIT
    rows[0, 5:] = NO_UNIT
    assert torch.equal(scene.access.read_at(LAYER, rows), scene.expected(rows))
    at_site = scene.access._near_site
    assert scene.held == (2 if at_site else 0)
    scene.access.give_back()
    assert scene.held == 0
    assert scene.charged["files"] == LAYOUT.segment_bytes
    assert scene.charged["host"] == (0 if at_site else 2 * LAYOUT.segment_bytes)


@either
def test_consecutive_rows_are_brought_in_and_charged(scene: Scene) -> None:
    scene.begin(files=[0, 1, 2])
    start, stop = SIZE - 3, SIZE + 9
    keys, values = scene.access.read(LAYER, start, stop)
    assert torch.equal(keys, scene.keys[LAYER][:, start:stop])
    assert torch.equal(values, scene.values[LAYER][:, start:stop])
    assert scene.charged == {"files": 2 * LAYOUT.segment_bytes}
    assert scene.access.missing(LAYER) == {2}
    scene.access.read(LAYER, start, stop)
    assert scene.charged == {"files": 2 * LAYOUT.segment_bytes}, "they are there"


@near
def test_a_damaged_host_copy_is_revoked_and_its_rows_come_from_files(scene: Scene) -> None:
    scene.begin(host=[0, 1])
    record = scene.history.chunks[1]
    grant = record.host.grants[LAYER]
    assert grant is not None
    scene.cache.arena.backing.writable(grant.slot)[100] ^= 1
    rows = torch.arange(2 * SIZE).expand(LAYOUT.kv_heads, -1)
    assert torch.equal(scene.access.read_at(LAYER, rows), scene.expected(rows))
    assert scene.charged == {"files": LAYOUT.segment_bytes}
    scene.access.give_back()
    assert scene.held == 0


@either
def test_persistent_rows_are_wanted_on_the_device(scene: Scene) -> None:
    scene.begin(host=[0, 1, 2, 3])
    wanted, lent = scene.access.chunks_of(LAYER, support([[SIZE, NO_UNIT], [2 * SIZE + 1, SIZE]], sinks=2, recent=9))
    if scene.access._near_site:
        assert (wanted, set(lent)) == ({0, 3, 4}, {1, 2})
    else:
        assert (wanted, lent) == ({0, 1, 2, 3, 4}, {})
    wanted, _ = scene.access.chunks_of(LAYER, support([[NO_UNIT], [NO_UNIT]]))
    assert wanted == {4}


def test_what_is_missing_is_known_by_tier(scene: Scene) -> None:
    scene.begin(host=[1], files=[2, 3])
    assert scene.access.missing(LAYER) == {1, 2, 3}
    size = LAYOUT.segment_bytes
    assert scene.access.missing_bytes(LAYER) == {"host": size, "files": 2 * size}
    assert scene.access.first_missing == 1
    scene.access.arrive(LAYER, [1])
    assert scene.access.missing_bytes(LAYER) == {"files": 2 * size}
    assert scene.access.first_missing == 1, "in another layer"
    for layer in range(LAYERS):
        scene.access.arrive_all(layer)
    assert scene.access.missing_bytes(LAYER) == {}
    assert scene.access.first_missing == CHUNKS
    assert scene.access.alone


def test_what_somebody_else_looks_at_is_not_charged(scene: Scene) -> None:
    scene.begin(files=[0, 1])
    scene.access.arrive_all(LAYER, charged=False)
    assert not scene.charged
    assert not scene.access.missing(LAYER)


def test_rows_are_found_in_chunks(scene: Scene) -> None:
    rows = torch.tensor([[0, SIZE - 1, SIZE, 3 * SIZE, NO_UNIT]])
    assert scene.access.lies_in(rows, [1, 3]).tolist() == [[False, False, True, True, False]]
    assert not scene.access.lies_in(rows, []).any()


@near
def test_loans_end_when_a_read_fails(scene: Scene) -> None:
    scene.begin(host=[0], files=[1])
    scene.tier.revoke(scene.history.chunks[1].digest)
    scene.promoter.files.forget(scene.history.chunks[1].digest)
    rows = torch.tensor([[0, SIZE]]).expand(LAYOUT.kv_heads, -1)
    with pytest.raises(OSError, match="chunk"):
        scene.access.read_at(LAYER, rows)
    assert scene.held == 1
    scene.access.give_back()
    assert scene.held == 0
