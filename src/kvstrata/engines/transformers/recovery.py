"""Rows that are given up to be computed again: their bytes are damaged, or take longer to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.contract.receipts import Recompute
from kvstrata.engines.transformers.row import Row
from kvstrata.errors import DamagedError, Reason

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Request

__all__ = ["give_up_damaged", "give_up_slow"]


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


def give_up_slow(request: Request, position: int) -> list[tuple[Row, int]]:
    """Take the rows of the only sequence from `position` on out, as they are computed again sooner than read."""
    row, cause = request.row, "reading them would take longer than the step has"
    return [(row, _give_up(request, row, position, Reason.CHEAPER_TO_RECOMPUTE, cause))]


def _give_up(request: Request, row: Row, position: int, reason: Reason, cause: str) -> int:
    tokens = row.history.token_ids[position:]
    # Noted before the rows are given up: whatever ends the recovery, the next step goes on with it.
    row.owe(position, tokens + row.owed)
    row.history.rewind(position)
    request.recomputes.append(Recompute(position, len(tokens), reason, cause))
    request.memory.log.recomputed(len(tokens), max(0, row.restored_tokens - position))
    row.restored_tokens = min(row.restored_tokens, position)
    return len(tokens)
