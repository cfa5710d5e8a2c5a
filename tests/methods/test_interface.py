from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from selection_parts import Layer, choose_last, support_of

import kvstrata.contract.method as contracts
from kvstrata.contract.budget import Persistent
from kvstrata.contract.method import GroupSharing, MethodContract, Owner
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods import interface, selection
from kvstrata.methods.indexless import IndexlessMethod
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.interface import (
    Geometry,
    Index,
    Method,
    MethodContext,
    StepRows,
    require_at_least,
    require_member,
    require_positive,
)
from kvstrata.methods.quest import Quest
from kvstrata.methods.selection import Selection

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "index.md"


@dataclass(frozen=True)
class Counted(IndexlessMethod):
    contract: ClassVar[MethodContract] = MethodContract(
        "counted",
        "a test",
        1,
        contracts.AnswerClass.APPROXIMATE,
        contracts.Unit.ROW,
        "none",
        "none",
        Owner.LAYER,
        GroupSharing.QUERY_FREE,
        contracts.UpdatePhase.FIXED,
    )

    count: int = 1

    def select(self, ctx: MethodContext, layer: int, index: Index, rows: StepRows) -> Selection:
        return Selection.none(Owner.LAYER, 1)


@dataclass(frozen=True)
class FirstDense(Counted):
    dense_layers: int | tuple[int, ...] = 2


def test_the_example_of_the_page_is_a_method() -> None:
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names = {
        "torch": torch,
        "dataclass": dataclass,
        "ClassVar": ClassVar,
        "IndexlessMethod": IndexlessMethod,
        **{name: getattr(module, name) for module in (contracts, interface, selection) for name in module.__all__},
        "__name__": __name__,
    }
    exec(compile(code, str(PAGE), "exec"), names)
    method = names["EveryNth"](step=3)
    layer = Layer.random(30)
    for budget, rows in ((100, [2, 5, 8, 11, 14, 17, 20, 23]), (12, [2, 5, 8, 11])):
        ctx = layer.context(budget, sinks=2, recent=6)
        index, chosen = choose_last(method, ctx, layer)
        assert support_of(method, index, chosen, ctx).rows.tolist() == [rows]
    with pytest.raises(ConfigurationError, match=r"EveryNth\.step"):
        names["EveryNth"](step=0)


def test_digest_follows_class_fields_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {Counted().digest, Counted(2).digest, FirstDense().digest, FirstDense(dense_layers=()).digest}
    assert len(digests) == 4
    assert Counted(2).digest == Counted(count=2).digest
    before = Counted().digest
    monkeypatch.setattr(Counted, "contract", replace(Counted.contract, version=2))
    assert Counted().digest != before


@pytest.mark.parametrize(
    ("method", "dense"),
    [
        (Counted(), ()),
        (FirstDense(), (0, 1)),
        (FirstDense(dense_layers=0), ()),
        (FirstDense(dense_layers=9), (0, 1, 2)),
        (FirstDense(dense_layers=(0, 2, 16)), (0, 2)),
    ],
)
def test_dense_layers_of_a_method(method: Method[Index], dense: tuple[int, ...]) -> None:
    assert method.dense(Geometry(3, 4, 2, 8, 1.0, (None,) * 3)) == dense


def test_what_a_method_does_not_override() -> None:
    method, index, geometry = Counted(), Index(), Geometry(1, 4, 2, 8, 1.0, (None,))
    ctx = Layer.random(4).context(2)
    units = torch.tensor([[3, 1]])
    method.require(geometry)
    assert method.owner is Owner.LAYER
    assert method.prepare(None, geometry) is None
    assert method.persistent(Persistent(1, 2), 10) == Persistent(1, 2)
    assert method.rows_of(index, units) is units
    assert method.observe(ctx, 0, index, Layer.random(4).last_step()) is index
    assert method.speculate(ctx, 0, index, torch.zeros(1, 4)) is None
    assert Method.truncate(method, index, 0) is None


def test_owners_of_a_layer() -> None:
    geometry = Geometry(1, 6, 2, 8, 1.0, (None,))
    assert geometry.group == 3
    assert [geometry.owners(owner) for owner in (Owner.QUERY_HEAD, Owner.KV_HEAD, Owner.LAYER)] == [6, 2, 1]


def test_bytes_of_an_index_are_those_of_its_tensors() -> None:
    index = Index()
    assert index.nbytes == 0
    index.codes = torch.zeros(3, 5, dtype=torch.int16)  # type: ignore[attr-defined]
    index.weights = torch.zeros(7)  # type: ignore[attr-defined]
    index.note = "no tensor"  # type: ignore[attr-defined]
    assert index.nbytes == 30 + 28


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_numbers_that_are_too_small_or_none(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"X\.n must be a whole number of at least 1, got") as refused:
        require_positive("X.n", value)
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    with pytest.raises(ConfigurationError, match=r"X\.n must be a whole number of at least 3, got 2"):
        require_at_least("X.n", 2, 3)
    require_positive("X.n", 1)
    require_at_least("X.n", 0, 0)


def test_members_are_not_their_text() -> None:
    require_member("X.s", GroupSharing.MAX, tuple(GroupSharing))
    for value in ("max", None, GroupSharing.SUM, []):
        with pytest.raises(ConfigurationError, match=r"X\.s must be one of GroupSharing\.MAX, GroupSharing\.MEAN, got"):
            require_member("X.s", value, (GroupSharing.MAX, GroupSharing.MEAN))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Quest(page_size=10**9),
        lambda: InfLLM(block_size=10**30),
        lambda: InfLLM(cache_decay="x"),  # type: ignore[arg-type]
        lambda: InfLLM(cache_decay=True),
    ],
)
def test_settings_that_no_history_could_serve_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()
