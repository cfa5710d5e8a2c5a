"""What `generate` and `chat` share: the options, the attached model, and how a session comes back."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.options import STORE_VARIABLE, default_store
from kvstrata.cli.output import Output
from kvstrata.contract.receipts import RestoreReceipt, SaveReceipt
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.sessions.names import check_name
from kvstrata.store import Store

if TYPE_CHECKING:
    from kvstrata.engines.transformers import LoadedModel, Memory, Request
    from kvstrata.engines.transformers.generation import Sampling

__all__ = [
    "MaxNewTokensOption",
    "OptionalStoreOption",
    "SampleOption",
    "SeedOption",
    "SessionOption",
    "TemperatureOption",
    "attached_model",
    "checked_text",
    "receipt_data",
    "selection_data",
]

_DEFAULT_TEMPERATURE = 0.7

OptionalStoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="PATH",
        envvar=STORE_VARIABLE,
        help="Directory of the store. Default: ~/.local/share/kvstrata with --session, else a temporary one.",
    ),
]
SessionOption = Annotated[
    str | None,
    typer.Option("--session", metavar="NAME", help="Restore this session if it exists, and save it afterwards."),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, in tokens.")
]
SampleOption = Annotated[bool, typer.Option("--sample", help=f"Sample, at temperature {_DEFAULT_TEMPERATURE}.")]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", metavar="T", min=0.0, help="Sample at this temperature; 0 is greedy.")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the sampling.")]


@dataclass(frozen=True)
class Attached:
    """A model with its memory, and how to sample from it. load_s: seconds of importing and loading."""

    loaded: LoadedModel
    memory: Memory
    sampling: Sampling
    dtype: str
    load_s: float


@contextlib.contextmanager
def attached_model(
    output: Output,
    model: str,
    dtype: str,
    store: Path | None,
    budget: str | None,
    host_budget: str | None,
    session: str | None,
    *,
    sample: bool,
    temperature: float | None,
    seed: int,
    selection: Callable[[], dict[str, Any]],
) -> Iterator[Attached]:
    """Check every option before anything slow, then load the model and attach its memory.

    Sampling is greedy unless `sample` or a temperature was given. selection: arguments of `attach` for a method.
    """
    if session is not None:
        check_name(session)
    with contextlib.ExitStack() as stack:
        path = store or (default_store() if session is not None else None)
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-")))
        opened = stack.enter_context(Store(path))
        if session is not None:
            opened.require_writable()
        start = time.perf_counter()
        from kvstrata.engines.transformers import attach, load_model, parse_bytes
        from kvstrata.engines.transformers.generation import Sampling
        from kvstrata.engines.transformers.precision import choose_dtype

        sampling = Sampling(temperature if temperature is not None else _DEFAULT_TEMPERATURE if sample else 0.0, seed)
        if budget is not None:
            parse_bytes(budget)
        if host_budget is not None:
            parse_bytes(host_budget, "host_budget")
        chosen = selection()
        choice = choose_dtype(dtype)
        output.note(f"loading {model} ...")
        with output.progress(f"preparing {model}") as report:
            loaded = load_model(model, dtype=choice.name, progress=lambda stage, done: report(round(done * 100), 100))
        output.note(f"{choice.name}: {choice.reason}")
        rows = chosen.pop("rows", None)
        amounts = {"budget": budget} if rows is None else {"budget": rows, "memory_budget": budget}
        memory = stack.enter_context(attach(loaded, opened, host_budget=host_budget, **amounts, **chosen))
        yield Attached(loaded, memory, sampling, choice.name, time.perf_counter() - start)


def checked_text(raw: bytes | str, where: str) -> str:
    """Prompt text. Errors: `ConfigurationError` when it is empty or not UTF-8."""
    try:
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw.encode("utf-8").decode("utf-8")
    except UnicodeError as error:
        place = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"{where} is not UTF-8 text{place}", "convert it, e.g. with iconv"
        ) from error
    if not text.strip():
        raise ConfigurationError(Reason.EMPTY_PROMPT, f"{where} is empty", "write a prompt")
    return text


def receipt_data(receipt: RestoreReceipt | SaveReceipt | None) -> dict[str, Any] | None:
    """Plain values of a receipt."""
    if receipt is None:
        return None
    return asdict(receipt) | ({"hit": receipt.hit} if isinstance(receipt, RestoreReceipt) else {})


def selection_data(request: Request) -> dict[str, Any] | None:
    """What the latest step of `request` left out, in short; `None` for an exact request or before a step."""
    step = request.last_step
    if step is None or not step.selections:
        return None
    receipt = step.selections[0]
    outcomes = Counter(layer.outcome.value for layer in receipt.layers)
    return {
        "contract": step.contract.value,
        "method": receipt.method,
        "policy": receipt.policy,
        "budget": receipt.budget,
        "layers": dict(outcomes),
        "visible": sum(layer.visible for layer in receipt.layers),
        "left_out": sum(layer.recoverable_not_selected for layer in receipt.layers),
        "read_bytes": receipt.read_bytes,
        "read_amplification": receipt.read_amplification,
        "index_bytes": receipt.index_bytes,
        "seconds": asdict(receipt.times),
    }
