"""The operator that compiled steps call for attention: every call is made, once, in order, for the running request."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata.engines.transformers.families import LayerRule
from kvstrata.engines.transformers.opaque_attention import OpaqueAttention
from kvstrata.errors import DamagedError, Reason, StateError, UnsupportedError

LAYERS = 3


class _Request:
    """Notes its calls and answers with the queries plus a number."""

    def __init__(self, number: float, error: BaseException | None = None) -> None:
        self.memory = SimpleNamespace(rules=[LayerRule()] * LAYERS)
        self.number, self.error, self.layers = number, error, list[int]()

    def attend(self, layer: int, query: Any, key: Any, value: Any, scale: float, window: Any, sinks: Any) -> Any:
        self.layers.append(layer)
        if self.error is not None and layer == 1:
            raise self.error
        return (query + self.number).transpose(1, 2).contiguous()


class _Layer:
    def __init__(self, layer: int) -> None:
        self.layer_idx = layer


@pytest.fixture
def opaque() -> Iterator[OpaqueAttention]:
    attention = OpaqueAttention(LAYERS)
    attention.open()
    yield attention
    attention.close()


def layers(attention: OpaqueAttention, order: tuple[int, ...] = (0, 1, 2), **rule: Any) -> Any:
    """A function that attends in every layer with the same inputs, and drops all results but the last."""
    function, modules = attention.function(), [_Layer(layer) for layer in order]

    def run(rows: torch.Tensor) -> torch.Tensor:
        for module in modules:
            out, _ = function(module, rows, rows, rows, None, scaling=1.0, **rule)
        return out * 2

    return run


INDUCTOR = pytest.param("inductor", marks=pytest.mark.compile)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_equal_calls_are_all_made_in_order(opaque: OpaqueAttention, backend: str) -> None:
    compiled = torch.compile(layers(opaque), fullgraph=True, backend="aot_eager" if backend == "eager" else backend)
    rows = torch.ones(1, 4, 1, 8)
    for number in (1.0, 5.0):
        request = _Request(number)
        opaque.begin(request)  # type: ignore[arg-type]
        with torch.no_grad():
            out = (layers(opaque) if backend == "eager" else compiled)(rows)
        opaque.end()
        assert request.layers == [0, 1, 2]
        assert torch.equal(out, torch.full((1, 1, 4, 8), 2 * (1 + number)))


def test_two_objects_share_the_operator_and_no_calls(opaque: OpaqueAttention) -> None:
    other = OpaqueAttention(LAYERS)
    other.open()
    first, second = _Request(1.0), _Request(2.0)
    opaque.begin(first)  # type: ignore[arg-type]
    other.begin(second)  # type: ignore[arg-type]
    layers(opaque, (0,))(torch.ones(1, 4, 1, 8))
    layers(other, (0, 1))(torch.ones(1, 4, 1, 8))
    assert (first.layers, second.layers) == ([0], [0, 1])
    numbers = {int(opaque.turn[0]), int(other.turn[0])}
    other.close()
    again = OpaqueAttention(LAYERS)
    again.open()
    again.begin(_Request(1.0))  # type: ignore[arg-type]
    assert {int(opaque.turn[0]), int(again.turn[0])} == numbers
    again.close()


def test_a_layer_out_of_turn_or_left_out_is_an_error(opaque: OpaqueAttention) -> None:
    opaque.begin(_Request(1.0))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="layer 2 when it was the turn of layer 1"):
        layers(opaque, (0, 2))(torch.ones(1, 4, 1, 8))
    opaque.begin(_Request(1.0))  # type: ignore[arg-type]
    layers(opaque, (0, 1))(torch.ones(1, 4, 1, 8))
    with pytest.raises(StateError, match="2 of 3 layers"):
        opaque.end()


def test_outside_a_step_it_is_an_error(opaque: OpaqueAttention) -> None:
    opaque.begin(_Request(1.0))  # type: ignore[arg-type]
    opaque.release()
    with pytest.raises(StateError, match="outside a step"):
        layers(opaque, (0,))(torch.ones(1, 4, 1, 8))


@pytest.mark.parametrize("rule", [{"sliding_window": 9}, {"s_aux": torch.zeros(4)}, {"softcap": 30.0}])
def test_another_rule_than_the_familys_is_refused(opaque: OpaqueAttention, rule: dict[str, Any]) -> None:
    opaque.begin(_Request(1.0))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError) as refused:
        layers(opaque, (0,), **rule)(torch.ones(1, 4, 1, 8))
    assert refused.value.reason is Reason.MODEL_UNSUPPORTED


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(
    "error", [DamagedError(Reason.CHUNK_DAMAGED, "a flipped bit", chunk="ab"), KeyboardInterrupt()], ids=str
)
def test_what_attention_raises_comes_out_as_it_is(opaque: OpaqueAttention, backend: str, error: BaseException) -> None:
    compiled = torch.compile(layers(opaque), fullgraph=True, backend=backend)
    request = _Request(1.0, error)
    opaque.begin(request)  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(type(error)) as raised:
        compiled(torch.ones(1, 4, 1, 8))
    assert raised.value is error
    assert opaque.started
    assert request.layers == [0, 1]
