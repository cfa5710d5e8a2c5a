"""What can be refused, and why.

    KvstrataError
    |-- ConfigurationError   (ValueError)           an argument is wrong: field and value are named
    |-- UnsupportedError     (NotImplementedError)  a model, shape or mode that is not served exactly, so not at all
    |-- StateError           (RuntimeError)         a call at the wrong time: closed, attached twice, frontier behind
    |-- BudgetError          (MemoryError)          the memory budget cannot hold the work; says what would do
    |-- KernelUnavailable    (RuntimeError)         a native kernel was named that this machine cannot run
    |-- ModelLoadError       (ValueError)           a model could not be loaded; says what to do next
    |-- StoreError           (OSError)              the store cannot be used as asked
    |   `-- DamagedError                            stored bytes are missing, truncated, altered or foreign
    `-- SessionError         (LookupError)          a session name that is illegal, unknown or cannot be restored

Every error carries one stable `Reason`. Expected outcomes (a miss, a degraded restore) are values, not exceptions; they
carry the same reasons.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "BudgetError",
    "ConfigurationError",
    "DamagedError",
    "KernelUnavailable",
    "KvstrataError",
    "ModelLoadError",
    "Reason",
    "SessionError",
    "StateError",
    "StoreError",
    "UnsupportedError",
]


class Reason(StrEnum):
    """Stable names of refusals and misses; `docs/errors.md` says what to do about each."""

    INVALID_ARGUMENT = "invalid_argument"
    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_EXCEEDED = "context_exceeded"
    BATCH_UNSUPPORTED = "batch_unsupported"
    PADDING_UNSUPPORTED = "padding_unsupported"
    MASK_UNSUPPORTED = "mask_unsupported"
    POSITIONS_UNSUPPORTED = "positions_unsupported"
    MODEL_UNSUPPORTED = "model_unsupported"
    OPERATION_UNSUPPORTED = "operation_unsupported"
    ADAPTERS_UNDECLARED = "adapters_undeclared"
    ALREADY_ATTACHED = "already_attached"
    CLOSED = "closed"
    NOT_COMMITTED = "not_committed"
    BUDGET_TOO_SMALL = "budget_too_small"
    LEASE_EXPIRED = "lease_expired"
    KERNEL_UNAVAILABLE = "kernel_unavailable"
    MODEL_UNAVAILABLE = "model_unavailable"

    STORE_MISSING = "store_missing"
    STORE_NOT_A_DIRECTORY = "store_not_a_directory"
    STORE_READ_ONLY = "store_read_only"
    STORE_FULL = "store_full"
    STORE_FORMAT_NEWER = "store_format_newer"
    STORE_FOREIGN = "store_foreign"
    STORE_BUSY = "store_busy"
    STORE_IO = "store_io"
    STORE_LATE = "store_late"
    NOT_ADMITTED = "not_admitted"
    CHEAPER_TO_RECOMPUTE = "cheaper_to_recompute"

    CREDIT_PRESSURE = "credit_pressure"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"

    CHUNK_MISSING = "chunk_missing"
    CHUNK_TRUNCATED = "chunk_truncated"
    CHUNK_DAMAGED = "chunk_damaged"
    CHUNK_FOREIGN = "chunk_foreign"
    CHUNK_FORMAT_NEWER = "chunk_format_newer"
    TOKENS_DIFFER = "tokens_differ"

    SESSION_NAME_INVALID = "session_name_invalid"
    SESSION_UNKNOWN = "session_unknown"
    SESSION_DAMAGED = "session_damaged"
    CONTEXT_DIFFERS = "context_differs"


class KvstrataError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        reason: why, as a stable name.
        cause: the sentence that names field, value or place.
        next_step: what the caller can do, or the empty string.
    """

    def __init__(self, reason: Reason, cause: str, next_step: str = "") -> None:
        super().__init__(f"{cause} [{reason}]" + (f"\n  next: {next_step}" if next_step else ""))
        self.reason = reason
        self.cause = cause
        self.next_step = next_step


class ConfigurationError(KvstrataError, ValueError):
    """An argument is wrong."""


class UnsupportedError(KvstrataError, NotImplementedError):
    """A model, shape or mode that cannot be served exactly."""


class StateError(KvstrataError, RuntimeError):
    """A call at the wrong time."""


class BudgetError(KvstrataError, MemoryError):
    """The memory budget cannot hold the work.

    Attributes:
        required_bytes: a budget that would do for the same work.
    """

    def __init__(self, reason: Reason, cause: str, next_step: str = "", *, required_bytes: int = 0) -> None:
        super().__init__(reason, cause, next_step)
        self.required_bytes = required_bytes


class KernelUnavailable(KvstrataError, RuntimeError):  # noqa: N818 - the thing, not the event, is named
    """A native kernel level was named that is not built or not runnable here."""


class ModelLoadError(KvstrataError, ValueError):
    """A model could not be loaded."""


class StoreError(KvstrataError, OSError):
    """The store cannot be used as asked."""


class DamagedError(StoreError):
    """Stored bytes are missing, truncated, altered or belong to something else.

    Attributes:
        chunk: hexadecimal digest of the chunk, or the empty string.
    """

    def __init__(self, reason: Reason, cause: str, next_step: str = "", *, chunk: str = "") -> None:
        super().__init__(reason, cause, next_step)
        self.chunk = chunk


class SessionError(KvstrataError, LookupError):
    """A session name that is illegal, unknown or cannot be restored."""
