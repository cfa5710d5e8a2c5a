"""An artefact serves what it was made for and nothing else, and survives being written down."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.budget import Rows
from kvstrata.contract.identity import CacheAbi, ChunkContext, ModelIdentity, PositionRule
from kvstrata.cost.prepublication import EstimateSource
from kvstrata.errors import ConfigurationError, Reason, RetrievalError
from kvstrata.methods.calibrating import CalibrationSample, calibrate
from kvstrata.methods.calibration import Calibration, CalibrationCurve, budget_key
from kvstrata.methods.quest import Quest
from kvstrata.methods.random_rows import RandomRows

BUDGET = budget_key(Rows(128))


CONTEXT = ChunkContext(
    ModelIdentity("id:m", ("a@1",)), CacheAbi(2, 2, 1, 8, "float32"), PositionRule("default", 1e4), chunk_tokens=64
)


SHARES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=80)


def _samples(pairs: list[tuple[float, float]], layer: int = 0) -> list[CalibrationSample]:
    return [CalibrationSample(raw, omitted, BUDGET, layer) for raw, omitted in pairs]


def _made(pairs: list[tuple[float, float]], **settings: Any) -> Calibration:
    return calibrate(Quest(), CONTEXT, _samples(pairs), **settings)


def test_above_all_samples_nothing_is_known() -> None:
    made = _made([(raw / 100, 0.0) for raw in range(50)], bins=1)
    assert made.estimate(0.49, BUDGET, 0).omitted == 0.0
    assert made.estimate(0.5, BUDGET, 0).omitted == 1.0
    assert made.estimate(math.nan, BUDGET, 0).source is EstimateSource.NONE


@given(SHARES)
def test_json_round_trip(pairs: list[tuple[float, float]]) -> None:
    made = _made(pairs)
    assert Calibration.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_another_budget_is_not_calibrated() -> None:
    made = _made([(0.1, 0.05)] * 20)
    found = made.estimate(0.1, budget_key(Rows(129)), 0)
    assert (found.omitted, found.confidence, found.source) == (1.0, 0.0, EstimateSource.NONE)


FOREIGN: list[tuple[str, Any, ChunkContext, Reason]] = [
    ("configuration", Quest(page_size=32), CONTEXT, Reason.METHOD_MISMATCH),
    ("method", RandomRows(), CONTEXT, Reason.METHOD_MISMATCH),
    ("model", Quest(), replace(CONTEXT, model=ModelIdentity("id:n", ("a@1",))), Reason.MODEL_MISMATCH),
    ("weights", Quest(), replace(CONTEXT, model=replace(CONTEXT.model, weights_generation=1)), Reason.MODEL_MISMATCH),
    ("adapters", Quest(), replace(CONTEXT, model=ModelIdentity("id:m")), Reason.ADAPTER_MISMATCH),
    ("dtype", Quest(), replace(CONTEXT, abi=replace(CONTEXT.abi, dtype="bfloat16")), Reason.CACHE_ABI_MISMATCH),
    ("rope", Quest(), replace(CONTEXT, position=PositionRule("default", 5e5)), Reason.ROPE_CONFIG_MISMATCH),
    ("rope type", Quest(), replace(CONTEXT, position=PositionRule("yarn", 1e4)), Reason.ROPE_CONFIG_MISMATCH),
]


@pytest.mark.parametrize(("method", "context", "reason"), [row[1:] for row in FOREIGN], ids=[row[0] for row in FOREIGN])
def test_a_foreign_artefact_is_refused(method: Any, context: ChunkContext, reason: Reason) -> None:
    made = _made([(0.1, 0.05)] * 20)
    assert made.require(Quest(), CONTEXT) is made
    with pytest.raises(RetrievalError) as caught:
        made.require(method, context)
    assert caught.value.reason is reason
    assert caught.value.field.startswith("calibration.")


def test_another_chunk_size_or_lineage_may_use_it() -> None:
    made = _made([(0.1, 0.05)] * 20)
    assert made.require(Quest(), replace(CONTEXT, chunk_tokens=256, lineage="policy:x")) is made


def _broken(name: str) -> Any:
    data = _made([(raw / 20, raw / 40) for raw in range(20)], bins=2).to_json()
    match name:
        case "altered":
            data["curves"][0]["bounds"][0] = 0.0
        case "falling":
            data["curves"][0]["bounds"] = [0.5, 0.1]
        case "newer":
            data["format"] = 2
        case "no curves":
            del data["curves"]
        case "text":
            return "calibration"
        case "confidence":
            data["confidence"] = "high"
        case "more":
            data["binding"]["extra"] = 1
        case "nothing":
            return None
    return data


@pytest.mark.parametrize("name", ["altered", "falling", "newer", "no curves", "text", "confidence", "more", "nothing"])
def test_a_damaged_artefact_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Calibration.from_json(_broken(name))
    assert caught.value.reason is Reason.CALIBRATION_DAMAGED


@pytest.mark.parametrize(
    ("upper", "bounds"), [((), ()), ((0.1,), (0.1, 0.2)), ((0.2, 0.1), (0.1, 0.2)), ((0.1,), (1.1,))]
)
def test_curves_that_are_none(upper: tuple[float, ...], bounds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match="CalibrationCurve"):
        CalibrationCurve(BUDGET, None, upper, bounds, 1)
