# SPDX-License-Identifier: Apache-2.0
"""Generates ``docs/command-reference.md``, the reference page of all commands, from their argument parsers.

``python -m hack.command_reference`` writes it. With ``--check``, it fails if the file is out of date.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kubectl_numa import cli as plugin
from nri_backend import settings as backend
from nri_backend.setup import command as setup
from numa_tools import cli as frontend

from hack.pages import wrapped, write_or_check

PAGE: Final = Path(__file__).parents[1] / "docs/command-reference.md"
_HEAD: Final = """\
# Command reference

*For operators and application developers who look up an option or an exit status.*

`make command-reference` generates this page from the programs' own help texts. [Commands](commands.md) explains how to
run `dra-frontend` and shows what it prints; [kubectl numa](kubectl-numa.md) does the same for the plugin, and
[configuration](configuration.md) describes the settings of the two services.
"""
_TOP_LEVEL: Final = "## "
_SUBCOMMAND: Final = "### "
_EXAMPLE: Final = re.compile(r"^  (# .*)\n  (.*)$", re.MULTILINE)
_STATUS: Final = re.compile(r"^Exit status: (.*)\.$", re.MULTILINE | re.DOTALL)
_SUCCESS: Final = "success"
_CONJUNCTION: Final = re.compile(r"^(if|for) ")


def page() -> str:
    """Returns the reference page."""
    programs = (frontend.build_parser(), backend.build_parser(), setup.build_parser(), plugin.build_parser())
    parts = [_HEAD.strip()]
    for parser in programs:
        parts += [f"{_TOP_LEVEL}{parser.prog}", *_command(parser)]
        commands = _subcommands(parser)
        shared = _shared_options(commands)
        if shared and not shared.items() <= _options(parser).items():
            parts += [f"All commands of `{parser.prog}` have these options:", _table("option", shared)]
        elif shared:
            parts.append(wrapped(f"`OPTION` of a command is one of: {', '.join(shared)}."))
        for command in commands:
            parts += [f"{_SUBCOMMAND}{command.prog}", *_command(command, shared)]
    return "\n\n".join(parts) + "\n"


def _subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [one for one in _actions(parser) if isinstance(one, argparse._SubParsersAction)]  # noqa: SLF001 - no other way
    return [command for one in found for command in one.choices.values()]


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the arguments of a parser except the help option."""
    return [one for one in parser._actions if not isinstance(one, argparse._HelpAction)]  # noqa: SLF001 - no other way


def _shared_options(commands: Sequence[argparse.ArgumentParser]) -> dict[str, str]:
    """Returns the options that every command has, with their descriptions."""
    rows = [_options(command) for command in commands]
    return {name: text for name, text in rows[0].items() if all(one.get(name) == text for one in rows)} if rows else {}


def _command(parser: argparse.ArgumentParser, shared: dict[str, str] | None = None) -> Iterator[str]:
    """Yields a command's description, synopsis, arguments, options, examples and exit statuses."""
    epilog, shared = parser.epilog or "", shared or {}
    yield wrapped(parser.description or "")
    yield f"```text\n{_synopsis(parser, shared)}\n```"
    if arguments := {_shown(one): _meaning(one) for one in _actions(parser) if _is_argument(one)}:
        yield _table("argument", arguments)
    if own := {name: text for name, text in _options(parser).items() if name not in shared}:
        yield _table("option", own)
    if examples := _EXAMPLE.findall(epilog):
        yield "```sh\n" + "\n".join(f"{text}\n{line}" for text, line in examples) + "\n```"
    if match := _STATUS.search(epilog):
        yield _table("exit status", dict(_statuses(match[1])))


def _is_argument(action: argparse.Action) -> bool:
    return not (action.option_strings or isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - no other way


def _options(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {_shown(one): _meaning(one) for one in _actions(parser) if one.option_strings}


def _shown(action: argparse.Action) -> str:
    """Formats an argument for the first column of a table."""
    spellings = action.option_strings or [""]
    return ", ".join(f"`{one}{_value(action) if one else _value(action).strip()}`" for one in spellings)


def _value(action: argparse.Action) -> str:
    """Returns the placeholder for an option's value, preceded by its separator, or '' for a switch."""
    if action.nargs == 0:
        return ""
    name = str(action.metavar or action.dest.upper())
    return f"[={name}]" if action.option_strings and action.nargs == "?" else f" {name}"


def _meaning(action: argparse.Action) -> str:
    return str(action.help or "").replace("\n", " ")


def _synopsis(parser: argparse.ArgumentParser, shared: dict[str, str]) -> str:
    """Returns the command line with optional parts in brackets, wrapped and indented."""
    words = [parser.prog]
    for one in _actions(parser):
        value = _value(one)
        if isinstance(one, argparse._SubParsersAction):  # noqa: SLF001 - no other way
            words.append("COMMAND" if one.required else "[COMMAND]")
        elif one.option_strings and _shown(one) not in shared:
            option = f"{one.option_strings[0]}{value}"
            words.append(option if one.required else f"[{option}]")
        elif not one.option_strings:
            name = value.strip()
            words.append({"+": f"{name}...", "?": f"[{name}]"}.get(str(one.nargs), name))
    if shared:
        words.append("[OPTION...]")
    # A line must not break at a space inside brackets.
    line = " ".join(word.replace(" ", "\N{NO-BREAK SPACE}") if word != parser.prog else word for word in words)
    indent = " " * (len(parser.prog) + 1)
    folded = textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return folded.replace("\N{NO-BREAK SPACE}", " ")


def _statuses(text: str) -> Iterator[tuple[str, str]]:
    """Yields the exit statuses listed in a sentence such as ``0; 1 if something is missing; 2 for a usage error``."""
    for part in " ".join(text.split()).split("; "):
        status, _, meaning = part.partition(" ")
        yield f"`{status}`", _CONJUNCTION.sub("", meaning) or _SUCCESS


def _table(first: str, rows: dict[str, str]) -> str:
    cells = ((name.replace("|", "\\|"), text.replace("|", "\\|")) for name, text in rows.items())
    return "\n".join([f"| {first} | meaning |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells)])


def main(arguments: list[str]) -> int:
    """Writes or compares the page and returns the exit status."""
    return write_or_check({PAGE: page()}, arguments, source="the help texts", target="command-reference")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
