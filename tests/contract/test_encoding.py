"""The canonical form is injective over types and values, and the same on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.encoding import canonical, digest
from kvstrata.errors import ConfigurationError, Reason

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@dataclass(frozen=True)
class Left:
    item: object


@dataclass(frozen=True)
class Right:
    item: object


def typed(value: object) -> object:
    """A form whose equality is that of type and content: `1`, `True` and `1.0` differ, and so do `0.0` and `-0.0`."""
    if isinstance(value, tuple):
        return ("tuple", tuple(typed(item) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple((key, typed(value[key])) for key in sorted(value)))
    return (type(value).__name__, repr(value))


@given(values, values)
def test_equal_bytes_mean_equal_typed_values(left: object, right: object) -> None:
    assert (canonical(left) == canonical(right)) == (typed(left) == typed(right))


@given(st.dictionaries(st.text(max_size=4), st.integers(), min_size=2))
def test_the_order_of_keys_does_not_matter(mapping: dict[str, int]) -> None:
    turned = dict(reversed(list(mapping.items())))
    assert canonical(mapping) == canonical(turned)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (1, "1"),
        ("a", b"a"),
        (0.0, -0.0),
        (None, ""),
        ((), ""),
        (("ab", "c"), ("a", "bc")),
        ((1, (2, 3)), ((1, 2), 3)),
        ({"a": 1}, (("a", 1),)),
        (Left(1), Right(1)),
    ],
)
def test_look_alikes_have_different_bytes(left: object, right: object) -> None:
    assert canonical(left) != canonical(right)


@pytest.mark.parametrize("value", [object(), {1: "a"}, {2}, 1j, Left])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        canonical(value)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT


def test_domains_never_collide() -> None:
    assert digest("chunk/1", "x") != digest("chunk/2", "x")


GOLDEN_VALUE = {"b": (1, -2, 3.5, None, True), "a": b"\x00\xff", "n": "Zoë"}
GOLDEN_DIGEST = "e782079213927ac9cf98d81a8b450343a5068fc728000c547d94a85f60017eea"


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert digest("golden/1", GOLDEN_VALUE).hex() == GOLDEN_DIGEST


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_the_digest_is_the_same_in_every_process(hash_seed: str) -> None:
    code = f"from kvstrata.contract.encoding import digest; print(digest('golden/1', {GOLDEN_VALUE!r}).hex())"
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == GOLDEN_DIGEST
