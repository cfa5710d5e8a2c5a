"""Which configurations are compared, and what each needs to be compared at the same number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.budget import Persistent, Rows
from kvstrata.contract.method import AnswerClass
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.methods.recording import Recording
from kvstrata.methods.interface import Method
from kvstrata.methods.registry import parse_method

__all__ = ["BASELINE", "CONTENDERS", "FLOOR", "PERSISTENT", "Contender", "contender", "contenders"]

PERSISTENT = Persistent(sinks=4, recent=64)
"""The same for every method; they count into its rows."""

BASELINE = "exact_top_k.shared"
"""What omitted mass is a multiple of."""

FLOOR = "streaming"
"""What a method that reads queries should leave behind."""

CONTENDERS = {
    BASELINE: "exact_top_k:sharing=softmax_sum",
    "exact_top_k": "exact_top_k",
    "quest.16": "quest:page_size=16",
    "quest.16.shared": "quest:page_size=16,sharing=softmax_sum",
    "quest.64": "quest:page_size=64",
    "magicpig": "magicpig",
    "infinigen": "infinigen",
    "infllm": "infllm:block_size=32",
    "infllm.in_place": "infllm:block_size=16,reposition=false,selection_owner=kv_head",
    FLOOR: "streaming",
    "random_rows": "random_rows",
}
"""Name and configuration, as text. Yardsticks stand at either end."""

_TUNING_QUERIES = 64


@dataclass(frozen=True)
class Contender:
    """A configuration at a number of rows. budget: what the frame is told; rows: what the comparison is about."""

    name: str
    method: Method[Any]
    rows: int
    budget: Rows


def contenders(names: Iterable[str], sizes: Sequence[int], recording: Recording) -> list[Contender]:
    """Every named configuration at every size. Errors: `ConfigurationError` for an unknown name."""
    return [contender(name, rows, recording) for name in names for rows in sizes]


def contender(name: str, rows: int, recording: Recording) -> Contender:
    """One of `CONTENDERS` at `rows` rows for each owner, persistent ones included.

    An estimator's sample has a random size: it is tuned so that persistent and sampled rows are `rows` on average over
    the last queries of the recorded history, and what caps it is half the history.
    """
    if name not in CONTENDERS:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"nothing called {name!r} is compared", f"one of {', '.join(CONTENDERS)}"
        )
    if rows <= PERSISTENT.rows:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"{rows} rows leave none to choose", f"use more than {PERSISTENT.rows}"
        )
    method = parse_method(CONTENDERS[name])
    if method.contract.answer is not AnswerClass.ESTIMATOR:
        return Contender(name, method, rows, Rows(rows))
    return Contender(name, _tuned(method, rows, recording), rows, Rows(max(rows, recording.history // 2)))


def _tuned(method: Method[Any], rows: int, recording: Recording) -> Method[Any]:
    from kvstrata.methods.magicpig import MagicPIG
    from kvstrata.methods.magicpig_tuning import tuned_to

    assert isinstance(method, MagicPIG)
    first, stop = PERSISTENT.bounds(recording.history)
    span = slice(max(0, recording.history - _TUNING_QUERIES), recording.history)
    samples = ((layer.keys[:, first:stop], layer.queries[:, span]) for layer in recording.layers.values())
    tuned: MagicPIG = tuned_to(method, list(samples), rows - PERSISTENT.rows).method
    return tuned
