"""Hash tables over the keys of one layer: random planes, a centre, and a code for every row and table."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from kvstrata.methods.interface import Index, MethodContext
from kvstrata.methods.simhash import simhash

__all__ = ["HashTables", "ProjectorScope", "Projectors"]


class ProjectorScope(StrEnum):
    """Who hashes with the same planes. MODEL: all heads of all layers (the authors' server). KV_HEAD_AND_16_LAYERS: a
    K/V head of 16 consecutive layers (their reference). KV_HEAD_AND_LAYER: one K/V head of one layer."""

    MODEL = "model"
    KV_HEAD_AND_16_LAYERS = "kv_head_and_16_layers"
    KV_HEAD_AND_LAYER = "kv_head_and_layer"


class Projectors:
    """Random planes that have been drawn, so that all layers and sequences with the same ones share them.

    drawn: by the seed of their generator, their shape and their device.
    """

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, tuple[int, ...], str], Tensor] = {}

    def of(
        self, ctx: MethodContext, layer: int, scope: ProjectorScope, columns: int, device: torch.device | str
    ) -> Tensor:
        """Gaussian planes fp32 [kv_heads or 1, head_dim, columns] of `layer`, which follow from seed and scope."""
        heads, each = ctx.geometry.kv_heads, 1
        if scope is ProjectorScope.MODEL:
            heads, each = 1, ctx.geometry.layers
        elif scope is ProjectorScope.KV_HEAD_AND_16_LAYERS:
            each = 16
        generator = ctx.generator(layer // each * each, f"magicpig/planes/{scope}")
        shape = (heads, ctx.geometry.head_dim, columns)
        key = (generator.initial_seed(), shape, str(device))
        if key not in self.drawn:
            self.drawn[key] = torch.randn(shape, generator=generator).to(device)
        return self.drawn[key]


class HashTables(Index):
    """Codes of rows [0, frontier), held as [kv_heads, tables, capacity].

    centre: fp32 [kv_heads, head_dim], subtracted from every key before it is hashed or compared, appended ones
    included. It never moves: another centre is another index. planes: shared with other indexes, so not in `nbytes`.
    """

    def __init__(self, centre: Tensor, planes: Tensor, tables: int, generation: int) -> None:
        self.centre = centre
        self.planes = planes
        self.generation = generation
        self._tables = tables
        self._codes: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """[kv_heads, tables, frontier]."""
        assert self._codes is not None
        return self._codes[..., : self.frontier]

    @property
    def nbytes(self) -> int:
        """Bytes of centre and codes, with the room that is kept for rows to come."""
        return super().nbytes - self.planes.numel() * self.planes.element_size()

    def extend(self, keys: Tensor) -> None:
        """Hash `keys` [kv_heads, n, head_dim], the rows from the frontier on."""
        codes = simhash(keys, self.planes, self._tables, self.centre)
        stop = self.frontier + codes.shape[-1]
        if self._codes is None:
            self._codes = codes
        elif stop <= self._codes.shape[-1]:
            self._codes[..., self.frontier : stop] = codes
        else:
            # Room for an eighth more, so that appending a row costs a constant time on average.
            room = codes.new_empty(*codes.shape[:2], stop // 8 + 1)
            self._codes = torch.cat((self.codes, codes, room), dim=-1)
        self.frontier = stop
        self.generation += 1
