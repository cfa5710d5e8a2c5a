"""The methods by name, and the way from text such as `quest:page_size=64` to a configuration.

Only classes are registered, by the place where they are defined: a method's file is imported when it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from enum import Enum
from typing import Any

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.interface import Method

__all__ = ["METHODS", "method_class", "method_names", "parse_method"]

METHODS: typing.Mapping[str, str] = types.MappingProxyType(
    {
        "exact_top_k": "kvstrata.methods.exact_top_k:ExactTopK",
        "infinigen": "kvstrata.methods.infinigen:InfiniGen",
        "infinigen_keys": "kvstrata.methods.infinigen:InfiniGenFromKeys",
        "infllm": "kvstrata.methods.infllm:InfLLM",
        "infllm_from_keys": "kvstrata.methods.infllm_from_keys:InfLLMFromKeys",
        "magicpig": "kvstrata.methods.magicpig:MagicPIG",
        "quest": "kvstrata.methods.quest:Quest",
        "random_rows": "kvstrata.methods.random_rows:RandomRows",
        "streaming": "kvstrata.methods.streaming:Streaming",
    }
)
"""Module and class of every method, by the name in its contract."""


def method_names() -> tuple[str, ...]:
    """Every name, in alphabetical order."""
    return tuple(sorted(METHODS))


def method_class(name: str) -> type[Method[Any]]:
    """The configuration class called `name`. Errors: `ConfigurationError` naming those there are."""
    if name not in METHODS:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"there is no method {name!r}", f"use one of {', '.join(method_names())}"
        )
    module, _, attribute = METHODS[name].partition(":")
    found: type[Method[Any]] = getattr(importlib.import_module(module), attribute)
    return found


def parse_method(text: str) -> Method[Any]:
    """The configuration that `name` or `name:field=value,field=value` describes.

    Values are whole numbers, numbers, `true` or `false`, names of an enum's members, `none` where a field may be
    without, and several joined by `+` where a field takes several. Errors: `ConfigurationError` for an unknown name or
    field, one that is given twice, or a value that is not of the field's kind or that the method refuses.
    """
    name, colon, assignments = text.partition(":")
    configuration = method_class(name.strip())
    hints = typing.get_type_hints(configuration)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(configuration) if field.init}
    values: dict[str, Any] = {}
    for assignment in assignments.split(",") if colon else ():
        field, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or field not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"{assignment.strip()!r} sets no field of the method {name.strip()!r}",
                f"write field=value; its fields: {known}",
            )
        if field in values:
            raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} of the method {name.strip()!r} is given twice")
        values[field] = _value(f"{configuration.__name__}.{field}", value, fields[field])
    return configuration(**values)


def _value(field: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if text.lower() == "none" and type(None) in kinds:
            return None
        kind = next(one for one in kinds if one is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(_value(field, part, typing.get_args(kind)[0]) for part in text.split("+")) if text else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _convert(field, text, kind, " or ".join(str(member.value) for member in kind))
    if kind is bool:
        return _convert(field, text.lower(), {"true": True, "false": False}.__getitem__, "true or false")
    if kind in (int, float, str):
        return _convert(field, text, kind, {int: "a whole number", float: "a number", str: "text"}[kind])
    raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} cannot be written as text; set it from Python")


def _convert(field: str, text: str, convert: typing.Callable[[str], Any], wanted: str) -> Any:
    try:
        return convert(text)
    except (ValueError, KeyError):
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {text!r}") from None
