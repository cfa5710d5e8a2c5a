"""Bytes of one selection, each charged once and on its own line: what is probed, named, described, attended to, moved.

    candidates |C| B_candidate,  descriptors |U| B_descriptor,  support |R| B_row,  transfer |R without resident| B_row

B_row = 2 head_dim itemsize, K and V of one row of one K/V head. Bytes that the search itself reads and the fixed part
of a transfer are lines too, and never part of the payload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.contract.unit_expansion import UnitExpansion
from kvstrata.errors import ConfigurationError, Reason, RetrievalError

__all__ = ["BYTE_LEDGER", "ByteLedger", "ChargedPer", "UnitCosts"]

_CHARGE = "charge each line once, in its own unit"


class ChargedPer(StrEnum):
    """What a line counts."""

    CANDIDATE = "candidate"
    UNIT = "unit"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Bytes of one of each. row_bytes: K and V of a row of one K/V head. setup_bytes: of one transfer, at most one for
    each selection. head_dim in elements, itemsize in bytes.

    Errors: `ConfigurationError` for a value that cannot be; `RetrievalError` with PAYLOAD_BYTES_MISMATCH when
    row_bytes is not that of K and V.
    """

    head_dim: int
    itemsize: int
    row_bytes: int
    candidate_bytes: int = 0
    descriptor_bytes: int = 0
    setup_bytes: int = 0

    def __post_init__(self) -> None:
        for field, least in (
            ("head_dim", 1),
            ("itemsize", 1),
            ("candidate_bytes", 0),
            ("descriptor_bytes", 0),
            ("setup_bytes", 0),
        ):
            _require_whole(f"UnitCosts.{field}", getattr(self, field), least)
        wanted = 2 * self.head_dim * self.itemsize
        if self.row_bytes != wanted:
            raise _refused(
                Reason.PAYLOAD_BYTES_MISMATCH,
                "costs.row_bytes",
                f"{self.row_bytes} B were declared, K and V of {self.head_dim} elements take {wanted} B",
            )

    @classmethod
    def of(
        cls, head_dim: int, itemsize: int, *, candidate_bytes: int = 0, descriptor_bytes: int = 0, setup_bytes: int = 0
    ) -> UnitCosts:
        """Costs of rows of that shape."""
        return cls(head_dim, itemsize, 2 * head_dim * itemsize, candidate_bytes, descriptor_bytes, setup_bytes)


@dataclass(frozen=True, slots=True)
class ByteLedger:
    """Bytes of one owner's selection. probe_bytes: read by the search, as it reported. setup_bytes: `None` is a line
    that was forgotten, 0 one that costs nothing. descriptor_per: what descriptors are charged for.

    `require` holds a ledger against the selection that it is about.
    """

    probe_bytes: int
    candidate_bytes: int
    descriptor_bytes: int
    support_bytes: int
    transfer_bytes: int
    setup_bytes: int | None
    descriptor_per: ChargedPer = ChargedPer.UNIT

    def __post_init__(self) -> None:
        for field in ("probe_bytes", "candidate_bytes", "descriptor_bytes", "support_bytes", "transfer_bytes"):
            _require_whole(f"ByteLedger.{field}", getattr(self, field), 0)

    @classmethod
    def of(cls, expansion: UnitExpansion, costs: UnitCosts, probe_bytes: int = 0) -> ByteLedger:
        """The ledger of `expansion`."""
        moved = len(expansion.transferred)
        return cls(
            probe_bytes,
            len(expansion.candidates) * costs.candidate_bytes,
            len(expansion.selected) * costs.descriptor_bytes,
            len(expansion.support) * costs.row_bytes,
            moved * costs.row_bytes,
            costs.setup_bytes if moved else 0,
        )

    @property
    def read_amplification(self) -> float:
        """All bytes that were read or moved, over those of the support; 0 for an empty support."""
        read = self.probe_bytes + self.candidate_bytes + self.descriptor_bytes + self.transfer_bytes
        return (read + (self.setup_bytes or 0)) / self.support_bytes if self.support_bytes else 0.0

    def require(self, expansion: UnitExpansion, costs: UnitCosts, probe_bytes: int = 0) -> ByteLedger:
        """This ledger. Errors: `RetrievalError` of the first check in `BYTE_LEDGER` that fails."""
        wanted = ByteLedger.of(expansion, costs, probe_bytes)
        for check in BYTE_LEDGER:
            check(self, wanted)
        return self


def lines_present(found: ByteLedger, wanted: ByteLedger) -> None:
    """No line was forgotten, also where it costs nothing."""
    if found.setup_bytes is None:
        raise _refused(Reason.LEDGER_LINE_MISSING, "ledger.setup_bytes", "the fixed part of the transfer has no line")


def lines_apart(found: ByteLedger, wanted: ByteLedger) -> None:
    """What the search read stands on its own line, and not in the payload."""
    if found.probe_bytes != wanted.probe_bytes:
        cause = f"{found.probe_bytes} B stand for a search that read {wanted.probe_bytes} B"
        raise _refused(Reason.LEDGER_COLLAPSED, "ledger.probe_bytes", cause)


def descriptor_unit(found: ByteLedger, wanted: ByteLedger) -> None:
    """Descriptors are charged for units, whatever the rows in them."""
    if found.descriptor_per is not ChargedPer.UNIT or found.descriptor_bytes != wanted.descriptor_bytes:
        cause = f"{found.descriptor_bytes} B for each {found.descriptor_per}, {wanted.descriptor_bytes} B for the units"
        raise _refused(Reason.LEDGER_UNIT_MISMATCH, "ledger.descriptor_bytes", cause)


def candidate_lines(found: ByteLedger, wanted: ByteLedger) -> None:
    """Candidates are charged for what was ranked."""
    _require_line(Reason.LEDGER_UNIT_MISMATCH, "candidate_bytes", found, wanted)


def support_lines(found: ByteLedger, wanted: ByteLedger) -> None:
    """The payload is K and V of every row of the support, once."""
    _require_line(Reason.PAYLOAD_BYTES_MISMATCH, "support_bytes", found, wanted)


def transfer_lines(found: ByteLedger, wanted: ByteLedger) -> None:
    """Rows that were resident are not charged as moved."""
    _require_line(Reason.TRANSFER_BYTES_MISMATCH, "transfer_bytes", found, wanted)


def setup_lines(found: ByteLedger, wanted: ByteLedger) -> None:
    """The fixed part of a transfer is charged once, and where there was one."""
    _require_line(Reason.TRANSFER_BYTES_MISMATCH, "setup_bytes", found, wanted)


BYTE_LEDGER: tuple[Callable[[ByteLedger, ByteLedger], None], ...] = (
    lines_present,
    lines_apart,
    descriptor_unit,
    candidate_lines,
    support_lines,
    transfer_lines,
    setup_lines,
)


def _require_line(reason: Reason, line: str, found: ByteLedger, wanted: ByteLedger) -> None:
    if getattr(found, line) != getattr(wanted, line):
        cause = f"{getattr(found, line)} B were presented, {getattr(wanted, line)} B follow from the selection"
        raise _refused(reason, f"ledger.{line}", cause)


def _require_whole(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"{field} must be a whole number of at least {least}, got {value!r}"
        )


def _refused(reason: Reason, field: str, cause: str) -> RetrievalError:
    return RetrievalError(reason, f"{field}: {cause}", _CHARGE, field=field)
