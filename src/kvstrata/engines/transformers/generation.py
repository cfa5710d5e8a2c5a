"""Text from a request: the prompt read with progress, the answer handed on while it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TextStreamer

from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.request import Request
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["Answer", "Sampling", "continue_text", "rewind_to_prefix"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 for greedy decoding, else sampling at that temperature. seed: of the sampling."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"temperature is {self.temperature}", "use 0 for greedy, or a positive number"
            )
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"seed is {self.seed}", "use a number of at most 64 bits")


@dataclass(frozen=True)
class Answer:
    """One generated continuation.

    tokens: ids, an end marker included. text: without special tokens. ended: whether the model ended it itself.
    prompt_tokens: length of the prompt. kept_tokens: rows that were there before. first_token_s: from the start to the
    first token. seconds: in all.
    """

    tokens: list[int]
    text: str
    ended: bool
    prompt_tokens: int
    kept_tokens: int
    first_token_s: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def rewind_to_prefix(request: Request, token_ids: Sequence[int]) -> int:
    """Cut the rows of `request` back to what agrees with `token_ids`.

    The last of `token_ids` is always left to compute. Returns the rows kept.
    """
    request.history.settle()
    stored = request.token_ids
    limit = min(len(stored), len(token_ids) - 1)
    common = next((i for i in range(limit) if stored[i] != token_ids[i]), limit)
    if common < request.frontier:
        request.row.rewind(common)
    return request.history.frontier


def continue_text(
    memory: Memory,
    request: Request,
    tokenizer: Any,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    on_text: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> Answer:
    """Continue `token_ids`; rows that `request` has of them are used, all others are computed.

    on_text: called with each piece of text as soon as it is final. progress: as for `Memory.prefill`. Blocks. Rows
    computed before an exception stay in the request. Errors: as for `Memory.prefill`, and `ConfigurationError` when no
    room is left for an answer.
    """
    sampling = sampling or Sampling()
    ids = [int(token) for token in token_ids]
    if not ids:
        raise ConfigurationError(Reason.EMPTY_PROMPT, "the prompt has no tokens", "write a prompt")
    if max_new_tokens < 1:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"max_new_tokens is {max_new_tokens}", "use at least 1")
    limit = memory.max_positions
    if limit is not None and len(ids) >= limit:
        raise ConfigurationError(
            Reason.CONTEXT_EXCEEDED,
            f"the prompt has {len(ids)} tokens, and the model's context is {limit}",
            "shorten the prompt, or use a model with a longer context",
        )
    start = time.perf_counter()
    kept = rewind_to_prefix(request, ids)
    memory.prefill(ids, request, progress)
    stream = _Stream(tokenizer, on_text)
    choice = {"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sampling.seed)
        out = memory.model.generate(
            torch.tensor([ids], device=memory.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=memory.device),
            max_new_tokens=max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids)),
            streamer=stream,
            **choice,
            **request.generate_kwargs(),
        )
    tokens = out[0, len(ids) :].tolist()
    return Answer(
        tokens=tokens,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        ended=tokens[-1] in _end_tokens(memory.model),
        prompt_tokens=len(ids),
        kept_tokens=kept,
        first_token_s=(stream.first or start) - start,
        seconds=time.perf_counter() - start,
    )


class _Stream(TextStreamer):
    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.first: float | None = None
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        if self.first is None and not self.next_tokens_are_prompt:
            self.first = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def _end_tokens(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set(end) if isinstance(end, (list, tuple)) else {end} if end is not None else set()
