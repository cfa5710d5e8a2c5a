"""Conformance: published figures computed again by the product, and wrong inputs that it must refuse.

One file for each topic, and its inputs and published values in `data/`. Nothing is loaded before it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.conform.result import ConformReport, Figure, Refusals, TopicReport

__all__ = ["TOPICS", "ConformReport", "Figure", "Refusals", "TopicReport", "run_topics"]

TOPICS = {
    "manifest": "kvstrata.lab.conform.manifest:conform_manifest",
    "error-cost-fallback": "kvstrata.lab.conform.error_cost_fallback:conform_error_cost_fallback",
}
"""Name of each topic and where it lives."""


def run_topics(
    names: Sequence[str] = (), progress: Callable[[int, int], None] = lambda done, total: None
) -> ConformReport:
    """Run the named topics, all without names; calls `progress(done, total)` in topics. Errors: `ConfigurationError`
    for a name that is not in `TOPICS`."""
    for name in names:
        if name not in TOPICS:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"topic {name!r} does not exist", f"one of: {', '.join(TOPICS)}"
            )
    chosen = list(names) or list(TOPICS)
    reports: list[TopicReport] = []
    for name in chosen:
        module, _, function = TOPICS[name].partition(":")
        reports.append(getattr(import_module(module), function)())
        progress(len(reports), len(chosen))
    return ConformReport(tuple(reports))
