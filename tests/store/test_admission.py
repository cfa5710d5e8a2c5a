"""The filter counts what it should, forgets as it should, and lets nobody in who was asked for less."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store.admission import AdmissionConfig, AdmissionFilter, AdmissionOutcome, Contender

WIDE = AdmissionConfig(counters=4096, sample=10_000)


def asked(counts: dict[bytes, int], config: AdmissionConfig = WIDE) -> AdmissionFilter:
    found = AdmissionFilter(config)
    for chunk, count in counts.items():
        for _ in range(count):
            found.record(chunk)
    return found


@given(
    st.lists(st.binary(min_size=1, max_size=2), max_size=300), st.sampled_from([2, 8, 4096]), st.integers(0, 2**64 - 1)
)
def test_within_a_sample_nothing_is_underestimated(chunks: list[bytes], counters: int, seed: int) -> None:
    """The reference is a counter without bounds; a small sketch may only say more."""
    found = AdmissionFilter(AdmissionConfig(counters, sample=1000, seed=seed))
    for chunk in chunks:
        found.record(chunk)
    for chunk, count in Counter(chunks).items():
        assert found.requests(chunk) >= min(count, 16)


def test_a_wide_sketch_counts_exactly_up_to_its_bound() -> None:
    found = asked({b"once": 1, b"five": 5, b"sixteen": 16, b"hundred": 100})
    assert [found.requests(one) for one in (b"never", b"once", b"five", b"sixteen", b"hundred")] == [0, 1, 5, 16, 16]


def test_few_are_overestimated() -> None:
    """Heavy-tailed requests of 1098 chunks in a sketch of 1024: few are counted wrong, and these by little."""
    draw = random.Random(7)
    chunks = [int(draw.paretovariate(0.4)).to_bytes(32, "big") for _ in range(9000)]
    found = asked({}, AdmissionConfig(counters=1024, sample=10_000, seed=7))
    for chunk in chunks:
        found.record(chunk)
    wrong = [found.requests(chunk) - min(count, 16) for chunk, count in Counter(chunks).items()]
    assert len(wrong) > 1000
    assert min(wrong) >= 0
    assert max(wrong) <= 3
    assert sum(error > 0 for error in wrong) / len(wrong) < 0.02


def test_counters_are_halved_and_the_doorkeeper_emptied_after_a_sample() -> None:
    found = AdmissionFilter(AdmissionConfig(counters=64, sample=10))
    for _ in range(9):
        found.record(b"often")
    assert found.requests(b"often") == 9
    found.record(b"once")
    assert found.requests(b"often") == 4  # eight in the sketch, halved; the one at the door is gone
    assert found.requests(b"once") == 0
    for _ in range(4):
        found.record(b"later")  # half a sample counts as recorded: five more fill it
    assert found.requests(b"later") == 4
    found.record(b"later")
    assert found.requests(b"often") == 2


def test_memory_does_not_grow_with_requests() -> None:
    found = AdmissionFilter(AdmissionConfig(counters=64, sample=100))
    before = found.nbytes
    for number in range(5000):
        found.record(number.to_bytes(4, "big"))
    assert found.nbytes == before == 4 * 64 + 1024 // 8


def test_the_doorkeeper_stops_most_one_time_requests_of_a_full_sample() -> None:
    """A scan: as many chunks as a sample has requests, each once. 2.4 % should be taken for known; twice that may."""
    found = AdmissionFilter(AdmissionConfig(counters=1024, sample=10_241, seed=3))
    for number in range(10_240):
        found.record(number.to_bytes(4, "big"))
    known = sum(found.requests(number.to_bytes(5, "big")) > 0 for number in range(10_000))
    assert known / 10_000 < 0.048


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_requests_give_the_same_counts(seed: int) -> None:
    chunks = [bytes([number % 50]) for number in range(900)]
    one, two = (AdmissionFilter(AdmissionConfig(16, 400, seed)) for _ in range(2))
    for chunk in chunks:
        one.record(chunk)
        two.record(chunk)
    assert [one.requests(bytes([n])) for n in range(60)] == [two.requests(bytes([n])) for n in range(60)]


def test_another_seed_has_other_collisions() -> None:
    counts = {bytes([number]): 2 for number in range(40)}
    zero, one = (asked(counts, AdmissionConfig(counters=4, sample=1000, seed=seed)) for seed in (0, 1))
    names = [bytes([number, 1]) for number in range(200)]
    assert [zero.requests(name) for name in names] != [one.requests(name) for name in names]


def test_where_there_is_room_everything_is_admitted() -> None:
    decision = AdmissionFilter(WIDE).decide(Contender(b"new"), [])
    assert (decision.outcome, decision.reason) == (AdmissionOutcome.ADMITTED, None)


def test_a_chunk_that_was_asked_for_once_replaces_nothing() -> None:
    found = asked({b"new": 1})
    decision = found.decide(Contender(b"new", saving_s=1e9), [Contender(b"never asked for")])
    assert (decision.outcome, decision.reason) == (AdmissionOutcome.DECLINED_ONE_HIT, Reason.NOT_ADMITTED)
    found.record(b"new")
    assert found.decide(Contender(b"new"), [Contender(b"never asked for")]).outcome is AdmissionOutcome.ADMITTED


def test_what_is_asked_for_more_often_stays_and_so_does_what_is_asked_for_as_often() -> None:
    found = asked({b"new": 3, b"as often": 3, b"less": 2})
    assert found.decide(Contender(b"new"), [Contender(b"as often")]).outcome is AdmissionOutcome.DECLINED_LOWER_VALUE
    admitted = found.decide(Contender(b"new"), [Contender(b"less")])
    assert (admitted.requests, admitted.newcomer_value_s, admitted.victims_value_s) == (3, 3.0, 2.0)
    assert admitted.outcome is AdmissionOutcome.ADMITTED


def test_victims_count_together() -> None:
    found = asked({b"new": 5, b"a": 3, b"b": 2})
    assert found.decide(Contender(b"new"), [Contender(b"a")]).outcome is AdmissionOutcome.ADMITTED
    both = found.decide(Contender(b"new"), [Contender(b"a"), Contender(b"b")])
    assert (both.outcome, both.victims_value_s) == (AdmissionOutcome.DECLINED_LOWER_VALUE, 5.0)


def test_a_request_weighs_what_a_hit_saves() -> None:
    found = asked({b"deep": 2, b"shallow": 6})
    assert found.decide(Contender(b"deep", 4.0), [Contender(b"shallow", 1.0)]).outcome is AdmissionOutcome.ADMITTED
    turned = found.decide(Contender(b"shallow", 1.0), [Contender(b"deep", 4.0)])
    assert (turned.outcome, turned.newcomer_value_s) == (AdmissionOutcome.DECLINED_LOWER_VALUE, 6.0)


def test_a_scan_does_not_push_out_what_is_used() -> None:
    """A cache of 50 under a working set of 50 and one-time chunks: an LRU loses the set, the filter keeps it."""
    working = [b"w%d" % number for number in range(50)]
    found, kept = asked(dict.fromkeys(working, 3)), set(working)
    for number in range(2000):
        scanned = b"s%d" % number
        found.record(scanned)
        victim = working[number % 50]
        if found.decide(Contender(scanned), [Contender(victim)]).outcome is AdmissionOutcome.ADMITTED:
            kept.discard(victim)
    assert kept == set(working)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("counters", 0),
        ("counters", 1),
        ("counters", 48),
        ("counters", 2**25),
        ("sample", 1),
        ("sample", 2**29),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(field: str, value: int) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError, match=rf"AdmissionConfig\.{field}={value} "):
        AdmissionConfig(**change)


@pytest.mark.parametrize("saving_s", [-1.0, float("nan")])
def test_a_saving_that_cannot_be_is_refused(saving_s: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"Contender\.saving_s={saving_s} "):
        Contender(b"a", saving_s)
