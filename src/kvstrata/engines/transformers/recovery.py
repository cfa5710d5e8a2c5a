"""Rows that are given up to be computed again: their bytes are damaged, or take longer to read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvstrata.contract.receipts import Recompute
from kvstrata.engines.transformers.row import Row
from kvstrata.errors import DamagedError, Reason
from kvstrata.placement.gated import PostponedError, RecomputeError

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Forward, Request

__all__ = ["give_up_damaged", "give_up_slow", "try_again"]


def try_again(request: Request, inner: Forward, error: DamagedError | PostponedError | RecomputeError) -> None:
    """Do what a step that was aborted asks for, before it is tried again under the deadline that it has.

    Errors: `DamagedError` where the rows cannot be computed again; whatever ends the request meanwhile.
    """
    if isinstance(error, PostponedError):
        request.memory.loop.postpone(error.retry_ms)
        request.require_open()
        return
    with contextlib.ExitStack() as stack:
        for row in request.rows:
            if row.frame is not None:
                exactly = isinstance(error, RecomputeError)
                stack.enter_context(row.frame.interrupted(exactly=exactly))
        if isinstance(error, DamagedError):
            request.recover(inner, error)
        else:
            request.repay(inner, give_up_slow(request, error))


def give_up_damaged(request: Request, error: DamagedError) -> list[tuple[Row, int]]:
    """Revoke the damaged chunk, and take its rows and those after it out of every sequence that has it.

    Returns the sequences, and how many rows each is owed. Errors: `error` itself where the tokens are not known.
    """
    digest = bytes.fromhex(error.chunk)
    found = [
        (row, index)
        for row in request.rows
        for index, record in enumerate(row.history.chunks)
        if record.digest == digest
    ]
    if not found or not all(row.history.named for row, _ in found):
        raise error
    request.memory.revoke(found[0][0].history.chunks[found[0][1]])
    size = found[0][0].history.context.chunk_tokens
    return [(row, _give_up(request, row, index * size, error.reason, error.cause)) for row, index in found]


def give_up_slow(request: Request, error: RecomputeError) -> list[tuple[Row, int]]:
    """Take the rows of one sequence from a position on out, as they are computed again sooner than read."""
    row = next(row for row in request.rows if row.history is error.history)
    cause = "reading them would take longer than the step has"
    return [(row, _give_up(request, row, error.position, Reason.CHEAPER_TO_RECOMPUTE, cause))]


def _give_up(request: Request, row: Row, position: int, reason: Reason, cause: str) -> int:
    tokens = row.history.token_ids[position:]
    # Noted before the rows are given up: whatever ends the recovery, the next step goes on with it.
    row.owe(position, tokens + row.owed)
    row.history.rewind(position)
    request.recomputes.append(Recompute(position, len(tokens), reason, cause))
    request.memory.log.recomputed(len(tokens), max(0, row.restored_tokens - position))
    row.restored_tokens = min(row.restored_tokens, position)
    return len(tokens)
