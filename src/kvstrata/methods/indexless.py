"""What methods share that keep nothing about the rows but how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.methods.interface import Index, Method, MethodContext, StepRows

__all__ = ["IndexlessMethod"]


@dataclass(frozen=True)
class IndexlessMethod(Method[Index]):
    """Everything but `select`."""

    def build(self, ctx: MethodContext, layer: int, index: Index | None) -> Index:
        """Nothing but the frontier; reads nothing."""
        built = Index()
        built.frontier = ctx.visible
        return built

    def append(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Index:
        """The same index, its frontier moved."""
        index.frontier = rows.stop
        index.generation += 1
        return index

    def truncate(self, index: Index, frontier: int) -> Index:
        """The same index, its frontier moved back."""
        index.frontier = frontier
        index.generation += 1
        return index
