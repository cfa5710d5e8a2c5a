"""How far a method moves the next token's distribution, over a text that really goes on so.

Both models read the same history in full and then the same tokens, one at a time; one attends to everything, the other
to what a method chooses. Its own rows of approximate lineage stay in its history, so that errors add up as they would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.contract.budget import SelectionBudget
from kvstrata.engines.transformers import Memory, Request
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.lab.methods.contenders import PERSISTENT
from kvstrata.methods.interface import Method

__all__ = ["Divergence", "LiveText", "chosen_share", "next_token_divergence"]

_MIN_HISTORY = 1024


@dataclass(frozen=True, eq=False)
class Divergence:
    """One value a step. kl: of the dense distribution against the method's, in nats. agrees: whether both find the same
    token most likely. surprise, dense_surprise: -log p of the token that came next, in nats. chose: the share of layers
    that left rows out.
    """

    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    surprise: NDArray[np.float64]
    dense_surprise: NDArray[np.float64]
    chose: NDArray[np.float64]


def next_token_divergence(dense: Tensor, approximate: Tensor) -> tuple[float, bool]:
    """KL(dense || approximate) in nats of two rows of logits [vocabulary], in float64, and whether their best agree."""
    ours, theirs = (torch.log_softmax(logits.double(), dim=-1) for logits in (dense, approximate))
    # A token of probability zero adds nothing, whatever the other model thinks of it.
    terms = torch.where(ours == -torch.inf, 0.0, ours.exp() * (ours - theirs))
    return max(0.0, float(terms.sum())), int(ours.argmax()) == int(theirs.argmax())


class LiveText:
    """A text in `memory`, an exact attachment: read once, and given back to every method that can rebuild its index.

    token_ids: history, the steps, and one more token than these. Errors: `ConfigurationError` for fewer. Holds
    the dense logits, 4 bytes for each step and token of the vocabulary.
    """

    def __init__(
        self,
        memory: Memory,
        token_ids: Sequence[int],
        steps: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not 0 < steps < len(token_ids) - 1:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"{steps} steps and a history cannot be had of {len(token_ids)} tokens"
            )
        self.memory = memory
        self.token_ids = list(token_ids)
        self.steps = steps
        self.history = len(token_ids) - steps - 1
        self._name = f"live-text-{id(self):x}"
        request = memory.prefill(self.token_ids[: self.history + 1], progress=progress)
        try:
            memory.save(self._name, request)
            self.dense = torch.cat([logits.float() for logits, _ in self._read(request)])
        finally:
            request.close()

    def diverge(self, method: Method[Any], budget: SelectionBudget) -> Divergence:
        """Every step under `method`. Blocks; as many forward passes of one token as there are steps.

        A method that cannot build its index from rows alone reads the history anew. Errors: as `Memory.request`.
        """
        choice: dict[str, Any] = {
            "mode": "approximate",
            "method": method,
            "budget": budget,
            "persistent": PERSISTENT,
            "min_history": min(_MIN_HISTORY, self.history),
        }
        prompt = self.token_ids[: self.history + 1]
        if method.contract.rebuilds:
            request, _ = self.memory.restore(self._name, prompt, **choice)
        else:
            request = self.memory.prefill(prompt, self.memory.request(**choice))
        figures = np.zeros((5, self.steps))
        try:
            for step, (logits, chose) in enumerate(self._read(request)):
                dense, following = self.dense[step], self.token_ids[self.history + step + 1]
                kl, agrees = next_token_divergence(dense, logits[0])
                ours, theirs = (-float(torch.log_softmax(each.double(), -1)[following]) for each in (logits[0], dense))
                figures[:, step] = kl, agrees, ours, theirs, chose
        finally:
            request.close()
        return Divergence(figures[0], figures[1] == 1, figures[2], figures[3], figures[4])

    def _read(self, request: Request) -> Iterator[tuple[Tensor, float]]:
        for step in range(self.steps):
            token = torch.tensor([[self.token_ids[self.history + step]]], device=self.memory.model.device)
            with torch.inference_mode():
                out = self.memory.model(input_ids=token, **request.generate_kwargs(), logits_to_keep=1)
            yield out.logits[:, -1].cpu(), chosen_share(request)


def chosen_share(request: Request) -> float:
    """The share of layers that left rows out in the last step of `request`."""
    receipt = request.last_step
    layers = [layer for each in receipt.selections for layer in each.layers] if receipt is not None else []
    return sum(not layer.outcome.exact for layer in layers) / len(layers) if layers else 0.0
