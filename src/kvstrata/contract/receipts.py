"""What was done, and what it cost: immutable records. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvstrata.contract.identity import FieldDifference
from kvstrata.contract.method import AnswerClass, QueryVariant
from kvstrata.contract.selection_receipts import SelectionReceipt
from kvstrata.errors import Reason, StateError

__all__ = ["Ledger", "Recompute", "RestoreReceipt", "SaveReceipt", "StepReceipt", "TierTraffic"]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Rows computed again because their bytes could not be used: from which position, how many, and why."""

    start: int
    tokens: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class StepReceipt:
    """One forward step of one request.

    start, rows: positions computed. visible: positions that could enter attention: all of them do in an exact step.
    resident_bytes: K/V read where it already was. moved_bytes: K/V brought from lower tiers. moved_segments: how many
    pieces. host_bytes: those of the moved bytes that came from the host tier and not from files.
    stall_s: time the model waited for bytes or for slots. read_s: service time of the readers. sealed: chunks sealed.
    contract: class of the answer. selections: what was left out, of every sequence that may leave rows out.

    Errors: `StateError` for an exact receipt of a step that left rows out, or whose rows were chosen by a query that is
    not the actual one.
    """

    start: int
    rows: int
    visible: int
    resident_bytes: int
    moved_bytes: int
    moved_segments: int
    stall_s: float
    read_s: float
    sealed: int
    contract: AnswerClass = AnswerClass.EXACT
    host_bytes: int = 0
    selections: tuple[SelectionReceipt, ...] = ()

    def __post_init__(self) -> None:
        if self.contract is not AnswerClass.EXACT:
            return
        variants = {variant for each in self.selections for variant in each.variants}
        if any(each.chose for each in self.selections) or variants - {QueryVariant.ACTUAL}:
            raise StateError(Reason.APPROXIMATION_NOT_ALLOWED, "a step that left rows out cannot have an exact receipt")


@dataclass(frozen=True, slots=True)
class SaveReceipt:
    """A saved session. written_bytes: written by the save itself. shared_bytes: published before it, by any request."""

    name: str
    sequence: int
    frontier: int
    chunks: int
    written_bytes: int
    shared_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreReceipt:
    """A restored session, whole, in part or not at all.

    stored_tokens: tokens of the snapshot. restored_tokens: rows that are usable now. wanted_tokens: rows asked for.
    read_bytes: rows read now. metadata_bytes: headers and padding of the files taken over.
    reason: why fewer rows than wanted came back, or `None`; detail tells it in words; difference names the first field
    that differs when the snapshot belongs to another context.
    """

    name: str
    sequence: int
    stored_tokens: int
    wanted_tokens: int
    restored_tokens: int
    read_bytes: int
    metadata_bytes: int
    seconds: float
    reason: Reason | None = None
    detail: str = ""
    difference: FieldDifference | None = None

    @property
    def hit(self) -> bool:
        """Whether every row asked for came back."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Bytes asked of one tier, bytes it moved, and bytes of the request that were in faster memory already."""

    requested_bytes: int = 0
    moved_bytes: int = 0
    resident_hit_bytes: int = 0


@dataclass(frozen=True)
class Ledger:
    """Every byte and second of one run.

    logical_bytes: rows of the history, once. device_bytes, peak_device_bytes: slots in use now and at most, tail,
    staging and workspace included. host_bytes: slots of the host tier in use. file_bytes: chunks of the history in
    files. staging_bytes: most bytes reserved for segments on their way. workspace_bytes: kernel scratch.
    metadata_bytes: headers and manifests. fragmented_bytes: slot bytes that hold no row. duplicate_bytes: rows that lie
    in more than one tier, once for each copy after the first. publish_waited: chunks that had to wait in memory for
    credits before they could be written, publish_waited_s: until they had them.
    """

    logical_bytes: int
    budget_bytes: int
    device_bytes: int
    peak_device_bytes: int
    host_bytes: int
    file_bytes: int
    staging_bytes: int
    workspace_bytes: int
    metadata_bytes: int
    fragmented_bytes: int
    duplicate_bytes: int
    peak_over_logical: float
    traffic: dict[str, TierTraffic]
    save_s: float
    load_s: float
    exposed_stall_s: float
    publish_cpu_s: float
    publish_checksum_write_s: float
    tokens_computed: int
    tokens_recomputed: int
    tokens_restored: int
    recomputes: tuple[Recompute, ...] = field(default=())
    publish_waited: int = 0
    publish_waited_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
