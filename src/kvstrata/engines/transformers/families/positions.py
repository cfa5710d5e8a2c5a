"""From a configuration to its `PositionRule`: rotary settings, windows, sinks and the scale of the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstrata.contract.identity import PositionRule

if TYPE_CHECKING:
    from kvstrata.engines.transformers.families.base import Family

__all__ = ["SERVED_ROPE_TYPES", "position_rule", "rope_settings"]

SERVED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rules under which a row depends on its own position alone, and never on how long the history has become."""

_PRIMARY = "full_attention"


def rope_settings(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary settings by layer type, or under the empty string where one rule holds for all layers."""
    settings = dict(config.rope_parameters or {})
    if any(isinstance(value, dict) for value in settings.values()):
        return {name: dict(value) for name, value in settings.items() if value is not None}
    return {"": settings}


def position_rule(family: Family) -> PositionRule:
    """The rule of `family`. Type and base are those of global layers; all else stands in sorted parameters.

    Parameters that say nothing new (no window, no sinks, the usual scale) are left out.
    """
    config = family.config
    by_type = rope_settings(config)
    primary = _PRIMARY if _PRIMARY in by_type else next(iter(by_type))
    parameters: dict[str, str] = {}
    for kind, settings in by_type.items():
        prefix = f"{kind}." if kind else ""
        for name, value in settings.items():
            if kind != primary or name not in ("rope_type", "rope_theta"):
                parameters[prefix + name] = repr(value)
        if settings["rope_type"] == "yarn":
            parameters[f"{prefix}attention_scaling"] = f"{_attention_scaling(config, kind):.9g}"
            if settings.get("factor") is None:
                parameters[f"{prefix}max_position_embeddings"] = repr(config.max_position_embeddings)
    rules = family.layer_rules
    if any(rule.window is not None for rule in rules):
        parameters["windows"] = ",".join("-" if rule.window is None else str(rule.window) for rule in rules)
    if any(rule.sinks for rule in rules):
        parameters["sinks"] = ",".join("+" if rule.sinks else "-" for rule in rules)
    if family.scale != float(family.head_dim**-0.5):
        parameters["scale"] = repr(family.scale)
    main = by_type[primary]
    return PositionRule(str(main["rope_type"]), float(main["rope_theta"]), tuple(sorted(parameters.items())))


def _attention_scaling(config: Any, kind: str) -> float:
    """Factor of cosines and sines, which is derived from several settings."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, None, layer_type=kind or None)
    return float(scaling)
