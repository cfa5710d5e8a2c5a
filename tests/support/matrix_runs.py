"""Parts of the matrix of families and modes: batches with padding, runs of `generate`, and how logits are compared."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from engine_cases import rms
from tiny_models import tiny_model
from transformers import DynamicCache

TOLERANCE = 1.5
"""Largest ratio of our error against fp64 to that of the stock cache."""

CLOSE = 1e-4
"""Largest difference of a logit, where rows of two runs stand beside each other."""

MANY_ROWS = 40
"""Rows over which errors are compared at least."""

GREEDY: dict[str, Any] = {
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "pad_token_id": 0,
}


@functools.cache
def model_of(name: str) -> Any:
    """The tiny model, one object for all tests: leave it as you found it."""
    return tiny_model(name)


@functools.cache
def assistant_of(name: str) -> Any:
    """A model that often says what `model_of(name)` says, and often does not."""
    model = copy.deepcopy(model_of(name))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.05 * float(parameter.abs().mean()))
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def tokens(count: int, seed: int = 1) -> list[int]:
    """Token ids; a longer list of the same seed begins with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 199, (4096,), generator=generator)[:count].tolist()


def padded(parts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [sequences, longest], padded on the left with zeros."""
    width = max(len(part) for part in parts)
    ids = torch.tensor([[0] * (width - len(part)) + list(part) for part in parts])
    mask = torch.tensor([[0] * (width - len(part)) + [1] * len(part) for part in parts])
    return ids, mask


def stock_cache(model: Any) -> dict[str, Any]:
    """Arguments for `generate` with a new cache of Transformers' own."""
    return {"past_key_values": DynamicCache(config=model.config)}


def generate(
    model: Any, batch: tuple[torch.Tensor, torch.Tensor], cache: dict[str, Any], new: int, **options: Any
) -> Any:
    """`model.generate` over ids and mask, greedy unless `options` say otherwise, with the logits of every step."""
    ids, mask = batch
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **cache, **(GREEDY | options))


@dataclass(frozen=True)
class Run:
    """A forward call over new columns and what `generate` adds to it.

    prompts: ids of every sequence before its first generated token. first: logits [sequences, columns, vocabulary] of
    the new columns but the last. mask: [sequences, columns]. output: of `generate`.
    """

    prompts: list[list[int]]
    first: torch.Tensor
    mask: torch.Tensor
    output: Any

    @property
    def made(self) -> list[list[int]]:
        """Generated ids of every sequence."""
        return self.output.sequences[:, -self.steps :].tolist()

    @property
    def margin(self) -> float:
        """The least difference between the two best logits of a generated token."""
        best = torch.stack(self.output.logits).topk(2).values
        return float((best[..., 0] - best[..., 1]).min())

    def logits(self, row: int) -> torch.Tensor:
        """[rows, vocabulary] of one sequence: of its new columns that are no padding, and of every step."""
        shown = self.mask[row, -self.first.shape[1] :].bool()
        return torch.cat([self.first[row, shown], torch.stack([step[row] for step in self.output.logits])])

    @property
    def steps(self) -> int:
        """Generated tokens."""
        return len(self.output.logits)


def run(model: Any, batch: tuple[torch.Tensor, torch.Tensor], cache: dict[str, Any], new: int, start: int = 0) -> Run:
    """Columns from `start` on but for the last in one call, then greedy decoding of `new` tokens."""
    ids, mask = batch[0][:, :-1], batch[1][:, :-1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
    with torch.no_grad():
        first = model(ids[:, start:], attention_mask=mask, position_ids=positions, **cache).logits
    output = generate(model, batch, cache, new)
    prompts = [row[shown.bool()].tolist() for row, shown in zip(*batch, strict=True)]
    return Run(prompts, first, mask, output)


def require_same(ours: Any, stock: Any) -> None:
    """Two outputs of `generate` have the same ids; the logits behind them, which say more about rows, are close."""
    assert ours.sequences.tolist() == stock.sequences.tolist()
    for mine, theirs in zip(ours.logits, stock.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=CLOSE, rtol=0)


@functools.cache
def _double(name: str) -> Any:
    twin = copy.deepcopy(model_of(name)).double()
    twin.set_attn_implementation("eager")
    if hasattr(twin.config, "num_local_experts"):
        twin.set_experts_implementation("eager")
    return twin


@functools.cache
def _worst_row(name: str) -> float:
    """The largest error of a row of stock forwards over eight prompts: a single prompt has few ill-conditioned rows."""
    ids = torch.tensor([tokens(250, seed) for seed in range(100, 108)])
    with torch.no_grad():
        found, truth = (model(ids, use_cache=False).logits for model in (model_of(name), _double(name)))
    return float(rms(found - truth).max())


class Comparison:
    """Errors of our logits and of the stock cache's, both against one eager forward in fp64, over many rows.

    Rows that were computed with others and rows that were computed alone, in steps of `generate`, are compared apart.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errors: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"together": [], "alone": []}

    def add(self, ids: Sequence[int], ours: torch.Tensor, stock: torch.Tensor, steps: int = 0) -> None:
        """Logits [rows, vocabulary] of the last rows of the sequence `ids`; the last `steps` were computed alone."""
        assert ours.shape == stock.shape
        with torch.no_grad():
            truth = _double(self._name)(torch.tensor([list(ids)]), use_cache=False).logits[0, -len(ours) :]
        errors, cut = torch.stack([rms(ours - truth), rms(stock - truth)]), len(ours) - steps
        for kind, part in (("together", errors[:, :cut]), ("alone", errors[:, cut:])):
            if part.numel():
                self._errors[kind].append((part[0], part[1]))

    def add_runs(self, ours: Run, stock: Run) -> None:
        """All rows of two runs that must have generated the same ids."""
        assert ours.made == stock.made
        for row, (prompt, made) in enumerate(zip(stock.prompts, stock.made, strict=True)):
            self.add([*prompt, *made[:-1]], ours.logits(row), stock.logits(row), stock.steps)

    def require_as_good(self) -> None:
        """Over all rows at most 1.5 times the stock error, and in each at most 1.5 times stock's worst row.

        Two sums of equal precision err differently on a single row, so no row is compared with the same one, but with
        the worst of the cache's rows and of stock forwards over other prompts.
        """
        compared = [parts for parts in self._errors.values() if parts]
        assert compared
        for parts in compared:
            ours, stock = (torch.cat(side) for side in zip(*parts, strict=True))
            assert len(ours) >= MANY_ROWS
            assert rms(ours) <= TOLERANCE * rms(stock)
            assert ours.max() <= TOLERANCE * max(float(stock.max()), _worst_row(self._name))
