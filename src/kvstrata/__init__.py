"""kvstrata keeps a language model's attention history in layers of memory and says what every answer cost.

import kvstrata

loaded = kvstrata.load_model("smollm2")
with kvstrata.attach(loaded, "kv-store", budget="64MiB") as memory:
    loaded.model.generate(ids, **memory.generate_kwargs())
    memory.save("session")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.contract.budget import EstimatedMass, Fraction, Persistent, Rows, Threshold
    from kvstrata.engines.transformers import CompilationWarning, LoadedModel, Memory, Request, attach, load_model
    from kvstrata.errors import BudgetError, KvstrataError, Reason, SessionError, StoreError, UnsupportedError
    from kvstrata.store import Store

__all__ = [
    "BudgetError",
    "CompilationWarning",
    "EstimatedMass",
    "Fraction",
    "KvstrataError",
    "LoadedModel",
    "Memory",
    "Persistent",
    "Reason",
    "Request",
    "Rows",
    "SessionError",
    "Store",
    "StoreError",
    "Threshold",
    "UnsupportedError",
    "__version__",
    "attach",
    "load_model",
]

__version__ = "0.1.0"

_HOMES = {
    "BudgetError": "kvstrata.errors",
    "KvstrataError": "kvstrata.errors",
    "Reason": "kvstrata.errors",
    "SessionError": "kvstrata.errors",
    "StoreError": "kvstrata.errors",
    "UnsupportedError": "kvstrata.errors",
    "Store": "kvstrata.store",
    "EstimatedMass": "kvstrata.contract.budget",
    "Fraction": "kvstrata.contract.budget",
    "Persistent": "kvstrata.contract.budget",
    "Rows": "kvstrata.contract.budget",
    "Threshold": "kvstrata.contract.budget",
    "CompilationWarning": "kvstrata.engines.transformers",
    "LoadedModel": "kvstrata.engines.transformers",
    "Memory": "kvstrata.engines.transformers",
    "Request": "kvstrata.engines.transformers",
    "attach": "kvstrata.engines.transformers",
    "load_model": "kvstrata.engines.transformers",
}


def __getattr__(name: str) -> Any:
    # Names arrive on first use, so that the store and the command line start without PyTorch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
