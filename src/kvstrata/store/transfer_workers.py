"""Threads that drive a transfer queue. A device's copy engine or a simulator drives the same queue without them."""

from __future__ import annotations

import threading
import time

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.store.transfers import TransferQueue

__all__ = ["TransferWorkers"]


class TransferWorkers:
    """`threads` threads that call `run_one` until `stop`. Owner calls `stop`; also usable as a context.

    A worker whose copier hangs stays behind as a daemon thread: no process waits for a dead disk in order to end.
    """

    def __init__(self, queue: TransferQueue, threads: int = 1) -> None:
        if threads < 1:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"threads={threads} must be at least 1")
        self._queue = queue
        self._stopping = False
        name = f"kvstrata-{queue.direction}"
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        self._queue.workers += len(self._threads)
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads after the copies under way; whether all have ended within `timeout_s`, which they share.
        Blocks. Idempotent."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._queue.lock:
            self._stopping = True
            self._queue.changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> TransferWorkers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        queue = self._queue
        try:
            while True:
                with queue.lock:
                    while not queue.runnable and not self._stopping:
                        queue.changed.wait()
                    if self._stopping:
                        return
                try:
                    queue.run_one()
                except Exception:  # noqa: BLE001, S112 - whoever waits for the transfer is given it
                    continue
        finally:
            with queue.lock:
                queue.workers -= 1
                queue.changed.notify_all()
