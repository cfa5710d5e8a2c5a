"""Plain matrices behind a projection module, or a refusal."""

from __future__ import annotations

from typing import Any

import torch

from kvstrata.errors import Reason, UnsupportedError

__all__ = ["plain_projection"]


def plain_projection(linear: Any, heads: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [*heads, hidden_size] and bias [*heads] of a linear module, as views.

    Errors: `UnsupportedError` for a module that adds to its matrix or keeps it packed: adapters, quantised weights.
    """
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    if type(linear) is not torch.nn.Linear or weight is None or not weight.is_floating_point():
        raise UnsupportedError(
            Reason.OPERATION_UNSUPPORTED,
            f"a projection is a {type(linear).__qualname__}, whose effect is not one matrix of numbers",
            "merge the adapters into the weights, or load the weights without quantisation",
        )
    return weight.detach().view(*heads, -1), None if bias is None else bias.detach().view(heads)
