"""Requests that are saved under a name and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.contract.identity import EXACT
from kvstrata.contract.receipts import Recompute, RestoreReceipt, SaveReceipt
from kvstrata.errors import BudgetError, DamagedError, Reason
from kvstrata.sessions.persistence import restore_session, save_session

if TYPE_CHECKING:
    from kvstrata.engines.transformers.memory import Memory
    from kvstrata.engines.transformers.request import Request

__all__ = ["restore_request", "save_request"]


def save_request(
    memory: Memory, inner: Callable[..., Any], request: Request, name: str, place: int | None
) -> SaveReceipt:
    """`Memory.save`: chunks that are damaged are computed again first. place: which of the request's sequences."""
    sequence = request.row if place is None else request.row_at(place)
    request.keep_drafts()
    request.replay(inner, ())
    while True:
        try:
            receipt = save_session(sequence.history, memory.publisher, memory.store, memory.layout, name, memory.clock)
            break
        except DamagedError as error:
            request.recover(inner, error)
    memory.log.saved(receipt)
    return receipt


def restore_request(
    memory: Memory, name: str, token_ids: Sequence[int] | None, sequence: int | None, choice: dict[str, Any]
) -> tuple[Request, RestoreReceipt]:
    """`Memory.restore`: takes memory from other requests where it must."""
    wanted = None if token_ids is None else [int(token) for token in token_ids]
    try:
        request, receipt = _restore(memory, name, wanted, sequence, choice)
    except BudgetError:
        memory.take_memory(None)
        request, receipt = _restore(memory, name, wanted, sequence, choice)
    memory.log.restored(receipt)
    request.row.restored_tokens = receipt.restored_tokens
    if receipt.reason not in (None, Reason.TOKENS_DIFFER):
        missing = receipt.wanted_tokens - receipt.restored_tokens
        request.recomputes.append(Recompute(receipt.restored_tokens, missing, receipt.reason, receipt.detail))
    return request, receipt


def _restore(
    memory: Memory, name: str, wanted: list[int] | None, sequence: int | None, choice: dict[str, Any]
) -> tuple[Request, RestoreReceipt]:
    with memory.keeping_latest():
        request = memory.request(**choice)
        try:
            decide = None if memory.gating is None else memory.gating.restore
            receipt = restore_session(
                request.history,
                memory.store,
                memory.layout,
                name,
                wanted,
                sequence,
                memory.clock,
                decide,
                EXACT if request.policy is None else request.policy.lineage,
            )
        except BaseException:
            request.close()
            memory.reclaim()
            raise
    return request, receipt
