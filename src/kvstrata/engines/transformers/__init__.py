"""The Transformers engine: loading models, the cache and the attention function that keep their history in layers."""

from __future__ import annotations

from kvstrata.engines.transformers.attach import attach, parse_bytes
from kvstrata.engines.transformers.compilation import Compilation, CompilationState, CompilationWarning
from kvstrata.engines.transformers.loading import LoadedModel, load_model
from kvstrata.engines.transformers.memory import Memory
from kvstrata.engines.transformers.request import Request

__all__ = [
    "Compilation",
    "CompilationState",
    "CompilationWarning",
    "LoadedModel",
    "Memory",
    "Request",
    "attach",
    "load_model",
    "parse_bytes",
]
