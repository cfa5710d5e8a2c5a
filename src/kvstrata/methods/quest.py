"""Quest: whole pages of the history, ranked by an upper bound on the scores of their rows.

Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", section 3. For every page and
K/V head the smallest and the largest value of each key channel are kept. With m and M for these,

    bound(q, page) = sum_j max(q_j m_j, q_j M_j) >= q . k    for every key k of the page,

because each term bounds its own. The bound is about single rows, not about the choice: the corner of the box that it
measures need not be a row, so a page with a loose bound can push out the page that holds the best row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from kvstrata.contract.method import AnswerClass, GroupSharing, MethodContract, Owner, Unit, UpdatePhase
from kvstrata.errors import Reason, RetrievalError
from kvstrata.methods.choosing import Chosen, choose, scores_of, share_scores
from kvstrata.methods.interface import (
    Index,
    Method,
    MethodContext,
    StepRows,
    require_at_least,
    require_member,
    require_unit_rows,
)
from kvstrata.methods.selection import NO_UNIT, Selection

__all__ = ["EVALUATION_LEAST_PAGES", "PageExtrema", "PageRule", "Quest"]

EVALUATION_LEAST_PAGES = 3
"""Pages that the authors' evaluation code keeps however small its budget is."""

_BUILD_ROWS = 8192  # rows that are read at once when an index is built

_SHARINGS = (
    GroupSharing.SEPARATE,
    GroupSharing.MAX,
    GroupSharing.SUM,
    GroupSharing.MEAN,
    GroupSharing.SOFTMAX_SUM,
)


class PageRule(StrEnum):
    """Which pages compete for the budget, and how they count.

    PAPER: all pages, each for the rows that it would add. RUNTIME, as the authors' kernels do: the last page, which
    still grows, is not scored and always comes first. EVALUATION, as their accuracy scripts do: every page counts
    whole, and at least `EVALUATION_LEAST_PAGES` are taken, even where these pass the budget.
    """

    PAPER = "paper"
    RUNTIME = "runtime"
    EVALUATION = "evaluation"


class PageExtrema(Index):
    """Smallest and largest key of every page, channel by channel, in the keys' dtype.

    Page p holds the rows [p * page_size, (p + 1) * page_size); the last one may be short, and grows in place. Its keys
    are kept, so that rows can be taken back.
    """

    def __init__(self, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        # [kv_heads, room for pages, head_dim]; the extrema of no rows are the neutral elements.
        self._low = torch.full((kv_heads, 0, head_dim), torch.inf, dtype=dtype, device=device)
        self._high = -self._low
        self._last = torch.zeros(kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def pages(self) -> int:
        """Pages that hold rows."""
        return -(-self.frontier // self.page_size)

    @property
    def low(self) -> Tensor:
        """[kv_heads, pages, head_dim]."""
        return self._low[:, : self.pages]

    @property
    def high(self) -> Tensor:
        """[kv_heads, pages, head_dim]."""
        return self._high[:, : self.pages]

    def extend(self, start: int, keys: Tensor) -> None:
        """Take in `keys` [kv_heads, rows, head_dim], rows from position `start` on.

        Errors: `RetrievalError` with INDEX_FRONTIER_GAP unless `start` is the frontier: extrema cannot forget rows.
        """
        if start != self.frontier:
            raise RetrievalError(
                Reason.INDEX_FRONTIER_GAP,
                f"rows from {start} on were appended to page extrema that end at {self.frontier}",
                "build the index again",
                field="index.frontier",
            )
        stop, size = start + keys.shape[1], self.page_size
        first, last = start // size, -(-stop // size)
        self._make_room(last)
        for extrema, reduce, merge in (
            (self._low, torch.amin, torch.minimum),
            (self._high, torch.amax, torch.maximum),
        ):
            filler = torch.inf if extrema is self._low else -torch.inf
            padded = torch.nn.functional.pad(keys, (0, 0, start - first * size, last * size - stop), value=filler)
            paged = padded.reshape(keys.shape[0], last - first, size, keys.shape[2])
            extrema[:, first:last] = merge(extrema[:, first:last], reduce(paged, dim=2))
        # A copy, since what is left of the two may be a view of many more rows.
        self._last = torch.cat([self._last, keys], dim=1)[:, max(0, last - 1) * size - stop :].clone()
        self.frontier = stop
        self.generation += 1

    def shorten(self, frontier: int) -> bool:
        """Take back the rows from `frontier` on, if they belong to the page that grew last or begin a page; else, and
        for all rows, nothing is changed and the answer is `False`."""
        size, first = self.page_size, self.frontier - self._last.shape[1]
        if not 0 < frontier <= self.frontier or (frontier <= first and frontier % size):
            return False
        self._last = self._last[:, : max(0, frontier - first)]
        self.frontier = frontier
        self._low, self._high = self.low, self.high
        if self._last.shape[1]:
            self._low[:, -1], self._high[:, -1] = self._last.amin(1), self._last.amax(1)
        self.generation += 1
        return True

    def bounds(self, queries: Tensor) -> Tensor:
        """Upper bounds fp32 [query_heads, pages] of q . k, without the scale, for `queries` [query_heads, rows, dim].

        Of several query rows the largest. Holds to the rounding of an fp32 sum over head_dim terms.
        """
        heads, kv_heads = queries.shape[0], self._low.shape[0]
        grouped = queries.float().reshape(kv_heads, -1, queries.shape[-1])
        # max(q m, q M) is q M for q >= 0 and q m otherwise.
        upper = grouped.clamp_min(0) @ self.high.float().mT + grouped.clamp_max(0) @ self.low.float().mT
        return upper.reshape(heads, -1, self.pages).amax(1)

    def _make_room(self, pages: int) -> None:
        room = self._low.shape[1]
        if pages > room:
            # An eighth more than before, so that appending a row costs a constant time on average.
            more = (0, 0, 0, max(pages, room + room // 8) - room)
            self._low = torch.nn.functional.pad(self._low, more, value=torch.inf)
            self._high = torch.nn.functional.pad(self._high, more, value=-torch.inf)


@dataclass(frozen=True)
class Quest(Method[PageExtrema]):
    """The pages whose bound is highest.

    page_size: rows of a page. sharing: SEPARATE, as in the paper, lets each query head choose; MAX, SUM, MEAN and
    SOFTMAX_SUM of the scaled bounds choose once for the query heads of a K/V head. rule: see `PageRule`. dense_layers:
    layers from the first on that the paper leaves to full attention because their attention is less sparse; the frame
    does.
    """

    contract: ClassVar[MethodContract] = MethodContract(
        name="quest",
        source="Tang et al. 2024, Quest, section 3",
        version=1,
        answer=AnswerClass.APPROXIMATE,
        unit=Unit.PAGE,
        representation="smallest and largest value of each key channel in a page",
        index="a list of pages",
        owner=Owner.QUERY_HEAD,
        sharing=GroupSharing.SEPARATE,
        update=UpdatePhase.ROW,
    )

    page_size: int = 16
    sharing: GroupSharing = GroupSharing.SEPARATE
    rule: PageRule = PageRule.PAPER
    dense_layers: int = 2

    def __post_init__(self) -> None:
        require_unit_rows("Quest.page_size", self.page_size)
        require_at_least("Quest.dense_layers", self.dense_layers, 0)
        # The bound of a sum of queries bounds none of them.
        require_member("Quest.sharing", self.sharing, _SHARINGS)
        require_member("Quest.rule", self.rule, tuple(PageRule))

    @property
    def owner(self) -> Owner:
        """Query heads, or K/V heads where the group shares its choice."""
        return Owner.QUERY_HEAD if self.sharing is GroupSharing.SEPARATE else Owner.KV_HEAD

    def build(self, ctx: MethodContext, layer: int, index: PageExtrema | None) -> PageExtrema:
        """Reads every key once, some thousand rows at a time."""
        first = ctx.keys(layer, 0, min(_BUILD_ROWS, ctx.visible))
        built = PageExtrema(self.page_size, first.shape[0], first.shape[2], first.dtype, first.device)
        built.extend(0, first)
        for start in range(_BUILD_ROWS, ctx.visible, _BUILD_ROWS):
            built.extend(start, ctx.keys(layer, start, min(start + _BUILD_ROWS, ctx.visible)))
        return built

    def append(self, ctx: MethodContext, layer: int, index: PageExtrema, rows: StepRows) -> PageExtrema:
        """The same index, changed in place. Errors: `RetrievalError` unless the rows continue it."""
        index.extend(rows.start, rows.keys)
        return index

    def truncate(self, index: PageExtrema, frontier: int) -> PageExtrema | None:
        """The same index, changed in place, where the rows left over end in its last page or with a page."""
        return index if index.shorten(frontier) else None

    def select(self, ctx: MethodContext, layer: int, index: PageExtrema, rows: StepRows) -> Selection:
        """Pages with rows in the region. The estimate weighs each page as if all its rows reached the bound: neither
        an upper nor a lower bound of the omitted mass, since kept and omitted pages are overrated alike."""
        every, offered = _rows_of_pages(index, 0, index.frontier), _rows_of_pages(index, *ctx.region)
        bounds = index.bounds(rows.queries) * ctx.geometry.scale
        candidates = bounds.masked_fill(offered == 0, -torch.inf)
        chosen = self._choose(ctx, index, candidates, offered)
        return Selection(
            self.owner,
            chosen.units,
            candidates=int((offered > 0).sum()),
            estimate=_omitted(bounds, every, offered, chosen.units),
            capped=chosen.capped,
            scores=scores_of(bounds, chosen.units),
            scores_are_bounds=True,
        )

    def rows_of(self, index: PageExtrema, units: Tensor) -> Tensor:
        """See `Method.rows_of`; a short page is filled up."""
        rows = units.unsqueeze(-1) * self.page_size + torch.arange(self.page_size, device=units.device)
        rows = rows.masked_fill((units == NO_UNIT).unsqueeze(-1) | (rows >= index.frontier), NO_UNIT)
        return rows.flatten(1)

    def unit_span(self, index: PageExtrema) -> tuple[int, int, int]:
        """See `Method.unit_span`."""
        return index.pages, 0, index.frontier

    def _choose(self, ctx: MethodContext, index: PageExtrema, candidates: Tensor, offered: Tensor) -> Chosen:
        group, allowance = ctx.geometry.group, ctx.allowance
        scores = share_scores(candidates, self.sharing, group)
        log_mass = candidates + offered.log()
        if self.sharing is not GroupSharing.SEPARATE:
            log_mass = share_scores(log_mass, GroupSharing.SOFTMAX_SUM, group)
        if self.rule is PageRule.EVALUATION and allowance < int(offered.sum()):
            allowance = max(EVALUATION_LEAST_PAGES * self.page_size, allowance)
            return choose(scores, torch.full_like(offered, self.page_size), ctx.budget, allowance, log_mass)
        last = int(offered[-1])
        if self.rule is PageRule.PAPER or not last:
            return choose(scores, offered, ctx.budget, allowance, log_mass)
        if last > allowance:
            return Chosen(scores.new_zeros(scores.shape[0], 0, dtype=torch.int64), capped=False)
        scores = scores.clone()
        scores[:, -1] = -torch.inf
        chosen = choose(scores, offered, ctx.budget, allowance - last, log_mass)
        grown = chosen.units.new_full((scores.shape[0], 1), index.pages - 1)
        return replace(chosen, units=torch.cat([grown, chosen.units], dim=1))


def _rows_of_pages(index: PageExtrema, first: int, stop: int) -> Tensor:
    """How many of the positions [first, stop) lie in each page, int64 [pages]."""
    starts = torch.arange(index.pages, device=index.low.device) * index.page_size
    ends = (starts + index.page_size).clamp_max(min(stop, index.frontier))
    return (ends - starts.clamp_min(first)).clamp_min(0)


def _omitted(bounds: Tensor, every: Tensor, offered: Tensor, units: Tensor) -> Tensor:
    """Share of exp(bound) times rows, per query head, that lies in pages that were offered and not chosen."""
    taken = torch.zeros(units.shape[0], bounds.shape[1] + 1, dtype=torch.bool, device=units.device)
    taken.scatter_(1, units % (bounds.shape[1] + 1), True)  # NO_UNIT falls into the column too many
    taken = taken[:, :-1].repeat_interleave(bounds.shape[0] // units.shape[0], dim=0)
    left = (bounds + offered.log()).masked_fill(taken, -torch.inf).logsumexp(-1)
    return torch.exp(left - (bounds + every.log()).logsumexp(-1)).clamp(0, 1)
