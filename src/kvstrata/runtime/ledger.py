"""The running account of one attached model: every byte and second, from what the parts report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.contract.layout import SegmentLayout
from kvstrata.contract.receipts import Ledger, Recompute, RestoreReceipt, SaveReceipt, StepReceipt, TierTraffic
from kvstrata.contract.states import FileReplicaState
from kvstrata.cost.residency import required_slots
from kvstrata.errors import BudgetError, Reason
from kvstrata.runtime.gating import PrefillTimes
from kvstrata.store.directory import Directory
from kvstrata.store.history import History
from kvstrata.store.publication import PublicationTotals

__all__ = ["LedgerBook"]


class LedgerBook:
    """Adds receipts up. Used by the thread that runs the model. prefills: what steps of many rows took."""

    def __init__(
        self, directory: Directory, layout: SegmentLayout, budget: int, slot_stride: int, workspace_bytes: int
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._budget = budget
        self._stride = slot_stride
        self._workspace = workspace_bytes
        self.prefills = PrefillTimes()
        self._resident_bytes = 0
        self._moved_bytes = 0
        self._host_bytes = 0
        self._stall_s = 0.0
        self._load_s = 0.0
        self._save_s = 0.0
        self._computed = 0
        self._lost = 0
        self._missed = 0
        self._metadata = 0
        self._restored = 0
        self._staged_peak = 0
        self._recomputes: tuple[Recompute, ...] = ()

    def step(self, receipt: StepReceipt) -> None:
        """Count one forward step."""
        self._computed += receipt.rows
        self._resident_bytes += receipt.resident_bytes
        self._moved_bytes += receipt.moved_bytes
        self._host_bytes += receipt.host_bytes
        self._stall_s += receipt.stall_s
        self._load_s += receipt.read_s

    def closed(self, staged_peak: int, recomputes: Sequence[Recompute]) -> None:
        """Keep the account of a request that is closed: slots that it had on their way at most, rows computed again."""
        self._staged_peak = max(self._staged_peak, staged_peak)
        self._recomputes += tuple(recomputes)

    def recomputed(self, tokens: int, restored: int) -> None:
        """Count rows whose stored bytes could not be used after all; `restored` of them had come from a session."""
        self._lost += tokens
        self._restored -= restored

    def saved(self, receipt: SaveReceipt) -> None:
        """Count the time of a save."""
        self._save_s += receipt.seconds

    def restored(self, receipt: RestoreReceipt) -> None:
        """Count rows that came back, rows that should have and did not, and the time it took."""
        if receipt.reason is not Reason.TOKENS_DIFFER:
            self._missed += receipt.wanted_tokens - receipt.restored_tokens
        self._metadata += receipt.metadata_bytes
        self._restored += receipt.restored_tokens
        self._load_s += receipt.seconds

    def require_fits(
        self, tokens: int, chunk: int, budget_for: Callable[[int], int], windows: Sequence[int | None] = (None,)
    ) -> None:
        """Refuse a prompt of `tokens` tokens that a step of up to `chunk` rows could not run at its end.

        windows: for each layer the tokens that a row sees, its own included; `None` for all.
        Errors: `BudgetError` with the budget that would do.
        """
        layers, size = self._directory.layers, self._layout.chunk_tokens
        sealed = (tokens - 1) // size
        tail = -(-min(tokens, chunk) // size) + 1
        widest = max(sealed * size + 1 if window is None else window for window in windows)
        most = -(-(widest - 1) // size)
        slots = max(
            required_slots(layers, min(most, sealed), 1),
            required_slots(layers, min(most, max(0, sealed - tail + 1)), tail),
        )
        if slots > self._directory.arena.slots:
            need = budget_for(slots)
            raise BudgetError(
                Reason.BUDGET_TOO_SMALL,
                f"a history of {tokens} tokens needs a memory budget of at least {need} bytes, not {self._budget}: "
                f"the open chunks in all {layers} layers, and the {min(most, sealed)} sealed segments of one layer",
                f"pass budget={need} or more, a smaller prefill_chunk, or a shorter prompt",
                required_bytes=need,
            )

    def ledger(
        self,
        histories: Sequence[History],
        staged_slots: int,
        publication: PublicationTotals | None,
        recomputes: tuple[Recompute, ...],
    ) -> Ledger:
        """The account as it stands. histories, staged_slots, recomputes: of the requests that are open."""
        directory, layout = self._directory, self._layout
        segment, layers, arena = layout.segment_bytes, directory.layers, directory.arena
        row = layers * layout.row_bytes
        logical = sum(history.frontier for history in histories) * row
        published = [record for record in directory if record.file is FileReplicaState.PUBLISHED]
        tail_slots = sum(len(history.tail) * layers for history in histories)
        tail_rows = sum(history.frontier - history.sealed for history in histories)
        host = directory.host
        copies = sum(
            max(0, sum(directory.valid_copies(record, layer) for layer in range(layers)) - layers)
            for record in directory
        )
        peak = arena.peak_slots * self._stride + self._workspace
        totals = publication or PublicationTotals()
        return Ledger(
            logical_bytes=logical,
            budget_bytes=self._budget,
            device_bytes=arena.used_slots * self._stride + self._workspace,
            peak_device_bytes=peak,
            host_bytes=0 if host is None else host.used_slots * host.slot_bytes,
            file_bytes=len(published) * layers * segment,
            staging_bytes=max(self._staged_peak, staged_slots) * self._stride,
            workspace_bytes=self._workspace,
            metadata_bytes=totals.metadata_bytes + self._metadata,
            fragmented_bytes=tail_slots * segment - tail_rows * row + arena.used_slots * (self._stride - segment),
            duplicate_bytes=copies * segment,
            peak_over_logical=peak / logical if logical else 0.0,
            traffic={
                "device": TierTraffic(self._resident_bytes + self._moved_bytes, 0, self._resident_bytes),
                "host": TierTraffic(self._moved_bytes if host is not None else 0, self._host_bytes, 0),
                "file": TierTraffic(self._moved_bytes - self._host_bytes, self._moved_bytes - self._host_bytes, 0),
                "file_writes": TierTraffic(
                    totals.written_bytes + totals.present_bytes, totals.written_bytes, totals.present_bytes
                ),
            },
            save_s=self._save_s + totals.service_s,
            load_s=self._load_s,
            exposed_stall_s=self._stall_s,
            publish_cpu_s=totals.cpu_s,
            publish_checksum_write_s=totals.checksum_s + totals.write_s,
            tokens_computed=self._computed,
            tokens_recomputed=self._lost + self._missed,
            tokens_restored=self._restored,
            recomputes=(*self._recomputes, *recomputes),
            publish_waited=totals.waited,
            publish_waited_s=totals.waited_s,
        )
