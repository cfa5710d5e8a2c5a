"""Capability records decide which way bytes may take."""

from __future__ import annotations

import dataclasses

import pytest

from kvstrata.contract.capability import DEVICE, FILES, HOST, Persistence, TierCapability, Visibility, legal_path
from kvstrata.errors import ConfigurationError

GPU = TierCapability(DEVICE, "cuda:0", True, True, True, Persistence.PROCESS, Visibility.STREAM_EVENT)
CPU_DEVICE = TierCapability(DEVICE, "host", True, True, True, Persistence.PROCESS, Visibility.WRITE)
RAM = TierCapability(HOST, "host", False, True, True, Persistence.PROCESS, Visibility.WRITE)
DISK = TierCapability(FILES, "file", False, True, True, Persistence.MACHINE, Visibility.RENAME)


def _tiers(*records: TierCapability) -> dict[str, TierCapability]:
    return {record.tier: record for record in records}


def test_files_reach_a_device_only_through_the_host() -> None:
    tiers = _tiers(GPU, RAM, DISK)
    assert legal_path(FILES, DEVICE, tiers) == (FILES, HOST, DEVICE)
    assert legal_path(DEVICE, FILES, tiers) == (DEVICE, HOST, FILES)
    assert legal_path(HOST, DEVICE, tiers) == (HOST, DEVICE)


def test_a_device_in_host_memory_is_reached_directly() -> None:
    tiers = _tiers(CPU_DEVICE, DISK)
    assert legal_path(FILES, DEVICE, tiers) == (FILES, DEVICE)


def test_without_a_host_tier_there_is_no_way_from_files_to_a_device() -> None:
    assert legal_path(FILES, DEVICE, _tiers(GPU, DISK)) is None
    blocked = dataclasses.replace(RAM, dma_destination=False)
    assert legal_path(FILES, DEVICE, _tiers(GPU, DISK, blocked)) is None


def test_a_tier_that_takes_no_writes_is_no_destination() -> None:
    tiers = _tiers(GPU, RAM, dataclasses.replace(DISK, dma_destination=False))
    assert legal_path(HOST, FILES, tiers) is None
    assert legal_path(FILES, HOST, tiers) == (FILES, HOST)


def test_an_unknown_tier_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'tape' has no capability record; known: device, host"):
        legal_path("tape", HOST, _tiers(GPU, RAM))


@pytest.mark.parametrize("field", ["tier", "address_space"])
def test_a_record_without_a_name_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        dataclasses.replace(RAM, **{field: ""})
    with pytest.raises(ConfigurationError, match="alignment=0"):
        dataclasses.replace(RAM, alignment=0)


def test_codec_layout_and_tenant_are_asked_for() -> None:
    record = dataclasses.replace(RAM, layouts=frozenset({"a"}), tenants=frozenset({"t"}))
    assert record.keeps(codec="none", layout="a", tenant="t")
    assert not record.keeps(codec="fp8", layout="a", tenant="t")
    assert not record.keeps(codec="none", layout="b", tenant="t")
    assert not record.keeps(codec="none", layout="a", tenant="u")
    assert RAM.keeps(codec="none", layout="anything", tenant="anyone")
