"""A conversation of several turns on one request, saved under a name and continued from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstrata.contract.receipts import RestoreReceipt, SaveReceipt
from kvstrata.engines.transformers.generation import Answer, Sampling, continue_text, rewind_to_prefix
from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.request import Request
from kvstrata.engines.transformers.turns import Turns
from kvstrata.errors import Reason, SessionError
from kvstrata.sessions.session_store import SessionStore

__all__ = ["Conversation"]


class Conversation:
    """Turns of a user and the model. Not for several threads.

    history: token ids of all finished turns. request: the rows that are computed; they may be ahead of or behind
    `history`, and are brought in line by the next turn.
    """

    def __init__(self, memory: Memory, tokenizer: Any) -> None:
        self.history: list[int] = []
        self.request: Request = memory.request()
        self._memory = memory
        self._tokenizer = tokenizer
        self._turns = Turns(tokenizer)
        self._prompt: list[int] | None = None

    def restore(self, name: str) -> RestoreReceipt | None:
        """Go on where `name` was saved; `None` when there is no such session. Rows that cannot be used are computed
        again by the next turn.

        Errors: `SessionError` when the session belongs to another model, dtype or tenant, or is damaged.
        """
        try:
            request, receipt = self._memory.restore(name)
        except SessionError as error:
            if error.reason is Reason.SESSION_UNKNOWN:
                return None
            raise
        if receipt.reason is Reason.CONTEXT_DIFFERS:
            raise SessionError(
                Reason.CONTEXT_DIFFERS,
                f"session {name!r} cannot be continued here: {receipt.detail}",
                "use the model, dtype and settings that it was saved with, or another session name",
            )
        self.request.close()
        self.request = request
        tenant = self._memory.context.namespace.tenant
        stored = list(SessionStore(self._memory.store).load(name, tenant, receipt.sequence).token_ids)
        self.history = stored if self._turns.is_closed(stored) else self._turns.closed(stored, [])
        return receipt

    def say(
        self,
        text: str,
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Answer:
        """One turn; arguments, blocking and errors as for `continue_text`.

        A turn that fails leaves `history` as it was.
        """
        prompt = self._turns.next_prompt(self.history, text) if self.history else self._turns.prompt(text)
        self._prompt = prompt
        answer = continue_text(
            self._memory,
            self.request,
            self._tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            on_text=on_text,
            progress=progress,
        )
        self.history = self._turns.closed(prompt, answer.tokens)
        self._prompt = None
        return answer

    def abandon(self) -> None:
        """After an interrupted turn: keep what was answered by then as the answer, or forget the turn."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None and self.request.frontier > len(prompt):
            self.history = self._turns.closed(prompt, self.request.token_ids[len(prompt) :])

    def save(self, name: str) -> SaveReceipt | None:
        """Compute what is missing of the finished turns and save them; `None` when there are none. Blocks."""
        if not self.history:
            return None
        limit = self._memory.max_positions
        rows = self.history if limit is None else self.history[: limit - 1]
        # One more id stands for the next prompt's first, which prefill leaves to compute.
        ahead = [*rows, rows[-1]]
        rewind_to_prefix(self.request, ahead)
        self._memory.prefill(ahead, self.request)
        return self._memory.save(name, self.request)
