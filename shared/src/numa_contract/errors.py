# SPDX-License-Identifier: Apache-2.0
"""The ways in which something that came from outside can be unreadable."""

from typing import Final

SHOWN_CHARACTERS: Final = 80
"""How much of a foreign text is shown to people."""
_ANSWER_BYTES: Final = 1024
_SHOWN_BITS: Final = 64


def shown(text: object, most: int = SHOWN_CHARACTERS) -> str:
    """Returns a foreign text as errors, logs, Events and reports may show it: one line, quoted, cut.

    Whoever writes it (a pod's author, a claim, a file name) cannot forge a line of a log or fill an Event with it.
    """
    whole = text if isinstance(text, str) else str(text)
    quoted = repr(whole[:most])
    return quoted if len(whole) <= most else f"{quoted}... ({len(whole)} characters)"


def described(value: object) -> str:
    """Returns a value of a YAML or JSON document with its type, for a message: ``the boolean false``.

    The type matters where it is not visible in the document: YAML 1.1 reads ``off`` as a boolean and 010 as 8.
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
    """Returns a foreign text for a terminal, whole and in one line: what does not print is spelled out.

    Those are control characters, lone surrogates, and what changes the direction of writing.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def cut_answer(text: str) -> str:
    """Returns an answer to kubelet or runtime in at most 1 KiB of UTF-8; a lone surrogate is written as an escape."""
    if len(text) <= _ANSWER_BYTES and text.isascii():
        return str(text)
    data = text.encode(errors="backslashreplace")
    if len(data) <= _ANSWER_BYTES:
        return data.decode()
    return data[: _ANSWER_BYTES - 3].decode(errors="ignore") + "..."


class ContractError(ValueError):
    """A document of the other container or of the operator cannot be used."""


class MalformedError(ContractError):
    """A text does not have the form it must have."""

    def __init__(self, kind: str, text: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{kind} {shown(text)}: {reason}")


class UnsupportedVersionError(ContractError):
    """A document is of a format version that this release cannot read."""
