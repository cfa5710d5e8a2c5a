"""Transformers draws a bar for every load; here the caller decides what is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["without_progress_bars"]


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch the bars off and, on the way out, back to what they were; the switch is one for the whole process."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
