"""`kvstrata generate`: one prompt, one answer, with a session that is restored and saved."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kvstrata.cli.exits import ExitCode
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
    selection_data,
)
from kvstrata.cli.options import JsonOption
from kvstrata.cli.output import Output, OutputClosed
from kvstrata.contract.receipts import RestoreReceipt, SaveReceipt
from kvstrata.errors import ConfigurationError, Reason, SessionError

if TYPE_CHECKING:
    from kvstrata.engines.transformers import Memory, Request

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate", epilog="Example: `kvstrata generate --file book.txt --session book --budget 64MiB`")(
        generate
    )


def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt, or - for stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="PATH", help="Read the prompt from a file.")] = None,
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
    max_new_tokens: MaxNewTokensOption = 128,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template, or not. Default: if the model has one."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Continue a prompt; the answer streams to stdout.

    With --session, rows of an earlier prompt are used as far as it agrees with this one.
    """
    output = Output(json)
    text = _prompt_text(prompt, file)
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
        from kvstrata.engines.transformers.generation import continue_text

        memory, tokenizer = attached.memory, attached.loaded.tokenizer
        ids = _token_ids(tokenizer, text, chat)
        request, restored = _restored(memory, session, ids)
        if restored is not None:
            why = f": {restored.detail or restored.reason}" if restored.reason is not None else ""
            output.note(f"session {session!r}: {restored.restored_tokens} of {len(ids)} tokens came back{why}")
        start = time.perf_counter()
        try:
            with output.progress("reading") as report:
                answer = continue_text(
                    memory,
                    request,
                    tokenizer,
                    ids,
                    max_new_tokens=max_new_tokens,
                    sampling=attached.sampling,
                    on_text=output.piece,
                    progress=report,
                ).to_json()
            code = ExitCode.OK
        except KeyboardInterrupt:
            answer = _answered_so_far(request, tokenizer, ids, restored, time.perf_counter() - start)
            code = ExitCode.INTERRUPTED
        except OutputClosed:
            _saved(memory, request, session)
            raise
        saved = _saved(memory, request, session)
        output.piece("\n")
        if saved is not None:
            output.note(f"session {session!r}: {saved.frontier} tokens saved")
        if json:
            data = {
                "model": model,
                "dtype": attached.dtype,
                **answer,
                "interrupted": code is ExitCode.INTERRUPTED,
                "receipts": {"restore": receipt_data(restored), "save": receipt_data(saved)},
                "selection": selection_data(request),
                "ledger": memory.ledger().to_json(),
                "timings": {
                    "load_s": attached.load_s,
                    "first_token_s": answer["first_token_s"],
                    "answer_s": answer["seconds"],
                },
            }
            output.result(data, Text())
    return code


def _answered_so_far(
    request: Request, tokenizer: Any, ids: list[int], restored: RestoreReceipt | None, seconds: float
) -> dict[str, Any]:
    """The fields of an `Answer` after an interruption: its tokens are those whose rows are computed."""
    tokens = list(request.token_ids[len(ids) : request.frontier])
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "ended": False,
        "prompt_tokens": len(ids),
        "kept_tokens": restored.restored_tokens if restored is not None else 0,
        "first_token_s": None,
        "seconds": seconds,
    }


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either PROMPT (- for stdin) or --file PATH", param_hint="PROMPT")
    if file is not None and str(file) != "-":
        try:
            return checked_text(file.read_bytes(), str(file))
        except OSError as error:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"{file} cannot be read: {error.strerror}", "check the path"
            ) from error
    if file is not None or prompt == "-":
        return checked_text(sys.stdin.buffer.read(), "stdin")
    return checked_text(prompt or "", "the prompt")


def _token_ids(tokenizer: Any, text: str, chat: bool | None) -> list[int]:
    templated = getattr(tokenizer, "chat_template", None) is not None
    if chat and not templated:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, "the model has no chat template", "pass --raw")
    if chat is not False and templated:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return [int(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
    return [int(token) for token in tokenizer(text).input_ids]


def _restored(memory: Memory, session: str | None, ids: list[int]) -> tuple[Request, RestoreReceipt | None]:
    if session is not None:
        try:
            return memory.restore(session, ids)
        except SessionError as error:
            if error.reason is not Reason.SESSION_UNKNOWN:
                raise
    return memory.request(), None


def _saved(memory: Memory, request: Request, session: str | None) -> SaveReceipt | None:
    """Save what is committed; `None` without a session or rows."""
    if session is None or not request.frontier:
        return None
    return memory.save(session, request)
