"""The dense shadow against numbers made by hand, the mixture identity and its bound."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.method import Owner
from kvstrata.errors import ConfigurationError
from kvstrata.methods.selection import NO_UNIT
from kvstrata.placement.expansion import Support
from kvstrata.placement.shadow import DenseReference, entered
from kvstrata.placement.shadow_fixture import read_fixture, retrieval_fixture, write_fixture

SUPPORT_FIELDS = {"order"} & set(Support.__dataclass_fields__)


def support_of(
    rows: list[list[int]], visible: int, owner: Owner = Owner.QUERY_HEAD, sinks: int = 0, recent: int = 1
) -> Support:
    chosen = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)
    named = int((chosen != NO_UNIT).sum())
    places = {name: torch.zeros_like(chosen) for name in ("columns", *SUPPORT_FIELDS)}
    return Support(
        owner=owner,
        rows=chosen,
        sinks=sinks,
        recent=visible - recent,
        visible=visible,
        log_bias=None,
        named=named,
        duplicates=0,
        **places,
    )


def test_numbers_made_by_hand() -> None:
    # Weights 1/8, 4/8, 2/8, 1/8: a query of one channel, keys that are their logarithms.
    keys = torch.tensor([1.0, 4.0, 2.0, 1.0]).log().view(1, 4, 1)
    values = torch.tensor([[8.0, 0.0], [0.0, 2.0], [4.0, 0.0], [0.0, 8.0]]).view(1, 4, 2)
    reference = DenseReference.of(torch.ones(1, 1, 1), keys, values[..., :1], 1.0)
    assert reference.weights.flatten().tolist() == pytest.approx([0.125, 0.5, 0.25, 0.125])
    assert reference.rank.flatten().tolist() == [2, 0, 1, 3]
    reference = DenseReference.of_scores(reference.scores, values.double())
    assert reference.output.flatten().tolist() == pytest.approx([2.0, 2.0])
    # Rows 2 and 3 enter: 3/8 of the mass, (8/3, 8/3) the average over them; the best two rows were 1 and 2.
    found = reference.measure(support_of([[2]], 4), torch.tensor([[[2.0, 5.0]]]))
    assert found.entered.item() == 2
    assert found.recall.item() == 0.5
    assert found.retained.item() == pytest.approx(0.375)
    assert found.omitted.item() == pytest.approx(0.625)
    assert found.dense_norm.item() == pytest.approx(math.sqrt(8))
    assert found.support_error.item() == pytest.approx(math.sqrt(8) / 3)
    assert found.error.item() == pytest.approx(3.0)
    assert found.relative_error.item() == pytest.approx(3 / math.sqrt(8))
    assert found.bound.item() == pytest.approx(2 * 0.625 * 8)
    assert found.means()["recall"] == 0.5


def test_rows_of_the_support_are_those_of_its_owner() -> None:
    per_head = entered(support_of([[0], [1], [2], [NO_UNIT]], 5), 4, 1, 5)
    assert per_head[:, 0].nonzero().tolist() == [[0, 0], [0, 4], [1, 1], [1, 4], [2, 2], [2, 4], [3, 4]]
    shared = entered(support_of([[1], [2]], 5, Owner.KV_HEAD, sinks=1), 4, 1, 5)[:, 0]
    assert shared.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 0, 1, 0, 1]]
    layer = entered(support_of([[3, 1]], 5, Owner.LAYER), 2, 1, 5)[:, 0]
    assert layer.int().tolist() == [[0, 1, 0, 1, 1]] * 2
    assert entered(support_of([[]], 3), 1, 1, 3).flatten().tolist() == [False, False, True]


def test_several_rows_see_no_later_one_and_each_its_own_recent_ones() -> None:
    support = support_of([[0]], 6, recent=4)
    inside = entered(support, 1, 3, 6)[0].int().tolist()
    assert inside == [[1, 0, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1]]
    windowed = entered(support, 1, 3, 6, recent=2)[0].int().tolist()
    assert windowed == [[1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1]]
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 3, 4), torch.randn(1, 6, 4), torch.randn(1, 6, 4)
    reference = DenseReference.of(queries, keys, values, 0.5)
    for row in range(3):
        alone = DenseReference.of(queries[:, row : row + 1], keys[:, : 4 + row], values[:, : 4 + row], 0.5)
        assert torch.allclose(reference.output[:, row], alone.output[:, 0])
    whole = torch.ones(1, 3, 6, dtype=torch.bool)
    assert reference.measure_rows(whole, reference.output).entered.flatten().tolist() == [4, 5, 6]


@given(
    seed=st.integers(0, 10_000),
    group=st.sampled_from([1, 3, 4]),
    visible=st.integers(2, 40),
    sharpness=st.sampled_from([0.0, 0.3, 3.0, 300.0]),
    sinks=st.booleans(),
)
def test_mixture_identity_and_bound(seed: int, group: int, visible: int, sharpness: float, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = 2 * group
    queries = torch.randn(heads, 1, 8, generator=generator) * sharpness
    keys, values = torch.randn(2, visible, 8, generator=generator), torch.randn(2, visible, 8, generator=generator)
    logits = torch.randn(heads, generator=generator) if sinks else None
    reference = DenseReference.of(queries, keys, values, 8**-0.5, logits)
    inside = torch.rand(heads, 1, visible, generator=generator) < 0.4
    inside[..., -1] = True
    found = reference.measure_rows(inside, reference.output)
    assert bool((found.error == 0).all())
    given_to_sinks = 1 - reference.weights.sum(-1)
    assert torch.allclose(found.retained + found.omitted + given_to_sinks, torch.ones(heads, 1).double())
    # The two averages by their own softmaxes, which never meet the masses.
    expanded = reference.values.repeat_interleave(group, dim=0)
    left = torch.softmax(reference.scores.masked_fill(inside, -torch.inf), -1).nan_to_num(0.0) @ expanded
    kept_scores = reference.scores.masked_fill(~inside, -torch.inf)
    if logits is not None:
        kept_scores = torch.cat([kept_scores, logits.double().view(-1, 1, 1)], -1)
        expanded = torch.cat([expanded, torch.zeros(heads, 1, 8).double()], 1)
    kept = torch.softmax(kept_scores, -1) @ expanded
    delta = found.omitted.unsqueeze(-1)
    assert torch.allclose((1 - delta) * kept + delta * left, reference.output, atol=1e-12)
    expected = found.omitted * torch.linalg.vector_norm(kept - left, dim=-1)
    assert torch.allclose(found.support_error, expected, atol=1e-12)
    assert bool((found.support_error <= found.bound + 1e-12).all())
    assert 0 <= float(found.recall.amin()) <= float(found.recall.amax()) <= 1


def test_all_rows_leave_nothing_out_and_the_best_rows_have_full_recall() -> None:
    torch.manual_seed(1)
    queries, keys, values = torch.randn(6, 1, 4), torch.randn(2, 30, 4), torch.randn(2, 30, 4)
    reference = DenseReference.of(queries, keys, values, 0.5)
    whole = reference.measure(support_of([[*range(29)]], 30, Owner.LAYER), reference.output)
    assert whole.omitted.tolist() == [[0.0]] * 6
    assert whole.support_error.amax() < 1e-15
    assert whole.recall.tolist() == [[1.0]] * 6
    best = reference.measure_rows(reference.rank < 7, reference.output)
    assert best.recall.tolist() == [[1.0]] * 6
    assert bool((best.omitted > 0).all())


def test_ties_prefer_the_lower_position_and_a_zero_output_has_no_relative_error_of_its_own() -> None:
    reference = DenseReference.of(torch.zeros(1, 1, 2), torch.zeros(1, 4, 2), torch.zeros(1, 4, 2), 1.0)
    assert reference.rank.flatten().tolist() == [0, 1, 2, 3]
    exact = reference.measure(support_of([[0]], 4), torch.zeros(1, 1, 2))
    assert (exact.recall.item(), exact.relative_error.item()) == (0.5, 0.0)
    assert reference.measure(support_of([[0]], 4), torch.ones(1, 1, 2)).relative_error.item() == math.inf


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="do not fit"):
        DenseReference.of(torch.zeros(3, 1, 2), torch.zeros(2, 4, 2), torch.zeros(2, 4, 2), 1.0)
    reference = DenseReference.of(torch.zeros(2, 1, 2), torch.zeros(2, 4, 2), torch.zeros(2, 4, 2), 1.0)
    with pytest.raises(ConfigurationError, match="support over 5 rows"):
        reference.measure(support_of([[0]], 5), torch.zeros(2, 1, 2))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_fixture_is_measured_again_to_the_same_numbers(tmp_path: Path, sinks: bool) -> None:
    torch.manual_seed(2)
    logits = torch.randn(6) if sinks else None
    reference = DenseReference.of(torch.randn(6, 1, 4), torch.randn(2, 20, 4), torch.randn(2, 20, 4), 0.5, logits)
    support = support_of([[3, 4, 7], [5, 6, 8]], 20, Owner.KV_HEAD, sinks=1, recent=2)
    output = torch.randn(6, 1, 4)
    measures = reference.measure(support, output)
    fixture = retrieval_fixture(
        reference, support, output, measures, method="quest", layer=3, position=19, candidates=5, fallback=0.25
    )
    write_fixture(tmp_path / "fixture.json", fixture)
    data, again = read_fixture(tmp_path / "fixture.json")
    assert data["heads"][4] | {"logits": [], "output": [], "measures": {}} == {
        "query_head": 4,
        "kv_head": 1,
        "owner": 1,
        "rows": [0, 5, 6, 8, 18, 19],
        "logits": [],
        "output": [],
        "measures": {},
    }
    assert data["frequencies"]["full_attention_fallback"] == 0.25
    assert (data["generation_quality"], data["frequencies"]["pool_miss"]) == (None, None)
    assert data["counts"] == {"candidates": 5, "rows_named": 6, "rows_named_once": 6}
    for name in measures.means():
        assert torch.allclose(getattr(again, name).double(), getattr(measures, name).double(), rtol=1e-12), name
        stored = [head["measures"][name] for head in data["heads"]]
        assert stored == pytest.approx(getattr(again, name).flatten().tolist())
    with pytest.raises(FileExistsError):
        write_fixture(tmp_path / "fixture.json", fixture)


def test_what_is_no_fixture_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", '{"format": "other"}')):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="is no kvstrata-retrieval-fixture/1"):
            read_fixture(path)
    reference = DenseReference.of(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), 1.0)
    support = support_of([[]], 2)
    measures = reference.measure(support, torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="one query row, not 2"):
        retrieval_fixture(reference, support, torch.zeros(1, 2, 1), measures, method="x", layer=0, position=1)
