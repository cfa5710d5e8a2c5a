"""Methods measured on recorded rows: against attention computed by hand, and against one another."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import tiny_model

from kvstrata.contract.budget import Rows
from kvstrata.contract.method import Owner
from kvstrata.engines.transformers.families.view import TransformersView
from kvstrata.errors import ConfigurationError
from kvstrata.lab.methods.attention import RecordedAttention
from kvstrata.lab.methods.contenders import BASELINE, CONTENDERS, PERSISTENT, Contender, contender, contenders
from kvstrata.lab.methods.measuring import PAGE_TOKENS, measure
from kvstrata.lab.methods.recording import Recording, record
from kvstrata.methods.exact_top_k import ExactTopK
from kvstrata.methods.selection import Correction, Repositioned, Selection
from kvstrata.methods.streaming import Streaming
from kvstrata.placement.expansion import expand

HISTORY, STEPS = 330, 5


@pytest.fixture(scope="module")
def recording() -> Recording:
    ids = torch.randint(1, 190, (HISTORY + STEPS,), generator=torch.Generator().manual_seed(5)).tolist()
    return record(tiny_model("llama"), ids, STEPS, (1, 2))


def test_all_rows_leave_nothing_out(recording: Recording) -> None:
    names = [name for name in CONTENDERS if name not in ("magicpig", "infllm", "infinigen")]
    whole = [dataclasses.replace(each, budget=Rows(1000)) for each in contenders(names, [1000], recording)]
    found, dense = measure(recording, whole, TransformersView(tiny_model("llama")))
    assert dense.shape == (2, STEPS)
    for each in found:
        assert each.mean("omitted") < 1e-12, each.contender.name
        assert each.mean("error") < 1e-4, each.contender.name
        assert each.mean("entered") == HISTORY + 3
        assert each.mean("recall") == 1


def test_every_contender_in_turn(recording: Recording) -> None:
    found, _ = measure(recording, contenders(CONTENDERS, [128], recording), TransformersView(tiny_model("llama")))
    omitted = {each.contender.name: each.mean("omitted") for each in found}
    assert list(omitted) == list(CONTENDERS)
    assert all(0 < mass < 1 for mass in omitted.values())
    assert omitted["exact_top_k"] <= omitted[BASELINE]
    shared = ["quest.16.shared", "streaming", "random_rows", "infllm.in_place"]
    assert all(omitted[BASELINE] <= omitted[name] for name in shared)
    for each in found:
        name = each.contender.name
        assert each.figures["omitted"].shape == (2, STEPS)
        assert len(each.build) == len(each.index_bytes) == 2
        assert (each.figures["support_error"] <= each.figures["bound"] + 1e-9).all(), name
        assert (each.figures["chosen_bytes"] <= each.figures["read_bytes"]).all(), name
        assert (each.figures["read_bytes"] <= each.figures["page_bytes"]).all(), name
        if name not in ("magicpig", "infinigen"):
            assert each.figures["entered"].max() <= 128, name
    by_name = {each.contender.name: each for each in found}
    assert by_name["streaming"].mean("head_rows") == 128 - PERSISTENT.rows
    row = 2 * 16 * 4
    assert by_name["streaming"].mean("read_bytes") == 2 * (128 - PERSISTENT.rows) * row
    assert by_name["streaming"].figures["page_bytes"].max() <= 2 * 2 * PAGE_TOKENS * row
    # Every key of the history and of the steps before is read to find the best rows.
    exact = by_name["exact_top_k"]
    assert (exact.figures["read_bytes"] - exact.figures["chosen_bytes"]).min() >= 2 * (HISTORY - 68) * row / 2
    # Low and high key of 21 pages of 16 rows, 2 heads, fp32.
    assert by_name["quest.16"].index_bytes[0] >= 2 * 16 * 4 / 16
    sampled = by_name["magicpig"]
    assert 128 * 0.5 < sampled.mean("entered") < 128 * 1.6
    assert sampled.contender.budget == Rows(HISTORY // 2)


def test_order_of_turns_changes_no_figure(recording: Recording) -> None:
    names = ["quest.16", "streaming", "random_rows"]
    one, _ = measure(recording, contenders(names, [100], recording), None)
    two, _ = measure(recording, contenders(names[::-1], [100], recording), None)
    for first, second in zip(one, two[::-1], strict=True):
        assert (first.figures["omitted"] == second.figures["omitted"]).all()
        assert (first.figures["error"] == second.figures["error"]).all()


def test_output_is_attention_over_the_support(recording: Recording) -> None:
    found, _ = measure(recording, [Contender("x", Streaming(), 90, Rows(90))], None)
    layer, position = recording.layers[1], HISTORY
    inside = [*range(4), *range(position + 1 - 86, position + 1)]
    keys, values = layer.keys[:, inside].double(), layer.values[:, inside].double()
    query = layer.queries[:, position].double()
    errors = []
    for head in range(4):
        kept = torch.softmax(keys[head // 2] @ query[head] * recording.geometry.scale, 0) @ values[head // 2]
        scores = layer.keys[head // 2, : position + 1].double() @ query[head] * recording.geometry.scale
        dense = torch.softmax(scores, 0) @ layer.values[head // 2, : position + 1].double()
        errors.append(float(torch.linalg.vector_norm(kept - dense)))
    assert found[0].figures["error"][0, 0] == pytest.approx(sum(errors) / 4, rel=1e-4)


@pytest.mark.parametrize("owner", [Owner.LAYER, Owner.KV_HEAD, Owner.QUERY_HEAD])
def test_turned_rows_are_weighed_by_their_turned_keys_and_corrected(recording: Recording, owner: Owner) -> None:
    geometry, layer = recording.geometry, recording.layers[1]
    attention = RecordedAttention(geometry, layer.keys, layer.values)
    rows = layer.rows(HISTORY, HISTORY + 1)
    owners = geometry.owners(owner)
    units = torch.stack([torch.tensor([40, 20, 30]) + each for each in range(owners)])
    key_heads = torch.arange(max(owners, 2)) // (max(owners, 2) // 2)
    moved = layer.keys[key_heads.unsqueeze(1), units.expand(max(owners, 2), -1)] * 0.5
    turned = Repositioned(rows.queries * 2, moved)
    plain, halved = (Selection(owner, units, 3), Selection(owner, units, 3, repositioned=turned))
    support = expand(ExactTopK(), ExactTopK().build(_Ctx(rows.stop), 1, None), plain, geometry, PERSISTENT, rows.stop)
    gathered = attention.gather(support)
    one, state = attention.attend(rows, plain, support, gathered)
    # Twice the query on half the key is the same product: only a key of another row would show.
    two, _ = attention.attend(rows, halved, support, gathered)
    torch.testing.assert_close(one, two)
    mass = attention.unit_mass(rows, plain, support, gathered, state)
    assert mass.shape == (4, 3)
    assert bool((mass > 0).all())
    share = torch.tensor([1.0, 0.5, 0.0, 1.0])
    corrected = dataclasses.replace(plain, correction=Correction(share, torch.ones(2, geometry.head_dim)))
    three, _ = attention.attend(rows, corrected, support, gathered)
    torch.testing.assert_close(three[1], one[1] * 0.5 + 0.5)
    torch.testing.assert_close(three[2], torch.ones_like(one[2]))
    torch.testing.assert_close(three[3], one[3])


class _Ctx:
    """Enough of a context for a method without an index."""

    def __init__(self, visible: int) -> None:
        self.visible = visible


def test_unknown_names_and_budgets_without_room_are_refused(recording: Recording) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing called 'quest\.17'"):
        contender("quest.17", 128, recording)
    with pytest.raises(ConfigurationError, match="68 rows leave none"):
        contender("quest.16", PERSISTENT.rows, recording)
