"""One canonical byte string for typed values, and the digest over it.

Two values get the same bytes only if they have the same type and content: every value carries a tag and a length, so
neither concatenation nor a change of type (`1`, `True`, `"1"`) can collide. The form does not depend on machine,
process, hash seed or dictionary order.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence

from blake3 import blake3

from kvstrata.errors import ConfigurationError, Reason

__all__ = ["canonical", "digest"]


def canonical(value: object) -> bytes:
    """Encode `None`, bool, int, float, str, bytes, sequences, string-keyed mappings and dataclasses of these.

    Errors: `ConfigurationError` for any other type.
    """
    match value:
        case None:
            return _tagged(b"N", b"")
        case bool():
            return _tagged(b"B", b"\x01" if value else b"\x00")
        case int():
            return _tagged(b"I", str(int(value)).encode())
        case float():
            return _tagged(b"F", struct.pack(">d", value))
        case str():
            return _tagged(b"S", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _tagged(b"Y", value)
        case Mapping():
            if not all(isinstance(key, str) for key in value):
                raise ConfigurationError(Reason.INVALID_ARGUMENT, "only string keys have a canonical form")
            return _tagged(b"M", b"".join(canonical(key) + canonical(value[key]) for key in sorted(value)))
        case Sequence():
            return _tagged(b"L", b"".join(canonical(item) for item in value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
            body = canonical(type(value).__name__) + b"".join(canonical(k) + canonical(v) for k, v in fields)
            return _tagged(b"D", body)
        case _:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"{type(value).__name__} has no canonical form: {value!r}"
            )


def digest(domain: str, value: object) -> bytes:
    """32-byte BLAKE3 digest of `value` inside `domain`, e.g. `"chunk/1"`; domains never collide with each other."""
    return blake3(canonical(value), derive_key_context=f"kvstrata {domain}").digest()


def _tagged(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(8, "big") + body
