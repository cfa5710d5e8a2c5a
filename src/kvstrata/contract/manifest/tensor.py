"""Geometry of the rows, who owns them, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstrata.contract.identity import CacheAbi
from kvstrata.contract.layout import ITEM_SIZES
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["TensorContract"]


@dataclass(frozen=True, slots=True)
class TensorContract:
    """K and V [layers, kv_heads, positions, head_dim], queries [query_heads, rows, head_dim].

    key_itemsize, value_itemsize: bytes per element. query_to_kv: the K/V head that each query head reads; a head number
    alone is ambiguous. payload_bytes: what the contract's author says that K and V take together, for the ledger.
    """

    layers: int
    query_heads: int
    kv_heads: int
    positions: int
    head_dim: int
    key_itemsize: int
    value_itemsize: int
    query_to_kv: tuple[int, ...]
    payload_bytes: int

    def __post_init__(self) -> None:
        if len(self.query_to_kv) != self.query_heads or not all(0 <= h < self.kv_heads for h in self.query_to_kv):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"TensorContract.query_to_kv={self.query_to_kv} must name one of {self.kv_heads} K/V heads for each of "
                f"{self.query_heads} query heads",
            )

    @classmethod
    def of(cls, abi: CacheAbi, positions: int) -> TensorContract:
        """The contract of `positions` rows under `abi`, where neighbouring query heads share a K/V head."""
        group = abi.query_heads // abi.kv_heads
        itemsize = ITEM_SIZES[abi.dtype]
        mapping = tuple(head // group for head in range(abi.query_heads))
        bare = cls(abi.layers, abi.query_heads, abi.kv_heads, positions, abi.head_dim, itemsize, itemsize, mapping, 0)
        return replace(bare, payload_bytes=bare.full_bytes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of K, and of V: [layers, kv_heads, positions, head_dim]."""
        return (self.layers, self.kv_heads, self.positions, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one position in all layers."""
        return self.layers * self.kv_heads * self.head_dim * (self.key_itemsize + self.value_itemsize)

    @property
    def full_bytes(self) -> int:
        """Bytes of K and V of all positions, computed from the geometry."""
        return self.positions * self.token_bytes
