"""Whether a chunk deserves a place in a full tier, where others would leave for it.

TinyLFU (Einziger, Friedman, Manes 2017, ACM Transactions on Storage 13(4), arXiv 1512.00727): requests of all chunks,
stored or not, are counted in a small sketch, and a newcomer is admitted only if it was asked for more often than what
it would replace. A doorkeeper holds what was asked for once, so that one-time requests, which are most, take no
counter. Counters age: they are halved, and the doorkeeper emptied, after every `sample` requests. A newcomer that
replaces several chunks is compared with all of them together, as the extension to objects of different sizes does
(Einziger, Eytan, Friedman, Manes 2022, ACM Transactions on Storage 18(3), arXiv 2105.08770). Here a request weighs the
seconds that a hit saves, so that values are compared, not counts alone.

Both structures only ever overestimate, by collisions; no chunk is refused because it was forgotten within a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvstrata.cost.bounds import require_finite
from kvstrata.errors import ConfigurationError, Reason

__all__ = ["Admission", "AdmissionConfig", "AdmissionFilter", "AdmissionOutcome", "Contender"]

_ROWS = 4
_MOST = 15  # four bits would do; a byte is quicker to reach
_MOST_COUNTERS = 2**24
_MOST_SAMPLE = 2**28
_HALVED = bytes(value // 2 for value in range(256))


class AdmissionOutcome(StrEnum):
    """ADMITTED: takes its place. DECLINED_ONE_HIT: asked for once in this sample. DECLINED_LOWER_VALUE: worth no more
    than what would leave for it."""

    ADMITTED = "admitted"
    DECLINED_ONE_HIT = "declined_one_hit"
    DECLINED_LOWER_VALUE = "declined_lower_value"


@dataclass(frozen=True, slots=True)
class Contender:
    """A chunk by its name, and the seconds that one hit on it saves."""

    chunk: bytes
    saving_s: float = 1.0

    def __post_init__(self) -> None:
        require_finite("Contender.saving_s", self.saving_s)


@dataclass(frozen=True, slots=True)
class Admission:
    """What was decided, and on what: requests of the newcomer, its value, and that of its victims together, in seconds.

    reason: NOT_ADMITTED, or `None` when it was admitted.
    """

    outcome: AdmissionOutcome
    requests: int
    newcomer_value_s: float
    victims_value_s: float

    @property
    def reason(self) -> Reason | None:
        return None if self.outcome is AdmissionOutcome.ADMITTED else Reason.NOT_ADMITTED


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """counters: counters in each of the four rows of the sketch, a power of two, about the number of chunks that fit.
    sample: requests after which counters are halved, about ten times as many. seed: of the hash; another one has other
    collisions, so one that nobody knows keeps a tenant from choosing them.

    Errors: `ConfigurationError` for a value that cannot be.
    """

    counters: int = 65_536
    sample: int = 655_360
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.counters <= _MOST_COUNTERS or self.counters & (self.counters - 1):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"AdmissionConfig.counters={self.counters} must be a power of two from 2 to {_MOST_COUNTERS}",
            )
        if not 2 <= self.sample <= _MOST_SAMPLE:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"AdmissionConfig.sample={self.sample} must be from 2 to {_MOST_SAMPLE}"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"AdmissionConfig.seed={self.seed} must be from 0 to {2**64 - 1}"
            )


class AdmissionFilter:
    """Counts requests and judges newcomers. Not safe for several threads. Memory is fixed: four bytes for each of
    `counters`, and one to two for each request of a sample. Calls are O(1), but for the ageing, which is O(memory) once
    in half a sample.
    """

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self.config = config or AdmissionConfig()
        self._counters = [bytearray(self.config.counters) for _ in range(_ROWS)]
        self._shift = 32 - (self.config.counters.bit_length() - 1)
        # At least eight bits for each request of a sample: with four hashes, at most 2.4 % of the chunks are taken for
        # known, even when all requests are for different ones.
        bits = 1 << (8 * self.config.sample - 1).bit_length()
        self._doorkeeper = bytearray(bits // 8)
        self._mask = bits - 1
        self._recorded = 0

    @property
    def nbytes(self) -> int:
        """Bytes of sketch and doorkeeper."""
        return sum(map(len, self._counters)) + len(self._doorkeeper)

    def record(self, chunk: bytes) -> None:
        """Count a request of `chunk`, be it a hit or a miss."""
        hashes = self._hashes(chunk)
        if not self._known(hashes):
            for place in hashes:
                self._doorkeeper[(place & self._mask) >> 3] |= 1 << (place & 7)
        else:
            least = self._counted(hashes)
            if least < _MOST:
                for row, place in zip(self._counters, hashes, strict=True):
                    # Only the lowest counters grow: the others owe their height to other chunks.
                    row[place >> self._shift] = max(row[place >> self._shift], least + 1)
        self._recorded += 1
        if self._recorded >= self.config.sample:
            self._age()

    def requests(self, chunk: bytes) -> int:
        """Requests of `chunk` since the latest ageing, plus half of what was counted then; at most 16 are counted."""
        hashes = self._hashes(chunk)
        return self._counted(hashes) + self._known(hashes)

    def decide(self, newcomer: Contender, victims: Sequence[Contender]) -> Admission:
        """Whether `newcomer`, whose present request was recorded, may take the place of all of `victims`.

        Without victims it is admitted: there is room. A tie is for what is there, whose write is paid.
        """
        requests = self.requests(newcomer.chunk)
        value = requests * newcomer.saving_s
        replaced = sum(self.requests(victim.chunk) * victim.saving_s for victim in victims)
        if not victims:
            outcome = AdmissionOutcome.ADMITTED
        elif requests <= 1:
            outcome = AdmissionOutcome.DECLINED_ONE_HIT
        elif value <= replaced:
            outcome = AdmissionOutcome.DECLINED_LOWER_VALUE
        else:
            outcome = AdmissionOutcome.ADMITTED
        return Admission(outcome, requests, value, float(replaced))

    def _hashes(self, chunk: bytes) -> tuple[int, int, int, int]:
        wide = xxhash.xxh3_128_intdigest(chunk, self.config.seed)
        return wide & 0xFFFFFFFF, wide >> 32 & 0xFFFFFFFF, wide >> 64 & 0xFFFFFFFF, wide >> 96

    def _counted(self, hashes: tuple[int, int, int, int]) -> int:
        return min(row[place >> self._shift] for row, place in zip(self._counters, hashes, strict=True))

    def _known(self, hashes: tuple[int, int, int, int]) -> bool:
        return all(self._doorkeeper[(place & self._mask) >> 3] >> (place & 7) & 1 for place in hashes)

    def _age(self) -> None:
        self._counters = [row.translate(_HALVED) for row in self._counters]
        self._doorkeeper = bytearray(len(self._doorkeeper))
        self._recorded //= 2
