# SPDX-License-Identifier: Apache-2.0
"""Regular expressions for ``matches()``: a subset of RE2's syntax, matched in time linear in the text's length.

Claim authors write the patterns. Python's ``re`` follows other rules (``$`` also matches before a final newline,
``\\d`` matches digits of all scripts) and takes exponential time for some patterns. Therefore this module compiles a
pattern to a list of instructions, and all states of the automaton advance through the text together.
"""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from numa_tools.cel.tokens import CelUnsupportedError

MAX_INSTRUCTIONS: Final = 2_000
MAX_LENGTH: Final = 4_000
"""Maximum length of a pattern in characters. This also limits the length of character classes, which MAX_INSTRUCTIONS
does not: a class of any length is one instruction.
"""
_MAX_LEVELS: Final = 40
_MAX_REPEATS: Final = 1_000
_MAX_CHARACTER: Final = 0x10FFFF
_REPEAT = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}", re.ASCII)
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)", re.ASCII)
_DIGITS: Final = [(48, 57)]
_WORD: Final = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Final = [(9, 10), (12, 13), (32, 32)]
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_POSIX: Final = {
    "alnum": [(48, 57), (65, 90), (97, 122)],
    "alpha": [(65, 90), (97, 122)],
    "digit": _DIGITS,
    "lower": [(97, 122)],
    "upper": [(65, 90)],
    "space": [(9, 13), (32, 32)],
    "word": _WORD,
    "xdigit": [(48, 57), (65, 70), (97, 102)],
    "punct": [(33, 47), (58, 64), (91, 96), (123, 126)],
}
_CONTROLS: Final = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
_FOLDED: Final = {"\u212a": "k", "\u017f": "s"}
"""Non-ASCII characters that RE2 treats as equal to an ASCII letter when case is ignored."""

Ranges = list[tuple[int, int]]
Tree = tuple[Any, ...]


def _complement(ranges: Ranges) -> Ranges:
    found, low = [], 0
    for first, last in sorted(ranges):
        if first > low:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return [*found, (low, _MAX_CHARACTER)] if low <= _MAX_CHARACTER else found


def _merged(ranges: Ranges) -> Ranges:
    """Sorts the ranges and merges ranges that overlap or adjoin."""
    return _complement(_complement(ranges))


def _contains(ranges: Ranges, character: int) -> bool:
    """Returns True if one of the sorted ranges contains the character."""
    position = bisect_right(ranges, (character, _MAX_CHARACTER))
    return position > 0 and character <= ranges[position - 1][1]


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: the instructions of a nondeterministic automaton."""

    instructions: tuple[tuple[Any, ...], ...]
    fold: bool

    def found_in(self, text: str) -> bool:
        """Returns True if the pattern matches anywhere in the text."""
        if self.fold:
            text = "".join(_FOLDED.get(each, each.lower() if each.isascii() else each) for each in text)
        states: set[int] = set()
        for position in range(len(text) + 1):
            states.add(0)
            states = self._closure(states, text, position)
            if any(self.instructions[state][0] == "end" for state in states):
                return True
            if position < len(text):
                states = self._step(states, ord(text[position]))
        return False

    def _closure(self, states: set[int], text: str, position: int) -> set[int]:
        """Returns the states reachable without consuming another character."""
        reached, waiting = set[int](), list(states)
        while waiting:
            state = waiting.pop()
            if state in reached:
                continue
            reached.add(state)
            kind, *operands = self.instructions[state]
            if kind == "split":
                waiting += operands
            elif kind == "assert" and _holds(operands[0], text, position):
                waiting.append(state + 1)
        return reached

    def _step(self, states: set[int], character: int) -> set[int]:
        return {
            state + 1
            for state in states
            if self.instructions[state][0] == "char" and _contains(self.instructions[state][1], character)
        }


def _holds(kind: str, text: str, position: int) -> bool:
    if kind in "^A":
        return position == 0
    if kind in "$z":
        return position == len(text)
    before, after = (
        0 <= index < len(text) and _contains(_WORD, ord(text[index])) for index in (position - 1, position)
    )
    return (before != after) == (kind == "b")


@lru_cache(64)
def compiled(pattern: str) -> Pattern | str:
    """Returns the compiled pattern, or the reason why it is invalid, too large or unsupported."""
    try:
        return _compile(pattern)
    except CelUnsupportedError as error:
        return f"matches(): {error}"


def _compile(pattern: str) -> Pattern:
    if len(pattern) > MAX_LENGTH:
        raise CelUnsupportedError("the pattern is too large")
    fold = pattern.startswith("(?i)")
    body = pattern[4:] if fold else pattern
    if fold and not body.isascii():
        raise CelUnsupportedError("(?i) is only supported for ASCII patterns")
    reader = _Reader(body, fold)
    tree = reader.alternatives()
    if reader.position < len(body):
        raise reader.syntax_error()
    if _size(tree) > MAX_INSTRUCTIONS:
        raise CelUnsupportedError("the pattern is too large")
    instructions: list[tuple[Any, ...]] = []
    _emit(tree, instructions)
    instructions.append(("end",))
    return Pattern(tuple(instructions), fold)


class _Reader:
    """Recursive-descent parser for a pattern, with limited depth."""

    def __init__(self, pattern: str, fold: bool) -> None:
        self._pattern, self._fold = pattern, fold
        self.position = self._level = 0

    def syntax_error(self) -> CelUnsupportedError:
        """Returns an error that quotes the pattern from the current position."""
        return CelUnsupportedError(f"the pattern cannot be parsed at {self._pattern[self.position :][:20]!r}")

    def _take(self, text: str) -> bool:
        taken = self._pattern.startswith(text, self.position)
        self.position += len(text) * taken
        return taken

    def _next(self) -> str:
        if self.position == len(self._pattern):
            raise self.syntax_error()
        self.position += 1
        return self._pattern[self.position - 1]

    def alternatives(self) -> Tree:
        """Parses an alternation up to the end of the pattern or the closing parenthesis."""
        self._level += 1
        if self._level > _MAX_LEVELS:
            raise CelUnsupportedError("the pattern is nested too deeply")
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        self._level -= 1
        return ("any", found) if len(found) > 1 else found[0]

    def _sequence(self) -> Tree:
        found = []
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)":
            found.append(self._repeated(self._atom()))
        return ("all", found)

    def _repeated(self, atom: Tree) -> Tree:
        bounds = self._bounds()
        if bounds is None:
            return atom
        self._take("?")  # whether a repetition is lazy or greedy makes no difference to whether a string matches
        if self._bounds() is not None:
            raise CelUnsupportedError("the pattern repeats a repetition")
        low, high = bounds
        if max(low, high or 0) > _MAX_REPEATS or (high is not None and high < low):
            raise CelUnsupportedError("the pattern's repetition count is not supported")
        return ("repeat", atom, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        match = _REPEAT.match(self._pattern, self.position)
        if match is None:
            return None
        self.position = match.end()
        low = int(match[1])
        return low, (low if match[2] is None else int(match[3]) if match[3] else None)

    def _atom(self) -> Tree:
        if self._take("("):
            match = _GROUP.match(self._pattern, self.position)
            if match is None and self._take("?"):
                raise self.syntax_error()
            self.position = match.end() if match else self.position
            tree = self.alternatives()
            if not self._take(")"):
                raise self.syntax_error()
            return tree
        if self._take("["):
            return ("char", self._class())
        if self._take("\\"):
            return self._escaped()
        character = self._next()
        if character in "*+?":
            self.position -= 1
            raise self.syntax_error()
        if character == ".":
            return ("char", _complement([(10, 10)]))
        if character in "^$":
            return ("assert", character)
        return self._char([(ord(character), ord(character))])

    def _escaped(self) -> Tree:
        if self._pattern[self.position : self.position + 1] in ("b", "B", "A", "z"):
            return ("assert", self._next())
        return self._char(self._escape())

    def _escape(self) -> Ranges:
        """Parses an escape sequence after its backslash and returns the characters that it matches."""
        letter = self._next()
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else _complement(ranges)
        if letter == "x" and re.fullmatch("[0-9a-fA-F]{2}", self._pattern[self.position : self.position + 2]):
            code = int(self._next() + self._next(), 16)
        elif letter in _CONTROLS:
            code = _CONTROLS[letter]
        elif letter.isascii() and not letter.isalnum():
            code = ord(letter)
        else:
            self.position -= 2
            raise self.syntax_error()
        return [(code, code)]

    def _class(self) -> Ranges:
        negated, found = self._take("^"), Ranges()
        first = True
        while first or not self._take("]"):
            first = False
            ranges = self._class_item()
            single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
            if (
                self._pattern[self.position : self.position + 1] == "-"
                and self._pattern[self.position + 1 : self.position + 2] != "]"
            ):
                self.position += 1
                last = self._class_item()
                if not single or len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < ranges[0][0]:
                    raise self.syntax_error()
                ranges = [(ranges[0][0], last[0][0])]
            found += ranges
        if self._fold:
            found = self._folded(found)
        return _complement(found) if negated else _merged(found)

    def _class_item(self) -> Ranges:
        if self._take("[:"):
            name, end, _ = self._pattern[self.position :].partition(":]")
            if not end or name not in _POSIX:
                raise self.syntax_error()
            self.position += len(name) + len(end)
            return _POSIX[name]
        if self._take("\\"):
            return self._escape()
        character = self._next()
        return [(ord(character), ord(character))]

    def _char(self, ranges: Ranges) -> Tree:
        return ("char", _merged(self._folded(ranges) if self._fold else ranges))

    def _folded(self, ranges: Ranges) -> Ranges:
        """Adds the lower-case counterparts of upper-case letters, because the text is folded to lower case."""
        lower = [(max(low, 65) + 32, min(high, 90) + 32) for low, high in ranges if low <= 90 and high >= 65]
        return [*ranges, *lower]


def _size(tree: Tree) -> int:
    """Returns an upper bound (at least 1) on both the number of instructions that a tree compiles to and the number of
    steps required to emit them.
    """
    kind, *operands = tree
    size = 1
    if kind in ("all", "any"):
        size = max(1, sum(_size(part) + 2 * (kind == "any") for part in operands[0]))
    elif kind == "repeat":
        part, low, high = operands
        inner = _size(part)
        size = low * inner + (inner + 2 if high is None else (high - low) * (inner + 1) + 1)
    return size


def _emit(tree: Tree, instructions: list[tuple[Any, ...]]) -> None:
    kind, *operands = tree
    _EMITTERS[kind](instructions, *operands)


def _emit_all(instructions: list[tuple[Any, ...]], parts: list[Tree]) -> None:
    for part in parts:
        _emit(part, instructions)


def _emit_any(instructions: list[tuple[Any, ...]], parts: list[Tree]) -> None:
    ends = []
    for part in parts[:-1]:
        start = len(instructions)
        instructions.append(())
        _emit(part, instructions)
        ends.append(len(instructions))
        instructions.append(())
        instructions[start] = ("split", start + 1, len(instructions))
    _emit(parts[-1], instructions)
    for end in ends:
        instructions[end] = ("split", len(instructions))


def _emit_repeat(instructions: list[tuple[Any, ...]], part: Tree, low: int, high: int | None) -> None:
    for _ in range(low):
        _emit(part, instructions)
    if high is None:
        start = len(instructions)
        instructions.append(())
        _emit(part, instructions)
        instructions.append(("split", start))
        instructions[start] = ("split", start + 1, len(instructions))
        return
    starts = []
    for _ in range(high - low):
        starts.append(len(instructions))
        instructions.append(())
        _emit(part, instructions)
    for start in starts:
        instructions[start] = ("split", start + 1, len(instructions))


_EMITTERS: Final[dict[str, Callable[..., None]]] = {
    "all": _emit_all,
    "any": _emit_any,
    "repeat": _emit_repeat,
    "char": lambda instructions, ranges: instructions.append(("char", ranges)),
    "assert": lambda instructions, kind: instructions.append(("assert", kind)),
}
