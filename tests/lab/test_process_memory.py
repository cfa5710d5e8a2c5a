"""Resident memory follows what the process really touches. Linux."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvstrata.lab.process_memory import peak_resident_bytes, release_free_memory, reset_peak, resident_bytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
SIZE, SLACK = 64 << 20, 16 << 20


def test_growth_and_peak_follow_touched_pages() -> None:
    release_free_memory()
    before = resident_bytes()
    assert before is not None
    with mmap.mmap(-1, SIZE) as block:
        for page in range(0, SIZE, mmap.PAGESIZE):
            block[page] = 1
        during = resident_bytes()
    after, peak = resident_bytes(), peak_resident_bytes()
    assert during is not None
    assert after is not None
    assert peak is not None
    assert during - before > SIZE - SLACK
    assert after < during - SIZE + SLACK
    assert peak >= during - SLACK
    if reset_peak():
        fresh = peak_resident_bytes()
        assert fresh is not None
        assert fresh < during - SIZE + SLACK
