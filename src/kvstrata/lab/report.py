"""The demo's report: one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from typing import Any

from kvstrata.errors import Reason, UnsupportedError

__all__ = ["write_report"]

_LEDGER_WORDS = {
    "logical_bytes": "history, once",
    "budget_bytes": "memory budget",
    "device_bytes": "device memory at the end",
    "peak_device_bytes": "device memory at most",
    "host_bytes": "host memory tier",
    "file_bytes": "history in files",
    "staging_bytes": "reserved for segments on their way, at most",
    "workspace_bytes": "kernel workspace",
    "metadata_bytes": "headers and manifests",
    "fragmented_bytes": "slot bytes that hold no row",
    "duplicate_bytes": "rows in more than one tier",
    "peak_over_logical": "device memory at most / history",
    "save_s": "saving",
    "load_s": "loading (readers' service time)",
    "exposed_stall_s": "time the model waited for bytes",
    "publish_cpu_s": "publishing, processor time",
    "publish_checksum_write_s": "publishing, checksums and writing",
    "tokens_computed": "tokens computed",
    "tokens_recomputed": "tokens recomputed",
    "tokens_restored": "tokens restored",
}


def write_report(summary: Mapping[str, Any]) -> str:
    """The page for a summary of `run_demo`, complete or partial. Pictures are embedded.

    Errors: `UnsupportedError` when matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2

        from kvstrata.lab.figures import draw_figures
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            Reason.OPERATION_UNSUPPORTED, f"the report needs {error.name}", "pip install 'kvstrata[report]'"
        ) from error
    source = resources.files("kvstrata.lab").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = _bytes
    template = environment.from_string(source)
    figures = [
        {"title": figure.title, "note": figure.note, "light": _uri(figure.light), "dark": _uri(figure.dark)}
        for figure in draw_figures(summary)
    ]
    return template.render(s=summary, figures=figures, ledger=_ledger_rows(summary))


def _ledger_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    cold, back = summary.get("cold_ledger") or {}, summary.get("ledger") or {}
    return [(words, _value(key, cold.get(key)), _value(key, back.get(key))) for key, words in _LEDGER_WORDS.items()]


def _value(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return _bytes(value)
    if key.endswith("_s"):
        return f"{value:.3f} s"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


def _bytes(value: float | None) -> str:
    return "–" if value is None else f"{value / (1 << 20):,.1f} MiB"


def _uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
