"""What can be refused, and why.

    KvstrataError
    |-- ConfigurationError   (ValueError)           an argument is wrong: field and value are named
    |-- UnsupportedError     (NotImplementedError)  a model, shape or mode that is not served exactly, so not at all
    |-- StateError           (RuntimeError)         a call at the wrong time: closed, attached twice, frontier behind
    |-- BudgetError          (MemoryError)          the memory budget cannot hold the work; says what would do
    |-- RetrievalError       (RuntimeError)         a manifest, operation or receipt does not fit its rows
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
    "RetrievalError",
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
    CHUNK_PINNED = "chunk_pinned"
    TOKENS_DIFFER = "tokens_differ"

    SESSION_NAME_INVALID = "session_name_invalid"
    SESSION_UNKNOWN = "session_unknown"
    SESSION_DAMAGED = "session_damaged"
    CONTEXT_DIFFERS = "context_differs"

    MODEL_MISMATCH = "model_mismatch"
    ADAPTER_MISMATCH = "adapter_mismatch"
    CACHE_ABI_MISMATCH = "cache_abi_mismatch"
    VISIBILITY_POLICY_MISMATCH = "visibility_policy_mismatch"
    POSITION_CONTRACT_MISMATCH = "position_contract_mismatch"
    ROPE_CONFIG_MISMATCH = "rope_config_mismatch"
    LINEAGE_MISMATCH = "lineage_mismatch"
    TENANT_MISMATCH = "tenant_mismatch"
    QUERY_MISMATCH = "query_mismatch"
    MASK_MISMATCH = "mask_mismatch"
    SELECTOR_SOURCE_BINDING_MISMATCH = "selector_source_binding_mismatch"
    INDEX_SOURCE_BINDING_MISMATCH = "index_source_binding_mismatch"

    STALE_CHECKPOINT_GENERATION = "stale_checkpoint_generation"
    STALE_NAMESPACE_GENERATION = "stale_namespace_generation"
    STALE_REQUEST_GENERATION = "stale_request_generation"
    STALE_CACHE_GENERATION = "stale_cache_generation"
    STALE_PUBLICATION_GENERATION = "stale_publication_generation"
    STALE_MANIFEST_GENERATION = "stale_manifest_generation"
    STALE_SELECTOR_GENERATION = "stale_selector_generation"
    STALE_INDEX_GENERATION = "stale_index_generation"
    STALE_FRONTIER = "stale_frontier"
    STALE_REPLICA_GENERATION = "stale_replica_generation"
    STALE_AUTHORITY_EPOCH = "stale_authority_epoch"
    STALE_DESTINATION_ALLOCATION = "stale_destination_allocation"
    STALE_VISIBILITY_EVENT = "stale_visibility_event"

    GEOMETRY_MISMATCH = "geometry_mismatch"
    GQA_OWNERSHIP_MISMATCH = "gqa_ownership_mismatch"
    LAYER_MISMATCH = "layer_mismatch"
    COORDINATES_MISMATCH = "coordinates_mismatch"
    CODEC_LAYOUT_MISMATCH = "codec_layout_mismatch"

    COVERAGE_BEYOND_FRONTIER = "coverage_beyond_frontier"
    INDEX_FRONTIER_GAP = "index_frontier_gap"
    CANDIDATE_BEYOND_FRONTIER = "candidate_beyond_frontier"
    CANDIDATE_NOT_INDEXED = "candidate_not_indexed"
    DUPLICATE_CANDIDATE = "duplicate_candidate"
    PROXY_NOT_RECOVERY_REPLICA = "proxy_not_recovery_replica"
    REPLICA_MISSING = "replica_missing"
    TOO_FEW_REPLICAS = "too_few_replicas"
    NO_LEGAL_PATH = "no_legal_path"
    SUPPORT_MISMATCH = "support_mismatch"

    PAYLOAD_BYTES_MISMATCH = "payload_bytes_mismatch"
    REPLICA_PAYLOAD_DIGEST_MISMATCH = "replica_payload_digest_mismatch"
    ROW_DIGEST_MISMATCH = "row_digest_mismatch"
    CLOCK_ORIGIN_MISMATCH = "clock_origin_mismatch"
    DEADLINE_PASSED = "deadline_passed"
    UNDECLARED_FALLBACK = "undeclared_fallback"
    CANDIDATE_IDS_NOT_ROWS = "candidate_ids_not_rows"
    STATE_DTYPE_MISMATCH = "state_dtype_mismatch"
    SNAPSHOT_NOT_PUBLISHED = "snapshot_not_published"

    APPROXIMATION_NOT_ALLOWED = "approximation_not_allowed"
    SELECTION_CAPPED = "selection_capped"

    METHOD_MISMATCH = "method_mismatch"
    CALIBRATION_DAMAGED = "calibration_damaged"
    ONLINE_GATE_USES_DENSE_MASS = "online_gate_uses_dense_mass"
    EXACT_SILENTLY_DEGRADED = "exact_silently_degraded"
    EXACTNESS_LABEL_MISMATCH = "exactness_label_mismatch"
    WIDEN_REPEATED = "widen_repeated"
    RETRY_EXCEEDS_SLACK = "retry_exceeds_slack"
    UNFINISHED_PUBLISHED = "unfinished_published"
    OUTCOME_MISMATCH = "outcome_mismatch"

    TENSOR_NOT_FINITE = "tensor_not_finite"
    SCORE_SCALE_MISMATCH = "score_scale_mismatch"
    PROBABILITIES_NOT_NORMALISED = "probabilities_not_normalised"
    TOP_ROWS_MISMATCH = "top_rows_mismatch"
    VALUE_BOUND_INVALID = "value_bound_invalid"
    DOWNSTREAM_BOUND_INVALID = "downstream_bound_invalid"
    MASS_LEDGER_MISMATCH = "mass_ledger_mismatch"
    ERROR_BOUND_VIOLATED = "error_bound_violated"
    RELATIVE_ERROR_UNCONDITIONED = "relative_error_unconditioned"
    RECALL_NAMESPACE_MISMATCH = "recall_namespace_mismatch"

    UNIT_PARTITION_INVALID = "unit_partition_invalid"
    UNIT_OVERLAP = "unit_overlap"
    UNIT_COVERAGE_GAP = "unit_coverage_gap"
    UNIT_EXPANSION_MISMATCH = "unit_expansion_mismatch"
    SELECTED_NOT_CANDIDATE = "selected_not_candidate"
    ROW_OUT_OF_SUPPORT = "row_out_of_support"
    SUPPORT_NOT_DEDUPLICATED = "support_not_deduplicated"
    LEDGER_UNIT_MISMATCH = "ledger_unit_mismatch"
    LEDGER_COLLAPSED = "ledger_collapsed"
    LEDGER_LINE_MISSING = "ledger_line_missing"
    TRANSFER_BYTES_MISMATCH = "transfer_bytes_mismatch"


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


class RetrievalError(KvstrataError, RuntimeError):
    """A manifest, snapshot, operation or receipt that does not fit the rows it names; nothing was published.

    Attributes:
        field: what does not fit, e.g. `source.rope_config`.
    """

    def __init__(self, reason: Reason, cause: str, next_step: str = "", *, field: str = "") -> None:
        super().__init__(reason, cause, next_step)
        self.field = field


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
