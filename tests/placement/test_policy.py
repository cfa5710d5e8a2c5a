"""What a policy takes, what it refuses, and what it is known by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from chunks_and_faults import make_context
from fixed_choice import FixedChoice

from kvstrata.contract.budget import EstimatedMass, Fraction, Persistent, Rows, SelectionBudget, Threshold
from kvstrata.contract.method import ComputeSite, MethodContract, Mode
from kvstrata.cost.prepublication import GateThresholds
from kvstrata.errors import ConfigurationError, Reason, UnsupportedError
from kvstrata.methods.calibrating import CalibrationSample, calibrate
from kvstrata.methods.calibration import Calibration, budget_key
from kvstrata.methods.interface import Geometry
from kvstrata.methods.quest import Quest
from kvstrata.placement.gate import GateConfig
from kvstrata.placement.policy import SelectionPolicy

METHOD = Quest(page_size=16)
POLICY = SelectionPolicy(METHOD, Rows(128))
GEOMETRY = Geometry(4, 4, 2, 16, 0.25, (None, 48, None, None))


def calibration(omitted: float = 0.1) -> Calibration:
    samples = [CalibrationSample(0.1, omitted, budget_key(Rows(128)), 0)]
    return calibrate(METHOD, make_context(), samples, confidence=0.5)


GATED = replace(POLICY, gate=GateConfig(), calibration=calibration())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "quest"}, "method"),
        ({"method": None}, "method"),
        ({"budget": 128}, "budget"),
        ({"budget": None}, "budget"),
        ({"budget": Rows(67)}, "persistent"),
        ({"budget": Threshold(1.0, cap=67)}, "persistent"),
        ({"budget": EstimatedMass(0.9, cap=67)}, "persistent"),
        ({"persistent": Persistent(sinks=100, recent=29)}, "persistent"),
        ({"persistent": (4, 64)}, "persistent"),
        ({"min_history": 0}, "min_history"),
        ({"min_history": 8.0}, "min_history"),
        ({"min_history": True}, "min_history"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"dense_layers": [0]}, "dense_layers"),
        ({"dense_layers": (-1,)}, "dense_layers"),
        ({"dense_layers": (1, 1)}, "dense_layers"),
        ({"dense_layers": (True,)}, "dense_layers"),
        ({"layer_budgets": {1: Rows(128)}}, "layer_budgets"),
        ({"layer_budgets": (1, Rows(128))}, "layer_budgets"),
        ({"layer_budgets": ((1, Rows(128)), (1, Rows(256)))}, "layer_budgets"),
        ({"layer_budgets": ((-1, Rows(128)),)}, "layer_budgets"),
        ({"layer_budgets": ((1, Rows(67)),)}, "persistent"),
        ({"layer_budgets": ((1, 128),)}, "budget"),
        ({"site": "gather"}, "site"),
        ({"gate": True}, "gate"),
        ({"gate": GateThresholds()}, "gate"),
        ({"gate": GateConfig(), "calibration": {}}, "calibration"),
        ({"calibration": calibration()}, "gate"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        replace(POLICY, **changes)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert word in caught.value.cause


def test_a_budget_of_as_many_rows_as_are_persistent_will_do() -> None:
    assert replace(POLICY, budget=Rows(68)).budget_of(0) == Rows(68)
    assert replace(POLICY, budget=Fraction(0.01)).budget_of(0) == Fraction(0.01)


@dataclass(frozen=True)
class Picky(FixedChoice):
    """Takes no fraction, and no model with two K/V heads."""

    contract: ClassVar[MethodContract] = FixedChoice.contract

    def require_budget(self, budget: SelectionBudget) -> None:
        if isinstance(budget, Fraction):
            raise ConfigurationError(Reason.INVALID_ARGUMENT, "budget: no fraction")

    def require(self, geometry: Geometry) -> None:
        if geometry.kv_heads == 2:
            raise UnsupportedError(Reason.MODEL_UNSUPPORTED, "two K/V heads")


def test_the_method_has_a_say_in_each_budget_and_in_the_model() -> None:
    policy = SelectionPolicy(Picky(), Rows(128))
    for changes in ({"budget": Fraction(0.5)}, {"layer_budgets": ((0, Fraction(0.5)),)}):
        with pytest.raises(ConfigurationError, match="no fraction"):
            replace(policy, **changes)
    with pytest.raises(UnsupportedError):
        policy.require(GEOMETRY)


@pytest.mark.parametrize("changes", [{"dense_layers": (4,)}, {"layer_budgets": ((9, Rows(256)),)}])
def test_layers_that_a_model_does_not_have_are_refused(changes: dict[str, Any]) -> None:
    policy = replace(POLICY, **changes)
    with pytest.raises(ConfigurationError, match="4 layers"):
        policy.require(GEOMETRY)
    policy.require(replace(GEOMETRY, layers=10, windows=(None,) * 10))


def test_layers_with_a_window_are_dense_whatever_is_named() -> None:
    assert POLICY.dense(GEOMETRY) == {0, 1}
    assert replace(POLICY, dense_layers=()).dense(GEOMETRY) == {1}
    assert replace(POLICY, dense_layers=(3,)).dense(GEOMETRY) == {1, 3}


def test_a_layer_may_have_its_own_budget() -> None:
    policy = replace(POLICY, layer_budgets=((2, Rows(512)),))
    assert [policy.budget_of(layer) for layer in range(4)] == [Rows(128), Rows(128), Rows(512), Rows(128)]


def test_a_policy_is_never_exact() -> None:
    assert POLICY.mode is Mode.APPROXIMATE
    assert POLICY.lineage == f"policy:{POLICY.digest}"
    assert POLICY.lineage != "exact"


@pytest.mark.parametrize(
    "changes",
    [
        {"method": Quest(page_size=32)},
        {"method": FixedChoice()},
        {"budget": Rows(129)},
        {"budget": Fraction(0.5)},
        {"persistent": Persistent(sinks=5, recent=63)},
        {"min_history": 1025},
        {"dense_layers": ()},
        {"dense_layers": (0,)},
        {"layer_budgets": ((1, Rows(128)),)},
        {"site": ComputeSite.NEAR_DATA},
        {"site": ComputeSite.GATHER},
        {"seed": 1},
        {"gate": None, "calibration": None},
        {"gate": GateConfig(GateThresholds(0.2))},
        {"gate": GateConfig(GateThresholds(min_confidence=0.5))},
        {"gate": GateConfig(widen_factor=3.0)},
        {"gate": GateConfig(step_ms=50.0)},
        {"gate": GateConfig(retries=1)},
        {"gate": GateConfig(retry_window_ms=1.0)},
        {"gate": GateConfig(approximation_allowed=True)},
        {"gate": GateConfig(force_exact=True)},
        {"gate": GateConfig(least_observations=4)},
        {"calibration": None},
        {"calibration": calibration(0.2)},
    ],
)
def test_the_digest_moves_with_every_field(changes: dict[str, Any]) -> None:
    other = replace(GATED, **changes)
    assert other.digest != GATED.digest
    assert replace(other, **{name: getattr(GATED, name) for name in changes}).digest == GATED.digest


def test_the_digest_of_equal_policies_is_equal() -> None:
    assert SelectionPolicy(Quest(page_size=16), Rows(128)).digest == POLICY.digest
    assert len(POLICY.digest) == 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"widen_factor": 0.5},
        {"widen_factor": math.inf},
        {"step_ms": 0.0},
        {"step_ms": math.nan},
        {"retries": -1},
        {"retry_window_ms": -1.0},
        {"least_observations": 0},
    ],
)
def test_a_gate_is_configured_within_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        GateConfig(**wrong)
