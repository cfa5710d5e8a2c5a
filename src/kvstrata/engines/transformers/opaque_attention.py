"""Attention as one operator, `kvstrata::attend`, that `torch.compile` calls without looking into it.

The operator is entered into PyTorch's registry when an object of this module is first opened, and stays there: the
registry cannot be asked to forget one while compiled code may call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.engines.transformers.attention import attend
from kvstrata.errors import Reason, StateError

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Request

__all__ = ["OpaqueAttention"]

_NAMESPACE = "kvstrata"
_SCHEMA = (
    "attend(Tensor(a!) turn, Tensor query, Tensor key, Tensor value, int layer, float scale, int? window, "
    "Tensor? sinks, float? softcap) -> Tensor"
)
_libraries: list[torch.library.Library] = []
"""Keeps the operator alive; empty until the first use."""
_opened: dict[int, OpaqueAttention] = {}
"""Where calls go, by number. The operator is one for the process, so numbers are, too."""


class OpaqueAttention:
    """The way from calls of the operator to the request whose step is running.

    turn: int64 [2], an input of compiled code: our number, and the layer that is next. Every call writes it, and the
    operator says so: no call can be left out, merged with another one or put before an earlier one. No request is part
    of the compiled code.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._number = -1
        self._request: Request | None = None
        self._calls = 0
        with torch.inference_mode(False):
            self.turn = torch.zeros(2, dtype=torch.long)

    def open(self) -> None:
        """Take a number."""
        _define()
        self._number = next(number for number in range(len(_opened) + 1) if number not in _opened)
        _opened[self._number] = self

    def close(self) -> None:
        """Give it back."""
        _opened.pop(self._number, None)

    def begin(self, request: Request) -> None:
        """Calls belong to a step of `request` from here on."""
        self._request, self._calls = request, 0
        self.turn[0], self.turn[1] = self._number, 0

    @property
    def started(self) -> bool:
        """Whether a layer of the step has been computed, at least in part."""
        return self._calls > 0

    def end(self) -> None:
        """The step is over. Errors: `StateError` when layers were left out."""
        if self._calls != self._layers:
            raise _disordered(f"the compiled step computed {self._calls} of {self._layers} layers")

    def release(self) -> None:
        """Calls belong to no step any more."""
        self._request = None

    def function(self) -> Callable[..., Any]:
        """The attention function to be registered with Transformers; can be traced."""
        turn, operator = self.turn, torch.ops.kvstrata.attend.default

        def function(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            window, sinks, softcap = kwargs.get("sliding_window"), kwargs.get("s_aux"), kwargs.get("softcap")
            scale = kwargs["scaling"]
            return operator(turn, query, key, value, module.layer_idx, scale, window, sinks, softcap), None

        return function

    def attend(
        self, expected: int, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rule: Any
    ) -> torch.Tensor:
        """What the operator does; see `attention.attend`."""
        self._calls += 1
        if self._request is None:
            raise StateError(Reason.NOT_COMMITTED, "compiled attention ran outside a step")
        if layer != expected:
            raise _disordered(f"the compiled step came to layer {layer} when it was the turn of layer {expected}")
        return attend(self._request, layer, query, key, value, *rule)


def _define() -> None:
    if _libraries:
        return
    library = torch.library.Library(_NAMESPACE, "DEF")
    library.define(_SCHEMA)
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::attend", _shape, lib=library)
    _libraries.append(library)


def _attend(turn: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    number, expected = turn.tolist()
    turn[1] = expected + 1
    layer, *rule = rest
    return _opened[number].attend(expected, layer, query, key, value, *rule)


def _shape(turn: torch.Tensor, query: torch.Tensor, *rest: Any) -> torch.Tensor:
    batch, heads, columns, dim = query.shape
    return query.new_empty(batch, columns, heads, dim)


def _disordered(cause: str) -> StateError:
    return StateError(Reason.NOT_COMMITTED, cause, "attach without compile=True; the step was not committed")
