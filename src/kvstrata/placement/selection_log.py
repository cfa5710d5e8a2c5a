"""What a selecting step notes of each layer, until it becomes the step's receipt."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import torch

from kvstrata.contract.method import ComputeSite
from kvstrata.contract.selection_receipts import (
    LayerOutcome,
    LayerSelection,
    SelectionReceipt,
    ShadowSample,
    StageTimes,
)
from kvstrata.methods.interface import Geometry, Index
from kvstrata.methods.selection import NO_UNIT, Selection
from kvstrata.placement.expansion import Support
from kvstrata.placement.policy import SelectionPolicy

__all__ = ["SelectionLog", "count_rows", "greatest_estimate", "stages_of"]


class SelectionLog:
    """The layers of one step of one sequence. row_bytes: K and V of one row of one head."""

    def __init__(self, policy: SelectionPolicy, geometry: Geometry, site: ComputeSite, row_bytes: int) -> None:
        self._policy = policy
        self._geometry = geometry
        self._site = site
        self._row_bytes = row_bytes
        self._layers: list[LayerSelection] = []
        self._charged: Counter[str] = Counter()

    def begin(self) -> None:
        """A new step."""
        self._layers = []
        self._charged.clear()

    def charge(self, nbytes: Iterable[tuple[str, int]]) -> None:
        """Bytes, by tier, that were brought for the layer at hand."""
        for tier, count in nbytes:
            self._charged[tier] += count

    def exact(self, layer: int, outcome: LayerOutcome, index: Index | None, visible: int, times: StageTimes) -> None:
        """A layer that attended to all of `visible` rows."""
        owner = self._policy.method.owner
        owners = self._geometry.owners(owner)
        self._add(
            LayerSelection(
                layer,
                outcome,
                owner,
                owners,
                visible=owners * visible,
                index_bytes=0 if index is None else index.nbytes,
                generation=0 if index is None else index.generation,
                times=times,
            )
        )

    def chosen(
        self,
        layer: int,
        outcome: LayerOutcome,
        index: Index,
        selection: Selection,
        support: Support,
        *,
        not_ready: int,
        not_resident: int,
        near_rows: int,
        times: StageTimes,
        estimate: float | None,
        shadow: ShadowSample | None = None,
    ) -> None:
        """A layer whose method chose. not_ready: chosen rows, over all owners, that were waited for. not_resident: rows
        of one owner whose only valid copies are below the device. near_rows: rows reduced where they lay."""
        owners = support.rows.shape[0]
        legal = owners * support.visible
        visible = legal if outcome.exact else int(support.counts.sum())
        detail = getattr(index, "last", None)
        self._add(
            LayerSelection(
                layer,
                outcome,
                selection.owner,
                owners,
                selection.variant,
                self._site,
                candidates=selection.candidates,
                named=support.named,
                duplicates=support.duplicates,
                visible=visible,
                selected_not_ready=not_ready,
                preserved_not_resident=owners * not_resident,
                recoverable_not_selected=legal - visible,
                chosen_bytes=visible * self._row_bytes,
                read_bytes=tuple(sorted(self._charged.items())),
                near_bytes=near_rows * self._row_bytes,
                index_bytes=index.nbytes,
                generation=index.generation,
                estimate=estimate,
                times=times,
                shadow=shadow,
                detail="" if detail is None else str(detail),
            )
        )

    def receipt(self) -> SelectionReceipt:
        """The step's receipt."""
        contract = self._policy.method.contract
        return SelectionReceipt(
            self._policy.digest,
            contract.name,
            contract.version,
            str(self._policy.budget),
            self._policy.mode,
            contract.answer,
            tuple(self._layers),
        )

    def _add(self, layer: LayerSelection) -> None:
        self._layers.append(layer)
        self._charged.clear()


def count_rows(rows: torch.Tensor, chunk_tokens: int, chunks: Iterable[int]) -> int:
    """Entries of `rows` that lie in `chunks`."""
    wanted = torch.tensor(sorted(chunks), dtype=torch.int64, device=rows.device)
    if not wanted.numel():
        return 0
    return int(torch.isin(rows.div(chunk_tokens, rounding_mode="floor"), wanted).logical_and(rows != NO_UNIT).sum())


def greatest_estimate(selection: Selection) -> float | None:
    """Greatest share of the mass that the method believes to have left out, over query heads."""
    return None if selection.estimate is None else float(selection.estimate.max())


def stages_of(times: list[float], speculated: float) -> StageTimes:
    """From the moments that `Selecting.attend` noted: begin, append, select, fetch, then gather and the end."""
    append, select, fetch, *rest = (after - before for before, after in itertools.pairwise(times))
    gather, attend = rest if len(rest) == 2 else (0.0, sum(rest))
    return StageTimes(append=append, speculate=speculated, select=select, fetch=fetch, gather=gather, attend=attend)
