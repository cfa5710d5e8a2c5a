"""A model attached to layered memory: where requests are made, saved and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstrata.contract.capability import DEVICE, legal_path
from kvstrata.contract.identity import ChunkContext
from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.receipts import Ledger, RestoreReceipt, SaveReceipt
from kvstrata.contract.states import FileReplicaState
from kvstrata.engines.transformers.attention import PagedAttention
from kvstrata.engines.transformers.compilation import Compilation
from kvstrata.engines.transformers.families import LayerRule
from kvstrata.engines.transformers.inputs import prompt_ids, slices
from kvstrata.engines.transformers.parts import MemoryParts
from kvstrata.engines.transformers.request import Request
from kvstrata.engines.transformers.row import Row
from kvstrata.engines.transformers.saved import restore_request, save_request
from kvstrata.engines.transformers.selections import Selections, make_policy
from kvstrata.engines.transformers.wrapping import Wrapping
from kvstrata.errors import BudgetError, ConfigurationError, Reason, StateError
from kvstrata.kernels.decode import DecodeAttention
from kvstrata.kernels.prefill import PrefillWorkspace
from kvstrata.placement.layer_ahead import LayerAhead
from kvstrata.placement.live_shadow import LiveShadow
from kvstrata.placement.on_demand import OnDemand
from kvstrata.placement.policy import SelectionPolicy
from kvstrata.ports import StepLoop
from kvstrata.runtime.gating import Gating
from kvstrata.runtime.ledger import LedgerBook
from kvstrata.runtime.plain_loop import PlainLoop
from kvstrata.store.cost_gate import CostGateConfig
from kvstrata.store.directory import ChunkRecord, Directory
from kvstrata.store.history import History
from kvstrata.store.host_cache import host_arena, open_host_cache
from kvstrata.store.promotion import Promoter
from kvstrata.store.publication import Publisher
from kvstrata.store.store import Store
from kvstrata.tiers.device import capabilities
from kvstrata.tiers.memory import MemoryArena

__all__ = ["Memory"]


class Memory:
    """Returned by `kvstrata.attach`; a context manager. Not for use by several threads at once."""

    def __init__(
        self,
        model: Any,
        store: Store,
        context: ChunkContext,
        layout: SegmentLayout,
        rules: Sequence[LayerRule],
        *,
        budget: int,
        slots: int,
        workspace: PrefillWorkspace,
        workspace_bytes: int,
        kernel: DecodeAttention,
        prefill_chunk: int,
        readers: int,
        read_timeout_s: float,
        parts: MemoryParts,
        owns_store: bool = False,
        compiled: bool = False,
        host_slots: int = 0,
        wipe: bool = False,
        cost_gate: CostGateConfig | None = None,
        policy: SelectionPolicy | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.context = context
        self.layout = layout
        self.rules = tuple(rules)
        self.kernel = kernel
        self.attention = PagedAttention(kernel, workspace)
        self._workspace_bytes = workspace_bytes
        self.prefill_chunk = prefill_chunk
        self.budget = budget
        self.device = model.device
        self.max_positions: int | None = getattr(model.config, "max_position_embeddings", None)
        self._readers = readers
        self._read_timeout_s = read_timeout_s
        self._parts = parts
        self.clock = parts.clock
        self.loop: StepLoop = parts.loop or PlainLoop()
        self._owns_store = owns_store
        self._closed = False
        self._final: Ledger | None = None
        self._requests: list[Request] = []
        self._latest: Request | None = None
        self._active: Request | None = None
        self.wrapping = Wrapping(self, compiled)
        self._backing = parts.device_backing(layout.segment_bytes, slots, self.device)
        self.arena = MemoryArena(layout.segment_bytes, self._backing, wipe=wipe)
        host = host_arena(layout.segment_bytes, host_slots, wipe=wipe, backing=parts.host_backing)
        self.selections = Selections(self, lambda: self._backing.whole, self._backing.stride)
        self.policy = None if policy is None else self.selections.require(policy)
        self.directory = Directory(self.arena, context.abi.layers, host, dropped=store.in_use.release)
        self.host = open_host_cache(self.directory)
        self.log = LedgerBook(self.directory, layout, budget, self._backing.stride, workspace_bytes)
        lower = store.tier.capability
        self.tiers = capabilities(self.device, lower)
        self.publisher: Publisher | None = None
        if legal_path(DEVICE, lower.tier, self.tiers) is not None:
            publish = (self.clock, store.in_use, store.rates, read_timeout_s, parts.publish_credits)
            self.publisher = Publisher(self.directory, store.tier, layout, *publish)
        self._promoter: Promoter | None = None
        self.gating: Gating | None = None
        if cost_gate is not None:
            self.gating = Gating(store.rates, self.log.prefills, layout, context.abi.layers, lower.tier, cost_gate)

    def __enter__(self) -> Memory:
        if self._closed:
            raise StateError(Reason.CLOSED, "the memory was closed", "call attach again")
        try:
            self.wrapping.enter()
        except StateError:
            if not self.wrapping.attached:
                self._discard()
            raise
        self._promoter = Promoter(
            self.directory,
            self.store.tier,
            self.layout,
            self._readers,
            self.clock,
            self._read_timeout_s,
            host=self.host,
            rates=self.store.rates,
            credits=self._parts.credits,
            deliver=self._parts.deliver,
        )
        if self.publisher is not None:
            self.publisher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach: end the threads after what they are doing, free the arena, leave the model as it was."""
        if not self.wrapping.attached:
            return
        self._final = self.ledger()
        self.wrapping.leave()
        self.selections.close()
        try:
            for request in list(self._requests):
                request.close()
            if self.publisher is not None:
                self.publisher.stop()
        finally:
            if self._promoter is not None:
                self._promoter.close()
            self._discard()

    def _discard(self) -> None:
        self._closed = True
        for arena in filter(None, (self.arena, self.directory.host)):
            arena.close()
        if self._owns_store:
            self.store.close()

    def request(self, *, mode: str | None = None, shadow: LiveShadow | None = None, **choice: Any) -> Request:
        """A new, empty request. Several may be open; they share the budget.

        mode: "exact", or "approximate" with what `attach` was told and `choice` changes of it: fields of
        `SelectionPolicy`, e.g. `budget=Rows(256)`. shadow: holds sampled answers against dense ones.
        """
        promoter = self._attached()
        if not isinstance(shadow, LiveShadow | None):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"shadow={shadow!r} is no LiveShadow", "pass LiveShadow(every=16), or None"
            )
        policy = make_policy(self.policy, mode, choice)
        row = self.new_row(policy, shadow)
        plan = (LayerAhead if policy is None else OnDemand)(
            [row.history],
            self.layout,
            self._backing.segment,
            promoter,
            self.publisher,
            self.budget_of,
            clock=self.clock,
            windows=[rule.window for rule in self.rules],
            host=self.host,
        )
        request = Request(self, row, plan, policy)
        self._requests.append(request)
        self._latest = request
        return request

    def new_row(self, policy: SelectionPolicy | None = None, shadow: LiveShadow | None = None) -> Row:
        """An empty sequence in this memory."""
        return self.selections.row(History(self.directory, self.context), policy, shadow)

    def note_hidden(self, layer: int, hidden: Any) -> None:
        """The residual stream that enters `layer` of the model, for the request whose step it is."""
        if self._active is not None:
            self._active.note_hidden(layer, hidden)

    def generate_kwargs(self, request: Request | None = None) -> dict[str, Any]:
        """Keyword arguments for `model.generate`: those of `request`, or of a new request that becomes `latest`."""
        return (request or self.request()).generate_kwargs()

    @property
    def latest(self) -> Request:
        """The request made last. Errors: `StateError` when there is none."""
        if self._latest is None:
            raise StateError(Reason.NOT_COMMITTED, "no request has been made", "call request() first")
        return self._latest

    def forget(self, request: Request) -> None:
        """A request is closed: keep its account, and nothing else of it."""
        if request in self._requests:
            self._requests.remove(request)
            self.log.closed(request.plan.staged_peak, request.recomputes)
        if self._active is request:
            self._active = None

    def prefill(
        self,
        token_ids: Sequence[int],
        request: Request | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Request:
        """Compute all but the last of `token_ids` in slices; `generate` then computes the last and goes on.

        request: one to continue; its rows must be a prefix of `token_ids`. progress: called with (tokens done, tokens
        in all) after every slice. Refuses a budget that the finished prompt would not fit before anything is computed.
        """
        inner = self._inner()
        request = self.require_own(request or self.request())
        ids = prompt_ids(token_ids, request.max_positions)
        if request.token_ids != ids[: request.frontier]:
            raise ConfigurationError(
                Reason.TOKENS_DIFFER, "the request's rows belong to other tokens than the prompt's"
            )
        self.require_fits(len(ids))
        total = len(ids) - 1
        for _, stop in slices(self.prefill_chunk, request.frontier, max(0, total - request.frontier)):
            request.replay(inner, ids[request.frontier : stop])
            if progress is not None:
                progress(stop, total)
        return request

    def require_fits(self, tokens: int) -> None:
        """Errors: `BudgetError`, with the budget that would do, when a history of `tokens` tokens does not fit."""
        self.log.require_fits(tokens, self.prefill_chunk, self.budget_of, [rule.window for rule in self.rules])

    def save(self, name: str, request: Request | None = None, *, row: int | None = None) -> SaveReceipt:
        """Store a request's committed rows under `name` as a new immutable snapshot. Blocks until they are written.

        row: which of its sequences, where it has several. Rows of beams are not committed: of those, what was there
        before the search is saved.
        Errors: `StoreError` when the store is full or read-only, `SessionError` for a name that is not legal.
        """
        return save_request(self, self._inner(), self.require_own(request or self.latest), name, row)

    def restore(
        self, name: str, token_ids: Sequence[int] | None = None, *, sequence: int | None = None, **choice: Any
    ) -> tuple[Request, RestoreReceipt]:
        """A new request with the rows of a saved session, and what came back.

        token_ids: the prompt that will be continued; rows are restored as far as it agrees with the snapshot, and its
        last token is always left to compute. Without it, all rows of the snapshot. Headers are verified now, rows when
        they are read; what cannot be used is recomputed and named in the receipt. choice: as for `request`; rows that
        were computed over a part of the history come back only to a request of the same policy.
        Errors: `SessionError` when there is no such session or its manifest is damaged.
        """
        self._attached()
        return restore_request(self, name, token_ids, sequence, choice)

    def ledger(self) -> Ledger:
        """Every byte and second so far, over all open requests; after the block, as it stood when the block ended."""
        if self._final is not None:
            return self._final
        totals = None if self.publisher is None else self.publisher.totals
        histories = [row.history for request in self._requests for row in request.rows]
        staged = max((0, *(request.plan.staged_peak for request in self._requests)))
        recomputes = tuple(item for request in self._requests for item in request.recomputes)
        return self.log.ledger(histories, staged, totals, recomputes)

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside the block, calls may bring a cache of Transformers' own; outside it they are refused."""
        self._attached()
        with self.wrapping.stock():
            yield

    def activate(self, request: Request, rows: Sequence[int]) -> None:
        """Give `request` the memory it needs for a step of `rows` rows of each of its sequences.

        Takes it from other requests if it must.
        """
        self.store.in_use.renew()
        if self._active is not request:
            request.plan.dirty = True
            self._active = request
        try:
            request.begin_step(rows)
        except BudgetError:
            if not self.take_memory(request):
                raise
            request.begin_step(rows)

    def reclaim(self) -> None:
        """After an interruption: take back slots that were reserved and never noted. Blocks for reads under way."""
        wanted = [batch for request in self._requests for batch in request.plan.batches]
        known = self._attached().reclaim(wanted)
        known.update(g for request in self._requests for row in request.rows for g in row.history.grants)
        self.directory.reclaim(known)
        if self.publisher is not None:
            self.publisher.reclaim()
        if self.host is not None:
            self.host.reclaim()

    def publish(self, record: ChunkRecord) -> None:
        """Queue a sealed chunk for the file tier, unless it is cheaper to compute again."""
        if self.publisher is None or record.file is FileReplicaState.PUBLISHED:
            return
        if self.gating is None or self.gating.admits(record):
            self.publisher.submit(record)

    def revoke(self, record: ChunkRecord) -> None:
        """Take a chunk's damaged file replica out of use."""
        promoter = self._attached()
        promoter.files.forget(record.digest)
        self.store.tier.revoke(record.digest)
        if record.file is FileReplicaState.PUBLISHED:
            self.directory.mark(record, FileReplicaState.REVOKED)
            self.directory.end_lease(record)

    @property
    def compilation(self) -> Compilation:
        """What became of `compile=True`, so far."""
        compiler = self.wrapping.compiler
        return Compilation() if compiler is None else compiler.report

    def finish(self, done: Sequence[bool]) -> None:
        """Note which sequences of the request that ran last `generate` has finished."""
        if self._active is not None:
            self._active.finish(done)

    def end_generation(self) -> None:
        """A call of `generate` is over: no sequence is finished any more."""
        for request in self._requests:
            for row in request.rows:
                row.finished = False

    @contextlib.contextmanager
    def keeping_latest(self) -> Iterator[None]:
        """A block that fails leaves `latest` as it was."""
        latest = self._latest
        try:
            yield
        except BaseException:
            self._latest = latest
            raise

    def take_memory(self, request: Request | None) -> bool:
        """Let all requests but `request` give up what they can; whether there are any."""
        others = [other for other in self._requests if other is not request]
        for other in others:
            other.plan.yield_memory()
        return bool(others)

    def require_own(self, request: Request, model: Any = None) -> Request:
        """`request`, if it is open and of this memory and model. Errors: `StateError`."""
        if request.memory is not self or (model is not None and model is not self.model):
            raise StateError(
                Reason.OPERATION_UNSUPPORTED,
                "the request belongs to another memory, or to another model than this one",
                "pass a request of the memory that the model is attached to",
            )
        request.require_open()
        return request

    def budget_of(self, slots: int) -> int:
        """Bytes of a budget that holds `slots` segments and the workspace."""
        return slots * self._backing.stride + self._workspace_bytes

    def _attached(self) -> Promoter:
        self._inner()
        assert self._promoter is not None
        return self._promoter

    def _inner(self) -> Callable[..., Any]:
        original = self.wrapping.original
        if original is None:
            raise StateError(Reason.CLOSED, "the memory is not attached", "use it inside its `with` block")
        return original
