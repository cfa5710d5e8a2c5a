"""Pictures of the demo's report, as SVG for a light and a dark page."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

__all__ = ["Picture", "draw_figures"]

_MIB = 1 << 20
_WIDTH, _HEIGHT = 7.2, 2.9
_LIGHT = {
    "ink": "#24292f",
    "faint": "#c9d1d9",
    "own": "#0f766e",
    "other": "#9aa4af",
    "limit": "#b42318",
    "file": "#b7791f",
}
_DARK = {
    "ink": "#d7dde3",
    "faint": "#3d444d",
    "own": "#2dd4bf",
    "other": "#6b7682",
    "limit": "#ff7b72",
    "file": "#e3b341",
}


@dataclass(frozen=True)
class Picture:
    """One picture: SVG bytes for either kind of page."""

    title: str
    note: str
    light: bytes
    dark: bytes


def draw_figures(summary: Mapping[str, Any]) -> list[Picture]:
    """The pictures that a summary has numbers for."""
    found: list[Picture] = []
    if summary.get("trace"):
        found.append(
            _picture(
                "Where the bytes were",
                "The cold run, sampled after every step. The history outgrows the budget; device memory does not. "
                "Between samples device memory may be higher, but never above the peak.",
                lambda axes, ink: _bytes_over_time(axes, summary, ink),
            )
        )
    if summary.get("stock_first_token_s") is not None:
        found.append(
            _picture(
                "Time to the first token",
                "From the first byte read to the first token, logarithmic. Imports and loading the model are not "
                "counted for any of them.",
                lambda axes, ink: _first_token(axes, summary, ink),
            )
        )
    if summary.get("timing_ms"):
        found.append(
            _picture(
                "Time per token",
                f"Medians. In memory: {summary['timing_samples']} interleaved steps each at the full history, whiskers "
                f"from the lower to the upper quartile. Under the budget: {summary['new_tokens'] - 1} steps in each of "
                f"{1 + len(summary['restores'])} runs.",
                lambda axes, ink: _per_token(axes, summary, ink),
            )
        )
    return found


def _picture(title: str, note: str, draw: Callable[[Axes, Mapping[str, str]], None]) -> Picture:
    return Picture(title, note, _svg(draw, _LIGHT), _svg(draw, _DARK))


def _svg(draw: Callable[[Axes, Mapping[str, str]], None], ink: Mapping[str, str]) -> bytes:
    style: Any = {
        "font.size": 9.0,
        "text.color": ink["ink"],
        "axes.labelcolor": ink["ink"],
        "axes.edgecolor": ink["faint"],
        "xtick.color": ink["ink"],
        "ytick.color": ink["ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "kvstrata",
    }
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        draw(figure.add_subplot(), ink)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _bytes_over_time(axes: Axes, summary: Mapping[str, Any], ink: Mapping[str, str]) -> None:
    points = summary["trace"]
    seconds = [point["seconds"] for point in points]

    def mib(key: str) -> list[float]:
        return [point[key] / _MIB for point in points]

    axes.plot(seconds, mib("logical_bytes"), color=ink["other"], label="history, once", linestyle=":")
    axes.plot(seconds, mib("file_bytes"), color=ink["file"], label="in files")
    axes.plot(seconds, mib("device_bytes"), color=ink["own"], label="in device memory", linewidth=2)
    if all(point["resident_bytes"] is not None for point in points):
        first = points[0]["resident_bytes"]
        grown = [(point["resident_bytes"] - first) / _MIB for point in points]
        axes.plot(seconds, grown, color=ink["ink"], label="growth of the process", linewidth=0.8)
    axes.axhline(summary["device_budget_bytes"] / _MIB, color=ink["limit"], linestyle="--", linewidth=1, label="budget")
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _first_token(axes: Axes, summary: Mapping[str, Any], ink: Mapping[str, str]) -> None:
    rows = [
        (f"stock cache ({summary['stock_prefill_attention']})", summary["stock_first_token_s"], ink["other"]),
        ("kvstrata, cold", summary["cold_first_token_s"], ink["own"]),
        ("kvstrata, restored", summary["restored_first_token_s"], ink["own"]),
    ]
    _bars(axes, rows, lambda value: f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms", ink)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(rows[2][1] / 3, max(row[1] for row in rows) * 3)
    axes.set_xlabel("seconds")


def _per_token(axes: Axes, summary: Mapping[str, Any], ink: Mapping[str, str]) -> None:
    times, spread = summary["timing_ms"], summary["timing_quartiles_ms"]
    rows = [
        ("stock, eager", times["eager"], ink["other"]),
        ("stock, sdpa", times["sdpa"], ink["other"]),
        ("kvstrata, in memory", times["kvstrata"], ink["own"]),
        ("kvstrata, under the budget", summary["decode_ms_per_token"], ink["own"]),
    ]
    measured = ("eager", "sdpa", "kvstrata")
    ends = {place: spread[name][1] for place, name in enumerate(measured)}
    _bars(axes, rows, lambda value: f"{value:.1f} ms", ink, ends)
    for place, name in enumerate(measured):
        low, high = spread[name]
        axes.plot([low, high], [place, place], color=ink["ink"], linewidth=1.2)
    axes.set_xlim(0, max(row[1] for row in rows) * 1.2)
    axes.set_xlabel("milliseconds a token")


def _bars(
    axes: Axes,
    rows: list[tuple[str, float, str]],
    words: Callable[[float], str],
    ink: Mapping[str, str],
    ends: Mapping[int, float] | None = None,
) -> None:
    axes.barh(range(len(rows)), [row[1] for row in rows], color=[row[2] for row in rows], height=0.6)
    for place, (_, value, _) in enumerate(rows):
        axes.annotate(
            words(value),
            (max(value, (ends or {}).get(place, 0)), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=ink["ink"],
        )
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
