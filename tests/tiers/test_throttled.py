"""A slow link: bytes cost what was declared, and whatever passes at once shares it."""

from __future__ import annotations

from pathlib import Path

import pytest
from chunks_and_faults import LAYERS, make_chunk

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.tiers.files import FileTier, WriteOutcome
from kvstrata.tiers.throttled import Link, ThrottledTier

CHUNK = make_chunk(1)
LAYER_BYTES = len(CHUNK.payload(0))


class SleptTime:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> SleptTime:
    return SleptTime()


@pytest.fixture
def tier(tmp_path: Path, time: SleptTime) -> ThrottledTier:
    link = Link(LAYER_BYTES, latency_s=0.25, clock=time, sleep=time.sleep)
    return ThrottledTier(FileTier(tmp_path), link, "remote")


def test_every_operation_has_its_price(tier: ThrottledTier, time: SleptTime) -> None:
    def price(call: object) -> tuple[object, float]:
        before = time.now
        return call(), time.now - before  # type: ignore[operator]

    receipt, seconds = price(lambda: tier.write(*CHUNK.arguments))
    assert (receipt.outcome, seconds) == (WriteOutcome.WRITTEN, LAYERS + 0.25)  # type: ignore[attr-defined]
    assert price(lambda: tier.has(CHUNK.digest)) == (True, 0.25)
    assert price(lambda: list(tier.list())) == ([CHUNK.digest], 0.25)
    reader, seconds = price(lambda: tier.open(CHUNK.digest))
    assert seconds == 0.25
    with reader:  # type: ignore[attr-defined]
        target = bytearray(LAYER_BYTES)
        assert price(lambda: reader.read_into(1, [memoryview(target)])) == (LAYER_BYTES, 1.25)  # type: ignore[attr-defined]
        assert bytes(target) == CHUNK.payload(1)
        assert price(reader.verify_payload)[1] == LAYERS + 0.25  # type: ignore[attr-defined]
    assert price(lambda: tier.revoke(CHUNK.digest)) == (True, 0.25)
    totals = tier.link.totals
    assert (totals.operations, totals.bytes, totals.busy_s) == (7, 7 * LAYER_BYTES, 7.0)
    assert totals.waited_s == pytest.approx(time.now - 50.0)


def test_what_passes_at_once_shares_the_rate(time: SleptTime) -> None:
    link = Link(100.0, latency_s=0.5, clock=time, sleep=time.sleep)
    assert [link.ask(100), link.ask(50), link.ask()] == [51.5, 52.0, 52.0]
    link.wait(51.5)
    assert link.ask(100) == 53.0
    time.now = 60.0
    assert link.ask(100) == 61.5


def test_what_took_longer_by_itself_is_not_delayed(time: SleptTime) -> None:
    link = Link(100.0, clock=time, sleep=time.sleep)
    until = link.ask(100)
    time.now += 7
    link.wait(until)
    assert (time.now, link.totals.waited_s) == (57.0, 0.0)


def test_its_capability_is_its_own(tier: ThrottledTier) -> None:
    below, found = tier.tier.capability, tier.capability
    assert (found.tier, found.address_space) == ("remote", "link")
    assert (found.dma_source, found.persistence, found.alignment) == (True, below.persistence, below.alignment)
    assert (tier.durable, tier.read_only) == (False, False)


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -0.1), (float("nan"), 0.0)])
def test_links_that_cannot_be(rate: float, latency: float) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Link(rate, latency)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT
