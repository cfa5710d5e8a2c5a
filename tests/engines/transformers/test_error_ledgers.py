"""The four error ledgers of sampled steps, in live models: each is measured, and none stands for another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach
from tiny_models import tiny_model

from kvstrata.contract.budget import Fraction, Persistent
from kvstrata.contract.error_ledgers import ErrorLedgers
from kvstrata.contract.method import AnswerClass, GroupSharing
from kvstrata.cost.downstream import DownstreamMap
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.exact_top_k import ExactTopK
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.magicpig import MagicPIG
from kvstrata.methods.quest import Quest
from kvstrata.placement.live_shadow import LiveShadow

KEEP = Persistent(sinks=2, recent=9)


def sampled(method: Any, path: Path, share: float = 0.5, family: str = "llama") -> list[ErrorLedgers]:
    return watched(method, path, LiveShadow(every=1), share, family)


def watched(method: Any, path: Path, shadow: LiveShadow, share: float, family: str) -> list[ErrorLedgers]:
    model = tiny_model(family)
    ids = torch.randint(1, 190, (1, 3 * CHUNK), generator=torch.Generator().manual_seed(1))
    options = {"budget": Fraction(share), "persistent": KEEP, "min_history": 8, "dense_layers": ()}
    with attach(model, path, method=method, mode="approximate", **options) as memory, torch.no_grad():
        request = memory.request(shadow=shadow)
        model(ids[:, :-4], **request.generate_kwargs())
        for place in range(-4, 0):
            model(ids[:, place : ids.shape[1] + place + 1], **request.generate_kwargs())
        layers = [layer for layer in request.last_step.selections[0].layers if layer.shadow is not None]
    assert layers
    assert len(shadow.results) == len(shadow.samples)
    return [layer.shadow.ledgers for layer in layers]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt_oss"])
def test_page_bounds_overrate_their_rows_and_nothing_else_is_wrong(family: str, tmp_path: Path) -> None:
    for ledgers in sampled(Quest(page_size=4), tmp_path, family=family):
        assert ledgers.representation is not None
        assert ledgers.representation.violations == 0
        assert ledgers.representation.mean_absolute > 0
        assert ledgers.payload is not None
        assert ledgers.payload.lossless
        assert ledgers.payload.rows > 0
        assert ledgers.reduction is not None
        assert ledgers.reduction.within
        assert ledgers.support is not None
        assert 0 < ledgers.support.omitted_mass < 1
        assert ledgers.support.error > ledgers.reduction.greatest


def test_exact_scores_have_no_representation_error(tmp_path: Path) -> None:
    for ledgers in sampled(ExactTopK(), tmp_path):
        assert ledgers.representation is not None
        assert ledgers.representation.greatest < 1e-4
        assert ledgers.representation.violations is None


def test_an_estimator_reduces_with_its_own_weights(tmp_path: Path) -> None:
    for ledgers in sampled(MagicPIG(bits=2, tables=12), tmp_path, share=0.9):
        assert ledgers.representation is None
        assert ledgers.reduction is not None
        assert ledgers.reduction.answer is AnswerClass.ESTIMATOR
        assert ledgers.reduction.within


def test_turned_keys_are_another_payload(tmp_path: Path) -> None:
    for ledgers in sampled(InfLLM(block_size=8, representatives=2), tmp_path, share=0.8):
        assert ledgers.payload is not None
        assert ledgers.payload.key_greatest > 0
        assert ledgers.payload.value_greatest == 0
        assert ledgers.reduction is None


@pytest.mark.parametrize("method", [Quest(page_size=4), ExactTopK(), Quest(page_size=8, sharing=GroupSharing.MAX)])
def test_the_worst_head_is_reported_and_its_sets_and_bytes_are_checked(method: Any, tmp_path: Path) -> None:
    shadow = LiveShadow(every=1)
    watched(method, tmp_path, shadow, 0.5, "llama")
    assert len(shadow.reports) == len(shadow.results)
    for (position, layer, report), (*_, sample) in zip(shadow.reports, shadow.results, strict=True):
        assert report.error.omitted == pytest.approx(sample.most_omitted, abs=1e-6)
        assert report.error.error <= report.error.bound + 1e-9
        assert report.expansion.visible == position + 1
        assert report.expansion.support[-9:] == tuple(range(position - 8, position + 1)), "the recent rows"
        assert report.ledger.support_bytes == len(report.expansion.support) * 2 * 16 * 4
        assert report.ledger.transfer_bytes == 0, "everything was on the device"
        assert report.ledger.descriptor_bytes == 8 * len(report.expansion.selected)
        assert (report.candidate_recall is None) is isinstance(method, Quest)
        assert 0 < report.support_recall <= 1
        assert layer in range(3)


class Overlapping(Quest):
    """Pages that share their first row with the page before: a method that is wrong."""

    def rows_of(self, index: Any, units: torch.Tensor) -> torch.Tensor:
        return (super().rows_of(index, units) - 1).clamp_min(0)


def test_a_method_whose_units_are_no_partition_is_found_in_a_sampled_step(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError) as caught:
        sampled(Overlapping(page_size=4), tmp_path)
    assert caught.value.reason in (Reason.UNIT_OVERLAP, Reason.UNIT_COVERAGE_GAP)


def test_the_unit_cache_tells_its_account_in_the_receipt(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = torch.randint(1, 190, (1, 3 * CHUNK), generator=torch.Generator().manual_seed(1))
    options = {"budget": Fraction(0.5), "persistent": KEEP, "min_history": 8}
    method = InfLLM(block_size=8, representatives=2, cache_units=4)
    with attach(model, tmp_path, method=method, mode="approximate", **options) as memory, torch.no_grad():
        request = memory.request()
        model(ids[:, :-3], **request.generate_kwargs())
        for place in range(-3, 0):
            model(ids[:, place : ids.shape[1] + place + 1], **request.generate_kwargs())
        details = [layer.detail for layer in request.last_step.selections[0].layers]
    counts = [[int(number) for number in re.findall(r"\d+", detail)] for detail in details]
    assert all(detail.startswith("unit cache: ") for detail in details)
    assert all(hits > 0 and misses >= 4 and resident == 4 for hits, misses, _, resident in counts)


def test_an_error_is_followed_through_the_output_projection(tmp_path: Path) -> None:
    model = tiny_model("llama")

    def columns(layer: int, head: int) -> DownstreamMap:
        weight = model.model.layers[layer].self_attn.o_proj.weight.detach().double()
        return DownstreamMap.of(weight[:, 16 * head : 16 * (head + 1)].numpy())

    shadow = LiveShadow(every=1, downstream=columns)
    watched(Quest(page_size=4), tmp_path, shadow, 0.5, "llama")
    assert len(shadow.mapped) == len(shadow.results)
    assert all(0 < found.error <= found.bound for *_, found in shadow.mapped)
