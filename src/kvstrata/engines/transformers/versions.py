"""What differs between the releases of Transformers that are served."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["cache_keyword"]


def cache_keyword(model: Any) -> str:
    """The name under which the model's forward takes a cache: `cache` since 5.24, `past_key_values` before."""
    accepted = inspect.signature(type(model).forward).parameters
    return "past_key_values" if "past_key_values" in accepted else "cache"
