"""Which rows matter: one interface, one file for each published method. `kvstrata.methods.registry` lists them by name.

Names arrive on first use, so that asking for one method imports no other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.methods.calibrating import CalibrationSample, calibrate
    from kvstrata.methods.calibration import Calibration
    from kvstrata.methods.exact_top_k import ExactTopK
    from kvstrata.methods.infinigen import InfiniGen, InfiniGenFromKeys
    from kvstrata.methods.infllm import InfLLM
    from kvstrata.methods.infllm_from_keys import InfLLMFromKeys
    from kvstrata.methods.interface import Geometry, Index, Method, MethodContext, StepRows
    from kvstrata.methods.magicpig import MagicPIG
    from kvstrata.methods.quest import Quest
    from kvstrata.methods.random_rows import RandomRows
    from kvstrata.methods.registry import method_names, parse_method
    from kvstrata.methods.selection import Selection
    from kvstrata.methods.streaming import Streaming

__all__ = [
    "Calibration",
    "CalibrationSample",
    "ExactTopK",
    "Geometry",
    "Index",
    "InfLLM",
    "InfLLMFromKeys",
    "InfiniGen",
    "InfiniGenFromKeys",
    "MagicPIG",
    "Method",
    "MethodContext",
    "Quest",
    "RandomRows",
    "Selection",
    "StepRows",
    "Streaming",
    "calibrate",
    "method_names",
    "parse_method",
]

_HOMES = {
    "Calibration": "calibration",
    "CalibrationSample": "calibrating",
    "ExactTopK": "exact_top_k",
    "Geometry": "interface",
    "Index": "interface",
    "InfLLM": "infllm",
    "InfLLMFromKeys": "infllm_from_keys",
    "InfiniGen": "infinigen",
    "InfiniGenFromKeys": "infinigen",
    "MagicPIG": "magicpig",
    "Method": "interface",
    "MethodContext": "interface",
    "Quest": "quest",
    "RandomRows": "random_rows",
    "Selection": "selection",
    "StepRows": "interface",
    "Streaming": "streaming",
    "calibrate": "calibrating",
    "method_names": "registry",
    "parse_method": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvstrata.methods.{_HOMES[name]}"), name)
