"""What only the live modules tell: code that was replaced, a mode or a place in which rows are not what they seem."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from kvstrata.engines.transformers.families.base import Family
from kvstrata.engines.transformers.families.refusal import Refusal

__all__ = ["live_refusals"]

_WEIGHT_ONLY = frozenset({"gptq", "awq", "hqq", "mxfp4"})
"""Quantisation that unpacks weights for each product and leaves activations alone."""


def live_refusals(model: Any, family: Family) -> Iterator[Refusal]:
    """Reasons found in the modules of `model`. Stops at the first module that is not the family's own."""
    replaced = _replaced(model, family)
    if replaced is not None:
        yield replaced
        return
    yield from _geometry(model, family)
    yield from _placement(model)
    yield from _quantisation(model, family.config)
    if model.training:
        yield Refusal(
            "training_mode", "the model is in training mode, in which dropout changes rows", "call model.eval() first"
        )
    yield from _frequencies(model, family)


def _replaced(model: Any, family: Family) -> Refusal | None:
    if not hasattr(getattr(family.decoder(model), "layers", None), "__iter__"):
        return Refusal("foreign_module", f"{type(model).__qualname__} has no decoder layers where {family.prefix} has")
    expected = [(family.decoder(model), family.decoder_suffix)]
    expected += [(layer, family.layer_suffix) for layer in family.layer_modules(model)]
    expected += [(getattr(layer, family.attention_name, None), "Attention") for layer in family.layer_modules(model)]
    expected += [(getattr(family.decoder(model), "rotary_emb", None), "RotaryEmbedding")]
    for module, suffix in expected:
        kind = type(module)
        wanted, found = f"{family.modeling}.{family.prefix}{suffix}", f"{kind.__module__}.{kind.__qualname__}"
        if found != wanted:
            return Refusal("foreign_module", f"a module is a {found}, expected {wanted}", _REPLACED)
        if hasattr(module, "_hf_hook"):
            return Refusal("offloaded", f"{kind.__qualname__} is moved between devices by a hook", _ONE_DEVICE)
        code = inspect.unwrap(kind.forward)
        if "forward" in vars(module) or getattr(code, "__module__", None) != family.modeling:
            return Refusal("foreign_module", f"the forward of {kind.__qualname__} was replaced", _REPLACED)
    return None


_REPLACED = "load the model with Transformers' own code: no patches, no trust_remote_code"
_ONE_DEVICE = "load it on one device"


def _geometry(model: Any, family: Family) -> Iterator[Refusal]:
    modules = family.attention_modules(model)
    if len(modules) != family.layers or [module.layer_idx for module in modules] != list(range(family.layers)):
        yield Refusal(
            "layers_disagree",
            f"the model has {len(modules)} layers that count {[module.layer_idx for module in modules]}, and "
            f"num_hidden_layers={family.layers}",
            "build the model from its configuration, with its layers in order",
        )
    if not all(module.is_causal for module in modules):
        yield Refusal(
            "bidirectional_attention", "an attention module has is_causal=False: rows change with later tokens"
        )


def _placement(model: Any) -> Iterator[Refusal]:
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    if len(devices) > 1:
        yield Refusal(
            "several_devices",
            f"the model is spread over {len(devices)} devices ({', '.join(devices)})",
            _ONE_DEVICE,
        )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if "disk" in places or "meta" in devices or ("cpu" in places and len(places) > 1):
        yield Refusal("offloaded", "the model's device map offloads weights", _ONE_DEVICE)


def _quantisation(model: Any, config: Any) -> Iterator[Refusal]:
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        values = settings if isinstance(settings, dict) else settings.to_dict()
        method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
        four_bit = method == "bitsandbytes" and bool(values.get("load_in_4bit"))
        if method not in _WEIGHT_ONLY and not four_bit:
            yield Refusal(
                "quantised_activations",
                f"quant_method={method!r} may round activations, so that a row depends on those computed beside it",
                f"use weight-only quantisation ({', '.join(sorted(_WEIGHT_ONLY))}, bitsandbytes 4-bit) or none",
            )
    for module in model.modules():
        if ".quantized" in type(module).__module__:
            yield Refusal(
                "quantised_activations",
                f"a module is a {type(module).__module__}.{type(module).__qualname__}, which rounds activations",
                "load the model without activation quantisation",
            )
            return


def _frequencies(model: Any, family: Family) -> Iterator[Refusal]:
    """The model turns by its buffers, its identity says what the configuration says: they must agree."""
    rotary = family.rotary(model)
    fresh = type(rotary)(family.config)
    ours, theirs = dict(rotary.named_buffers()), dict(fresh.named_buffers())
    agree = ours.keys() == theirs.keys() and all(
        ours[name].shape == theirs[name].shape
        and torch.allclose(
            ours[name].float().cpu(), theirs[name].float().cpu(), rtol=4 * torch.finfo(ours[name].dtype).eps, atol=0
        )
        for name in ours
    )
    scalings = [name for name in vars(fresh) if name.endswith(("attention_scaling", "rope_type"))]
    if not agree or any(getattr(rotary, name, None) != getattr(fresh, name) for name in scalings):
        yield Refusal(
            "frequencies_disagree",
            "the model's rotary frequencies are not those of its rope_parameters",
            "change rope_parameters before the model is built, not after",
        )
