# SPDX-License-Identifier: Apache-2.0
"""Parses systemd units and environment files to determine a service's arguments. This module does no I/O.

The rules are those of systemd.unit(5), systemd.service(5) and systemd.exec(5): an empty assignment resets a list,
the value of a word ``$NAME`` is split into words, ``${NAME}`` is replaced within a word, and an unset variable expands
to an empty string. Of the specifiers, only those that depend on the unit's name are replaced: the units of k3s and RKE2
need them, because they read ``/etc/default/%N``.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_PREFIXES: Final = "@-:+!"
_IN_WORD: Final = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)\}", re.ASCII)
_WORD: Final = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
_SPECIFIER: Final = re.compile(r"%(.?)", re.DOTALL)
_MAX_WORDS: Final = 4096


class UnitError(Exception):
    """Raised if the arguments of a unit's service cannot be determined. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Service:
    """The ``[Service]`` section of a unit with its drop-ins."""

    commands: tuple[str, ...]
    """Values of ``ExecStart``."""
    variables: tuple[str, ...]
    """Assignments from ``Environment``, each in the form ``NAME=value``."""
    files: tuple[str, ...]
    """Values of ``EnvironmentFile``. A leading ``-`` means that the file may be missing."""
    sets_environment: bool
    """True if variables may also come from PassEnvironment or ``systemctl set-environment``."""


def parse_service(texts: Sequence[str], unit: str) -> Service:
    """Parses a unit's fragment and drop-ins, given in systemd's order. Raises UnitError.

    ``unit`` is the unit's name with its suffix.
    """
    lists: dict[str, list[str]] = {"ExecStart": [], "Environment": [], "EnvironmentFile": []}
    sets_environment = False
    for text in texts:
        for key, value in _assignments(text):
            sets_environment = sets_environment or key == "PassEnvironment" or "set-environment" in value
            if key in lists:
                value = _specified(value, unit)
            if key == "EnvironmentFile" and "%" in value:
                raise UnitError(f"the value of a specifier in {value[:200]} is unknown")
            if key in lists and not value:
                lists[key].clear()
            elif key == "Environment":
                lists[key] += words(value)
            elif key in lists:
                lists[key].append(value)
    commands, variables, environment_files = (tuple(found) for found in lists.values())
    return Service(commands, variables, environment_files, sets_environment)


def _specified(value: str, unit: str) -> str:
    """Replaces the specifiers that depend on the unit's name and keeps all others."""
    name = unit.removesuffix(".service")
    known = {"%": "%", "n": unit, "N": name, "p": name}
    return _SPECIFIER.sub(lambda match: known.get(match[1], match[0]), value)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in _logical_lines(text, " "):
        if line.startswith("["):
            section = line
        elif section == "[Service]":
            key, _, value = line.partition("=")
            yield key.strip(), value.strip()


def _logical_lines(text: str, joint: str) -> Iterator[str]:
    """Yields lines without comments. A line that ends in a backslash is joined to the next with ``joint``."""
    joined: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith(("#", ";")) or (not line.strip() and not joined):
            continue
        joined.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield joint.join(joined).strip()
            joined = []
    if joined:
        yield joint.join(joined).strip()


def parse_environment(text: str) -> dict[str, str]:
    """Parses the variables in an environment file. Raises UnitError."""
    found: dict[str, str] = {}
    for line in _logical_lines(text, ""):
        name, equals, value = line.partition("=")
        value = value.strip()
        quote = value[:1]
        if quote and quote in "\"'":
            if len(value) < 2 or value[-1] != quote:
                raise UnitError(f"the value of {name.strip()[:80]} has an unclosed quote")
            value = value[1:-1].replace('\\"', '"') if quote == '"' else value[1:-1]
        if equals:
            found[name.strip().removeprefix("export ").strip()] = value
    return found


def words(text: str) -> list[str]:
    """Splits a line into words. Raises UnitError for an unclosed quote or too many words."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        found = list(lexer)
    except ValueError as error:
        raise UnitError(f"a line of the unit cannot be split into words ({error})") from error
    if len(found) > _MAX_WORDS:
        raise UnitError(f"a line of the unit has more than {_MAX_WORDS} words")
    return found


def arguments_of(service: Service, environment: Mapping[str, str], program: str) -> tuple[str, ...]:
    """Returns the arguments after the program's name in ``ExecStart``, with variables replaced.

    The command may start the program through a wrapper. If there are several commands, the last one is used. Raises
    UnitError if the command does not contain the program's name or uses a variable that may be set outside the files.
    """
    if not service.commands:
        raise UnitError("it has no ExecStart")
    command = service.commands[-1]
    options = command[: len(command) - len(command.lstrip(_PREFIXES))]
    split = words(command.lstrip(_PREFIXES))
    if ":" not in options:
        variables = {**_pairs(service.variables), **environment}
        split = list(_expanded(split, variables, may_be_elsewhere=service.sets_environment))
    for index, word in enumerate(split):
        if word.rpartition("/")[2] == program:
            start = index + 1 + ("@" in options)
            return tuple(split[start:])
    raise UnitError(f"its ExecStart runs {split[0][:200] if split else 'nothing'}, not {program} directly")


def _pairs(variables: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (one.partition("=") for one in variables)}


def _expanded(split: Sequence[str], variables: Mapping[str, str], *, may_be_elsewhere: bool) -> Iterator[str]:
    def value(name: str) -> str:
        if name not in variables and may_be_elsewhere:
            raise UnitError(f"no visible file sets the unit's variable {name}")
        return variables.get(name, "")

    split_values: dict[str, list[str]] = {}
    size = 0
    for word in split:
        match = _WORD.fullmatch(word)
        if match and match[1] not in split_values:
            split_values[match[1]] = words(value(match[1]))
        made = split_values[match[1]] if match else [_IN_WORD.sub(lambda one: value(one[1]) if one[1] else "$", word)]
        size += sum(map(len, made))
        if size > 1 << 20:
            raise UnitError("its command is longer than 1 MiB")
        yield from made
