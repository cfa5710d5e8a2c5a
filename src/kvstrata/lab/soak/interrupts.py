"""An action that Ctrl-C ends before one of its lines."""

from __future__ import annotations

ACTIONS = {}
