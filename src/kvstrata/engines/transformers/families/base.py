"""What a model family is: the facts that its configuration decides, and where its attention keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvstrata.contract.identity import PositionRule
from kvstrata.engines.transformers.families.positions import position_rule
from kvstrata.engines.transformers.families.refusal import Refusal
from kvstrata.ports import ProjectionWeights

__all__ = ["Family", "LayerRule", "windows_by_layer_type", "windows_everywhere"]


@dataclass(frozen=True)
class LayerRule:
    """Which keys a row of one layer sees, and what else enters its softmax.

    window: width W in tokens: row p sees keys k with p - W < k <= p; `None`: all k <= p. sinks: each query head has a
    learned logit that takes part in the softmax and carries no value.
    """

    window: int | None = None
    sinks: bool = False

    def first_visible(self, position: int) -> int:
        """Position of the first key that the row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class Family(ABC):
    """One family, bound to the configuration of one model.

    Tensors in here carry Transformers' batch: hidden states [batch, rows, hidden_size], heads
    [batch, heads, rows, head_dim]. `TransformersView` is the same for one sequence.
    """

    config: Any

    names: ClassVar[tuple[str, ...]]
    """Values of `config.model_type`."""
    modeling: ClassVar[str]
    """Module of Transformers that holds the family's classes."""
    prefix: ClassVar[str]
    """What the names of these classes begin with."""
    decoder_suffix: ClassVar[str] = "Model"
    layer_suffix: ClassVar[str] = "DecoderLayer"
    attention_name: ClassVar[str] = "self_attn"
    """Attribute of a layer."""
    has_sinks: ClassVar[bool] = False
    rope_per_layer_type: ClassVar[bool] = False

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def query_heads(self) -> int:
        """Query heads of every layer."""
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """Key and value heads of every layer."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.query_heads)

    @property
    def head_dim(self) -> int:
        """Elements of one head of one row."""
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.query_heads)

    @property
    def scale(self) -> float:
        """What the scores are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """One rule a layer, in order."""
        return tuple(LayerRule(window, self.has_sinks) for window in self.windows())

    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer. This family has none unless it says otherwise."""
        return (None,) * self.layers

    def position_rule(self, model: Any = None) -> PositionRule:
        """All that decides rows besides weights and tokens.

        model: the live model, for what its configuration does not tell: the precision of its rotary frequencies, which
        a cast of the whole model rounds.
        """
        rule = position_rule(self)
        if model is None:
            return rule
        precision = next(iter(self.rotary(model).buffers())).dtype
        if precision is torch.float32:
            return rule
        extra = ("frequency_dtype", str(precision).removeprefix("torch."))
        return PositionRule(rule.rope_type, rule.theta, tuple(sorted((*rule.parameters, extra))))

    def refusals(self) -> Iterator[Refusal]:
        """What this family cannot serve of the configuration, besides what no family can."""
        window = getattr(self.config, "sliding_window", None)
        if type(self).windows is Family.windows and window is not None:
            yield Refusal("window_not_read", f"sliding_window={window} is set, which {self.names[0]} does not read")

    def decoder(self, model: Any) -> Any:
        """The module that holds embeddings, layers and rotary frequencies."""
        inner = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
        return inner.base_model

    def layer_modules(self, model: Any) -> tuple[Any, ...]:
        """The decoder layers, in order."""
        return tuple(self.decoder(model).layers)

    def attention_modules(self, model: Any) -> tuple[Any, ...]:
        """The attention module of every layer, in order."""
        return tuple(getattr(layer, self.attention_name) for layer in self.layer_modules(model))

    def rotary(self, model: Any) -> Any:
        """The module that turns positions into cosines and sines."""
        return self.decoder(model).rotary_emb

    def sinks(self, attention: Any) -> torch.Tensor | None:
        """The sink logits [query_heads] of one attention module, or `None`."""
        return attention.sinks.detach() if self.has_sinks else None

    def input_norm(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """What the attention of `layer` is given for the residual stream `hidden`; same shape."""
        normed: torch.Tensor = layer.input_layernorm(hidden)
        return normed

    def cosines(
        self, model: Any, layer: int, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of `positions` [batch, rows] for `layer`, in the dtype of `states`."""
        cos, sin = self.rotary(model)(states, positions)
        return cos, sin

    @abstractmethod
    def project(self, attention: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [batch, heads, rows, head_dim] as they are before their rotary position."""

    @abstractmethod
    def projection_weights(self, attention: Any) -> ProjectionWeights:
        """The matrices behind `project`, as views. Errors: `UnsupportedError` if they are no plain matrices."""

    @abstractmethod
    def key_source(self, attention: Any) -> torch.nn.Module:
        """The module whose output holds the keys before their rotary position, after their norm."""

    @abstractmethod
    def source_keys(self, output: torch.Tensor) -> torch.Tensor:
        """The keys [batch, kv_heads, rows, head_dim] in an output of `key_source`, as a view."""


def windows_everywhere(config: Any) -> tuple[int | None, ...]:
    """Windows of a family whose `sliding_window` holds for all layers."""
    return (config.sliding_window,) * int(config.num_hidden_layers)


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """Windows of a family whose `layer_types` says which layers slide."""
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
