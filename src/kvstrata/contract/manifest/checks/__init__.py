"""What is checked before a look-up, a gather or a partial state is believed: one file for each kind of condition."""

from __future__ import annotations

from kvstrata.contract.manifest.checks.order import (
    GATHER,
    LOOKUP,
    PARTIAL,
    PUBLISH_INDEX,
    PUBLISH_SELECTOR,
    SEARCH_RESULT,
    run_checks,
)

__all__ = ["GATHER", "LOOKUP", "PARTIAL", "PUBLISH_INDEX", "PUBLISH_SELECTOR", "SEARCH_RESULT", "run_checks"]
