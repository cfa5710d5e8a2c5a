"""Checks that all policies make of their callers."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sized

from kvstrata.errors import ConfigurationError, Reason, StateError

__all__ = ["require_absent", "require_empty", "require_present", "require_size"]


def require_absent(key: Hashable, keys: Container[Hashable]) -> None:
    """Errors: `StateError` when `key` is there."""
    if key in keys:
        raise StateError(Reason.INVALID_ARGUMENT, f"key {key!r} is admitted already", "touch it, or remove it first")


def require_present(key: Hashable, keys: Container[Hashable]) -> None:
    """Errors: `StateError` when `key` is not there."""
    if key not in keys:
        raise StateError(Reason.INVALID_ARGUMENT, f"key {key!r} is not admitted", "admit it first")


def require_empty(keys: Sized) -> None:
    """Errors: `StateError` when there are keys."""
    if len(keys):
        raise StateError(Reason.INVALID_ARGUMENT, f"restore needs an empty policy; this one has {len(keys)} keys")


def require_size(nbytes: int) -> int:
    """Return `nbytes`. Errors: `ConfigurationError` unless it is positive."""
    if nbytes < 1:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"nbytes={nbytes} must be positive")
    return nbytes
