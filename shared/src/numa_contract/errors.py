# SPDX-License-Identifier: Apache-2.0
"""Errors for invalid input from outside the process, and functions that quote such input safely."""

from typing import Final

SHOWN_CHARACTERS: Final = 80
"""Maximum length in characters of untrusted text in a message."""
_ANSWER_BYTES: Final = 1024
_SHOWN_BITS: Final = 64


def shown(text: object, limit: int = SHOWN_CHARACTERS) -> str:
    """Quotes an untrusted string for errors, logs, Events and reports: on one line and truncated.

    This way, the string's author (who may control a pod, a claim or a file name) can neither forge a log line nor fill
    an Event.
    """
    whole = text if isinstance(text, str) else str(text)
    quoted = repr(whole[:limit])
    return quoted if len(whole) <= limit else f"{quoted}... ({len(whole)} characters)"


def described(value: object) -> str:
    """Describes a value from a YAML or JSON document, with its type, for use in a message: ``the boolean false``.

    The type is included because the document may not show it: YAML 1.1 reads ``off`` as a boolean and 010 as 8.
    """
    match value:
        case None:
            return "null"
        case bool():
            words = "on, yes and y as true" if value else "off, no and n as false"
            return f"the boolean {str(value).lower()} (YAML reads {words})"
        case int():
            return f"the integer {value}" if value.bit_length() <= _SHOWN_BITS else "a very large integer"
        case float():
            return f"the number {value}"
        case str():
            return f"the text {shown(value)}"
        case dict():
            return "a map"
        case list() | tuple():
            return "a list"
    return f"a value of type {type(value).__name__}"


def printable(text: object) -> str:
    """Formats an untrusted string for a terminal, untruncated and on one line, with unprintable characters escaped.

    Control characters, lone surrogates, and characters that change the writing direction count as unprintable.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def cut_answer(text: str) -> str:
    """Truncates an answer to the kubelet or the runtime to 1 KiB of UTF-8 and escapes lone surrogates."""
    if len(text) <= _ANSWER_BYTES and text.isascii():
        return str(text)
    data = text.encode(errors="backslashreplace")
    if len(data) <= _ANSWER_BYTES:
        return data.decode()
    return data[: _ANSWER_BYTES - 3].decode(errors="ignore") + "..."


class ContractError(ValueError):
    """A document from the driver's other container or from the operator is unusable."""


class MalformedError(ContractError):
    """A string does not have the required form."""

    def __init__(self, kind: str, text: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{kind} {shown(text)}: {reason}")


class UnsupportedVersionError(ContractError):
    """A document has a format version that this release cannot read."""
