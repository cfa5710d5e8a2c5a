"""Which session names are legal, and why none of them can ever become a path."""

from __future__ import annotations

import unicodedata

from kvstrata.contract.encoding import digest
from kvstrata.errors import Reason, SessionError

__all__ = ["MAX_NAME_CHARACTERS", "check_name", "folder_name"]

MAX_NAME_CHARACTERS = 255
_NEXT_STEP = f"choose a name of 1 to {MAX_NAME_CHARACTERS} characters without control characters"


def check_name(name: str) -> str:
    """Return `name` unchanged when it is legal: 1 to 255 characters, no control characters, no lone surrogates.

    Slashes, dots, spaces and all scripts are legal. Names are compared as they are, without Unicode normalisation.
    Errors: `SessionError` with SESSION_NAME_INVALID.
    """
    if not isinstance(name, str):
        raise SessionError(
            Reason.SESSION_NAME_INVALID, f"a session name is text, not {type(name).__name__}", _NEXT_STEP
        )
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise SessionError(Reason.SESSION_NAME_INVALID, f"the session name has {len(name)} characters", _NEXT_STEP)
    for position, character in enumerate(name):
        if unicodedata.category(character) in {"Cc", "Cs"}:
            raise SessionError(
                Reason.SESSION_NAME_INVALID,
                f"the session name {name!a} has {character!a} at position {position}",
                _NEXT_STEP,
            )
    return name


def folder_name(tenant: str, name: str) -> str:
    """64 hexadecimal digits: the only part of a session's name and tenant that reaches the file system."""
    return digest("session-name/1", (tenant, check_name(name))).hex()
