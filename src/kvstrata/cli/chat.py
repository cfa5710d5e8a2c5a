"""`kvstrata chat`: a conversation whose history comes back without being read again."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from kvstrata.cli.exits import ExitCode, exit_code
from kvstrata.cli.model_options import (
    BudgetOption,
    DtypeOption,
    GemmaTermsOption,
    HostBudgetOption,
    MethodOption,
    MinHistoryOption,
    ModelOption,
    RowsOption,
    selection_options,
)
from kvstrata.cli.model_session import (
    MaxNewTokensOption,
    OptionalStoreOption,
    SampleOption,
    SeedOption,
    SessionOption,
    TemperatureOption,
    attached_model,
    checked_text,
    receipt_data,
)
from kvstrata.cli.options import JsonOption
from kvstrata.cli.output import Output, OutputClosed, byte_text
from kvstrata.errors import KvstrataError
from kvstrata.sessions.names import check_name

if TYPE_CHECKING:
    from kvstrata.engines.transformers import Memory
    from kvstrata.engines.transformers.conversation import Conversation
    from kvstrata.engines.transformers.generation import Sampling

__all__ = ["register"]

_HELP = """/help           this text
/save [NAME]    save now, under the session's name or another
/ledger         where the bytes are
/quit           save and leave; so do Ctrl-D and Ctrl-C"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat", epilog="Example: `kvstrata chat --session mine --budget 64MiB`")(chat)


def chat(
    model: ModelOption = "smollm2",
    accept_gemma_terms: GemmaTermsOption = False,
    dtype: DtypeOption = "auto",
    store: OptionalStoreOption = None,
    budget: BudgetOption = None,
    host_budget: HostBudgetOption = None,
    method: MethodOption = None,
    rows: RowsOption = None,
    min_history: MinHistoryOption = None,
    session: SessionOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> int:
    """Talk with a model, a line a turn; /help lists the commands.

    With --json every line of stdout is one JSON object with the key `event`: restored, turn, saved, ledger, error or
    interrupted.
    """
    output = Output(json)
    with attached_model(
        output,
        model,
        dtype,
        store,
        budget,
        host_budget,
        session,
        sample=sample,
        temperature=temperature,
        seed=seed,
        selection=partial(selection_options, method, rows, min_history),
    ) as attached:
        from kvstrata.engines.transformers.conversation import Conversation

        conversation = Conversation(attached.memory, attached.loaded.tokenizer)
        return _Talk(output, attached.memory, conversation, session, max_new_tokens, attached.sampling).run()


class _Talk:
    """The loop of one `chat`."""

    def __init__(
        self,
        output: Output,
        memory: Memory,
        conversation: Conversation,
        session: str | None,
        max_new_tokens: int,
        sampling: Sampling,
    ) -> None:
        self._output = output
        self._memory = memory
        self._conversation = conversation
        self._session = session
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._turn = 0
        self._unsaved = False
        self._interactive = sys.stdin.isatty()
        self._code = ExitCode.OK

    def run(self) -> int:
        """Until /quit, the end of stdin, or Ctrl-C. What was said is saved in each case."""
        self._restore()
        try:
            while (line := self._read()) is not None:
                if not self._answer(line):
                    break
        except OutputClosed:
            self._keep()
            raise
        except KeyboardInterrupt:
            self._keep()
            self._event("interrupted", {})
            return ExitCode.INTERRUPTED
        self._save(self._session)
        return self._code

    def _keep(self) -> None:
        """Save what was said before the loop was left in the middle of a turn."""
        self._conversation.abandon()
        self._unsaved = True
        with contextlib.suppress(OutputClosed):
            self._save(self._session)

    def _restore(self) -> None:
        receipt = self._conversation.restore(self._session) if self._session is not None else None
        if receipt is None:
            return
        missing = receipt.stored_tokens - receipt.restored_tokens
        why = f" ({receipt.detail or receipt.reason})" if receipt.reason is not None else ""
        words = f"{receipt.restored_tokens} tokens came back in {receipt.seconds * 1e3:.0f} ms"
        self._output.note(f"session {self._session!r}: {words}, {missing} to compute again{why}")
        self._event("restored", receipt_data(receipt) or {})

    def _read(self) -> bytes | None:
        if self._interactive and not self._output.as_json:
            sys.stderr.write("\n> ")
            sys.stderr.flush()
        return sys.stdin.buffer.readline() or None

    def _answer(self, line: bytes) -> bool:
        """Serve one line; False to leave. A refusal ends the turn, not the conversation."""
        try:
            if not line.strip():
                return True
            text = checked_text(line, "the line").strip()
            if text.startswith("/"):
                return self._command(text)
            self._say(text)
        except KvstrataError as error:
            self._conversation.abandon()
            self._refuse(error)
        return True

    def _say(self, text: str) -> None:
        self._turn += 1
        with self._output.progress("reading") as report:
            answer = self._conversation.say(
                text,
                max_new_tokens=self._max_new_tokens,
                sampling=self._sampling,
                on_text=self._output.piece,
                progress=report,
            )
        self._unsaved = True
        self._output.piece("\n")
        computed = answer.prompt_tokens - answer.kept_tokens
        self._output.note(
            f"[{answer.kept_tokens} tokens kept, {computed} read, {len(answer.tokens)} answered; "
            f"first after {answer.first_token_s:.2f} s]"
        )
        self._event("turn", {"turn": self._turn, **answer.to_json(), "computed_tokens": computed})

    def _command(self, text: str) -> bool:
        word, _, rest = text.partition(" ")
        match word:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._output.note(_HELP)
            case "/ledger":
                self._ledger()
            case "/save":
                name = rest.strip() or self._session
                if name is None:
                    self._output.note("name a session: /save NAME")
                else:
                    check_name(name)
                    self._unsaved = True
                    self._save(name)
            case _:
                self._output.note(f"{word} is not known; /help lists the commands")
        return True

    def _ledger(self) -> None:
        ledger = self._memory.ledger().to_json()
        for name, value in ledger.items():
            if isinstance(value, (int, float)):
                self._output.note(f"{name:26} {byte_text(value) if name.endswith('_bytes') else f'{value:g}'}")
        self._event("ledger", {"ledger": ledger})

    def _save(self, name: str | None) -> None:
        if name is None or not self._unsaved:
            return
        receipt = self._conversation.save(name)
        if receipt is None:
            return
        self._unsaved = False
        self._output.note(f"session {name!r}: {receipt.frontier} tokens saved")
        self._event("saved", receipt_data(receipt) or {})

    def _event(self, kind: str, data: dict[str, Any]) -> None:
        if self._output.as_json:
            self._output.line(json_module.dumps({"event": kind, **data}, default=str, ensure_ascii=False))

    def _refuse(self, error: KvstrataError) -> None:
        if not self._interactive:
            self._code = exit_code(error)
        detail = {"reason": str(error.reason), "cause": error.cause, "next_step": error.next_step}
        if self._output.as_json:
            self._event("error", {"error": detail})
        else:
            self._output.error(error.reason, error.cause, error.next_step)
