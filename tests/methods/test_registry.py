from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import pytest

from kvstrata.contract.method import GroupSharing
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods import registry
from kvstrata.methods.exact_top_k import ExactTopK
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.interface import Index, Method, MethodContext, StepRows
from kvstrata.methods.quest import PageRule, Quest
from kvstrata.methods.random_rows import RandomRows
from kvstrata.methods.registry import METHODS, method_class, method_names, parse_method
from kvstrata.methods.selection import Selection
from kvstrata.methods.streaming import Streaming


@pytest.mark.parametrize("name", method_names())
def test_every_entry_is_a_frozen_configuration_with_defaults(name: str) -> None:
    configuration = method_class(name)
    assert issubclass(configuration, Method)
    assert configuration.contract.name == name
    assert configuration() == parse_method(name)
    assert len(configuration().digest) == 64
    # `eq` compares by value and `frozen` forbids changes: a configuration is part of a lineage.
    parameters = configuration.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    assert parameters.eq
    assert all(field.init for field in dataclasses.fields(configuration))


def test_names_are_listed_without_importing_methods() -> None:
    assert method_names() == tuple(sorted(METHODS))
    for place in METHODS.values():
        module, _, attribute = place.partition(":")
        assert module.startswith("kvstrata.methods.")
        assert attribute
    fresh = importlib.util.find_spec("kvstrata.methods.registry")
    assert fresh is not None
    assert fresh.loader is not None
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "kvstrata.methods.quest"}
    try:
        fresh.loader.exec_module(importlib.util.module_from_spec(fresh))
        assert "kvstrata.methods.quest" not in sys.modules
    finally:
        sys.modules.update(kept)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quest", Quest()),
        ("quest:page_size=64", Quest(page_size=64)),
        (" quest : page_size = 32 , rule = runtime ", Quest(page_size=32, rule=PageRule.RUNTIME)),
        ("quest:sharing=softmax_sum,dense_layers=0", Quest(sharing=GroupSharing.SOFTMAX_SUM, dense_layers=0)),
        ("exact_top_k:sharing=max", ExactTopK(GroupSharing.MAX)),
        ("random_rows:seed=7", RandomRows(7)),
        ("streaming", Streaming()),
    ],
)
def test_text_to_configuration(text: str, expected: Method[Index]) -> None:
    assert parse_method(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no method ''"),
        ("quets", "there is no method 'quets'.*\n.*use one of exact_top_k, .*quest"),
        ("quest:", "'' sets no field"),
        ("quest:64", "'64' sets no field of the method 'quest'.*\n.*page_size, sharing, rule, dense_layers"),
        ("quest:pages=64", "'pages=64' sets no field"),
        ("quest:contract=1", "'contract=1' sets no field"),
        ("quest:page_size=64,page_size=32", "page_size of the method 'quest' is given twice"),
        ("quest:page_size=many", r"Quest\.page_size must be a whole number, got 'many'"),
        ("quest:page_size=", r"Quest\.page_size must be a whole number, got ''"),
        ("quest:page_size=0", r"Quest\.page_size must be a whole number of at least 1, got 0"),
        ("quest:rule=other", r"Quest\.rule must be paper or runtime or evaluation, got 'other'"),
        ("quest:sharing=query_sum", r"Quest\.sharing must be one of"),
        ("streaming:seed=1", "its fields: none"),
    ],
)
def test_text_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        parse_method(text)
    assert refused.value.reason is Reason.INVALID_ARGUMENT


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Everything(IndexlessMethod):
    contract: ClassVar = Streaming.contract

    flag: bool = False
    ratio: float = 0.5
    label: str = ""
    limit: int | None = 3
    colour: Colour | None = None
    layers: tuple[int, ...] = (0, 16)
    table: object = None

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flag=true", {"flag": True}),
        ("flag=False", {"flag": False}),
        ("ratio=1e-3", {"ratio": 0.001}),
        ("label=a b", {"label": "a b"}),
        ("limit=none", {"limit": None}),
        ("limit=5", {"limit": 5}),
        ("colour=red", {"colour": Colour.RED}),
        ("layers=1+2+3", {"layers": (1, 2, 3)}),
        ("layers=", {"layers": ()}),
    ],
)
def test_kinds_of_fields(monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, object]) -> None:
    _register(monkeypatch)
    assert parse_method(f"everything:{text}") == Everything(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flag=yes", "Everything.flag must be true or false, got 'yes'"),
        ("ratio=half", "Everything.ratio must be a number"),
        ("ratio=none", "Everything.ratio must be a number"),
        ("limit=x", "Everything.limit must be a whole number"),
        ("layers=1+x", "Everything.layers must be a whole number, got 'x'"),
        ("table=1", "Everything.table cannot be written as text"),
    ],
)
def test_values_of_the_wrong_kind(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    _register(monkeypatch)
    with pytest.raises(ConfigurationError, match=message):
        parse_method(f"everything:{text}")


def _register(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("everything_for_a_test")
    module.Everything = Everything  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "METHODS", {"everything": f"{module.__name__}:Everything"})
