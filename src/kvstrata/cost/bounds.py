"""The check that every number of the cost model passes at the edge."""

from __future__ import annotations

import math

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["require_finite"]


def require_finite(field: str, value: float, *, least: float = 0.0, above: bool = False) -> None:
    """Errors: `ConfigurationError` unless `value` is finite and at least `least` (above it, when `above`)."""
    if not math.isfinite(value) or value < least or (above and value == least):
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"{field}={value} must be finite and {'above' if above else 'at least'} {least:g}"
        )
