"""What the lower floors need from the outside, as protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Clock", "ModelView", "ProjectionWeights", "RecomputeCost", "StepLoop"]


class Clock(Protocol):
    """Seconds from an arbitrary origin that never go back, e.g. `time.perf_counter`."""

    def __call__(self) -> float: ...


class RecomputeCost(Protocol):
    """What an engine says about computing rows again, from the prefills that it has timed."""

    @property
    def observations(self) -> int:
        """Prefills that the answer rests on; 0 before the first."""
        ...

    def seconds(self, start: int, stop: int) -> float:
        """Model time that computes tokens [start, stop) of a history whose first `start` rows are there.

        Does not block. Finite and not negative; without meaning while `observations` is 0.
        """
        ...


class StepLoop(Protocol):
    """Who runs steps, as far as a step that cannot be answered yet must ask: a serving loop, or a plain wait."""

    def postpone(self, retry_window_ms: float) -> None:
        """Hold the calling step back, and return when it is to be decided again: within `retry_window_ms`.

        Called before anything of the step is published: no rows, no output. Blocks; a loop that serves several requests
        runs the others meanwhile, so that the load which left this step no exact path can fall. The step is decided
        anew afterwards, with what is measured then, and is postponed no more often than its gate allows. Errors:
        whatever ends the request, e.g. `StateError` once it was closed; the step then publishes nothing.
        """
        ...


@dataclass(frozen=True, eq=False)
class ProjectionWeights:
    """The matrices that turn one layer's normed hidden states into queries, keys and values.

    Weights [heads, head_dim, hidden_size] and biases [heads, head_dim] or `None`, in the model's dtype and on its
    device: views of the live weights, not to be written to, and strided where the model keeps the three in one matrix.
    A norm that follows a projection is not in them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None


class ModelView(Protocol):
    """What a method may ask a live model: to look one layer ahead, or to build an index from its weights.

    One sequence at a time, without gradients. Tensors are in the model's dtype and on its device. Layers count from 0.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def query_heads(self) -> int:
        """Query heads of every layer."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads of every layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of one head of one row."""
        ...

    @property
    def scale(self) -> float:
        """What the scores are multiplied by before the softmax."""
        ...

    def input_norm(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the attention of `layer` is given for the residual stream `hidden` [rows, hidden_size]; same shape."""
        ...

    def project(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [query_heads, rows, head_dim], keys and values [kv_heads, rows, head_dim] before rotary positions.

        normed: [rows, hidden_size], as `input_norm` returned it. Norms over queries and keys are applied.
        """
        ...

    def rotate(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries or keys `states` [heads, rows, head_dim] at `positions` [rows] (int64), after rotary positions."""
        ...

    def projection_weights(self, layer: int) -> ProjectionWeights:
        """The matrices behind `project`. Errors: `UnsupportedError` when they are packed or carry an adapter."""
        ...
