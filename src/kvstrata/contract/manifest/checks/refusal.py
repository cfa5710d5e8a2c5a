"""How a check refuses."""

from __future__ import annotations

from kvstrata.contract.identity import Namespace
from kvstrata.errors import Reason, RetrievalError

__all__ = ["refuse", "require_equal", "require_tenant"]

REISSUE = "ask for a new manifest and look the rows up again"


def refuse(reason: Reason, field: str, cause: str, next_step: str = REISSUE) -> RetrievalError:
    """The error that names `field`."""
    return RetrievalError(reason, f"{field}: {cause}", next_step, field=field)


def require_equal(reason: Reason, field: str, found: object, wanted: object, next_step: str = REISSUE) -> None:
    """Errors: `RetrievalError` with both values when they differ."""
    if found != wanted:
        raise refuse(reason, field, f"{_text(found)} was presented, {_text(wanted)} is in force", next_step)


def require_tenant(field: str, found: Namespace, wanted: Namespace) -> None:
    """Errors: `RetrievalError` that names the tenants, and no salt."""
    if found != wanted:
        salts = " under another salt" if found.tenant == wanted.tenant else ""
        raise refuse(
            Reason.TENANT_MISMATCH,
            field,
            f"rows of tenant {found.tenant!r}{salts} were presented to tenant {wanted.tenant!r}",
            "nothing is shared across tenants; look up in the tenant's own index",
        )


def _text(value: object) -> str:
    return value[:16] if isinstance(value, str) and len(value) == 64 else repr(value)
