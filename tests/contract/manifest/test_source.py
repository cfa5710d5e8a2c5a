"""The source digest tells apart everything that decides what rows mean."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from chunks_and_faults import LAYOUT, make_context

from kvstrata.contract.identity import ModelIdentity, Namespace, PositionRule
from kvstrata.contract.manifest import SourceBinding, TensorContract, source_digest
from kvstrata.errors import ConfigurationError

GENERATIONS = {
    "namespace_generation": 1,
    "request_generation": 2,
    "cache_generation": 3,
    "publication_generation": 4,
    "start": 0,
    "frontier": 8,
}


def bind(**changes: object) -> SourceBinding:
    return SourceBinding.of(make_context(**changes), LAYOUT, **GENERATIONS)


@pytest.mark.parametrize("field", [f.name for f in fields(SourceBinding) if f.name != "request_generation"])
def test_each_field_changes_the_digest(field: str) -> None:
    binding, tensor = bind(), TensorContract.of(make_context().abi, 8)
    value = getattr(binding, field)
    other = {"start": 1, "tenant": Namespace("default", "salt")}.get(field) or (
        value + 1 if isinstance(value, int) else "another"
    )
    assert source_digest(replace(binding, **{field: other}), tensor) != source_digest(binding, tensor)


def test_another_request_searches_the_same_source() -> None:
    binding, tensor = bind(), TensorContract.of(make_context().abi, 8)
    assert source_digest(replace(binding, request_generation=9), tensor) == source_digest(binding, tensor)


def test_the_tensor_contract_changes_the_digest() -> None:
    binding, tensor = bind(), TensorContract.of(make_context().abi, 8)
    assert source_digest(binding, replace(tensor, query_to_kv=(0, 1, 0, 1))) != source_digest(binding, tensor)


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"model": ModelIdentity("id:other")}, {"model_artefact"}),
        ({"model": ModelIdentity("id:test", ("lora@1",))}, {"adapter_set"}),
        ({"model": ModelIdentity("id:test", (), 1)}, {"checkpoint_generation"}),
        ({"position": PositionRule("yarn", 10000.0)}, {"rope_config"}),
        ({"namespace": Namespace("other")}, {"tenant"}),
        ({"lineage": "quest/1"}, {"lineage"}),
    ],
)
def test_a_part_of_the_context_changes_its_own_field(changes: dict[str, object], differing: set[str]) -> None:
    one, two = bind(), bind(**changes)
    assert {f.name for f in fields(one) if getattr(one, f.name) != getattr(two, f.name)} == differing


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\[9, 8\), which is no range"):
        replace(bind(), start=9)
