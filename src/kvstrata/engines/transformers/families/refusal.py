"""A named reason why a model is not served."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Refusal"]


@dataclass(frozen=True)
class Refusal:
    """name: stable, for programs. cause: the field, value or module, and why that matters. next_step: what to do."""

    name: str
    cause: str
    next_step: str = "use a model of a served family, or the stock cache"
