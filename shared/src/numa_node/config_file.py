# SPDX-License-Identifier: Apache-2.0
"""Strict YAML reader for the configuration file and manifests; reads plain scalars as kubectl and Helm do.

Both containers read the configuration with this code, so they cannot disagree. The same YAML is also read by other
programs: Helm reads the values from which the chart renders the file, and kubectl reads the claims that ``simulate``
reads. Both use Go's go.yaml.in/yaml/v2 and convert the values to JSON. PyYAML reads the same YAML differently: it reads
``y`` and ``1e3`` as strings, ``1:30`` as a number in base 60, and ``2001-01-01`` as a date.

So ``_StrictLoader`` replaces PyYAML's table of implicit resolvers, which assign a type to a plain scalar by its first
character and a regular expression, and the constructors of the types in that table. A scalar for which no resolver
matches, such as a date, is a string. ``PortableDumper`` does the opposite: it uses the resolvers of both PyYAML and
``_StrictLoader``, so that it quotes every string that one of the readers would read as a different value.
tests/chart/test_yaml_reading.py compares the loader with the real Helm.
"""

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import yaml
from numa_contract.config import Config, ConfigError, parse_config
from numa_contract.documents import MAX_NESTING, TOO_DEEP
from numa_contract.errors import shown
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_FILE: Final = 1 << 20
"""Maximum size of a file in bytes. A configuration fills about one screen, so a file that exceeds this limit must have
been mounted by mistake.
"""
MAX_VALUES: Final = 200_000
"""Maximum number of values in one document with its aliases expanded. The largest Kubernetes object has fewer."""
_MAX_NUMBER: Final = 40
"""Maximum length of a number, since parsing time grows with the square of its length."""
# Exceptions that PyYAML raises for a scalar that does not fit its explicit tag, such as `!!bool x` or `!!timestamp x`.
_INVALID: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

DEPRECATED_FLAGS: Final = {
    "--reserved-cpus": "reservedCPUs",
    "--cpu-device-mode": "cpuDeviceMode",
    "--cpu-device-group-by": "groupBy",
}
"""The configuration key for each of dra-driver-cpu's flags. Both services accept these flags, which take precedence
over the file."""


# Words and numbers in plain scalars, as in resolve.go of go.yaml.in/yaml/v2.
_TRUE: Final = re.compile(r"(y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON)\Z")
_FALSE: Final = re.compile(r"(n|N|no|No|NO|false|False|FALSE|off|Off|OFF)\Z")
_NULL: Final = re.compile(r"(~|null|Null|NULL|)\Z")
_INTEGER: Final = re.compile(
    r"[-+]?_*(0[bB]_*[01][01_]*|0[oO]_*[0-7][0-7_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|0[0-7_]*|[1-9][0-9_]*)\Z"
)
_FLOAT: Final = re.compile(r"[-+]?_*(\._*[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?_*[0-9][0-9_]*)?\Z")
_NOT_FINITE: Final = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")
_BASES: Final = {"0b": 2, "0o": 8, "0x": 16}
_NUMBER_STARTS: Final = "+-.0123456789"


def _integer(text: str) -> int:
    digits = text.lstrip("+-").replace("_", "")
    base = _BASES.get(digits[:2].lower(), 0)
    size = int(digits[2:], base) if base else int(digits, 8 if digits.startswith("0") else 10)
    return -size if text.startswith("-") else size


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that rejects duplicate keys, and checks the size of a document before its values are constructed.

    Plain scalars are read as kubectl and Helm read them, so that a file means the same to a service, to ``simulate``
    and to the cluster. As in JSON, a number without a fraction is an integer, and there is no infinity.

    YAML 1.1 requires unique keys; PyYAML silently keeps the last one. An alias stands for the whole value that it
    refers to, so a few lines of aliases can expand to more levels and values than fit into memory. Therefore each node
    is measured with its aliases expanded.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._level = 0
        self._measured: dict[Node, tuple[int, int]] = {}
        """Nesting depth and number of values of each complete node."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if self._level > MAX_NESTING:
            raise ComposerError(None, None, TOO_DEEP, mark)
        self._level += 1
        node: Any = super().compose_node(parent, index)
        self._level -= 1
        if not isinstance(event, AliasEvent):
            self._measure(node)
        elif node not in self._measured:
            raise ComposerError(None, None, "an alias refers to a value that contains it", mark)
        return node

    def _measure(self, node: Node) -> None:
        inner = [self._measured[one] for one in _children(node)]
        levels = max((one[0] for one in inner), default=0) + (not isinstance(node, ScalarNode))
        values = 1 + sum(one[1] for one in inner)
        if levels > MAX_NESTING:
            raise ComposerError(None, None, TOO_DEEP, node.start_mark)
        if values > MAX_VALUES:
            raise ComposerError(None, None, f"has more than {MAX_VALUES} values", node.start_mark)
        self._measured[node] = levels, values

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        # Only the keys written in this map are checked: keys merged with `<<` are added later and may be overridden.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                # JSON does not allow a list or map as a key. The text of such a key may not even fit into memory,
                # because aliases in it would be expanded before they are measured.
                raise ComposerError(None, None, "found unhashable key: a list or a map", key.start_mark)
            if key.value in seen:
                raise ComposerError(None, None, f"the key {shown(key.value)} is given twice", key.start_mark)
            seen.add(key.value)
        return node

    def construct_integer(self, node: Any) -> int:
        """Returns the value of an integer. With an explicit tag, notations that only PyYAML supports are also
        accepted.
        """
        text = self._number_text(node)
        return _integer(text) if _INTEGER.match(text) else int(self.construct_yaml_int(node))

    def construct_float(self, node: Any) -> int | float | str:
        """Returns the value of a float, as an integer if it has no fraction. A number that is too large becomes a
        string."""
        text = self._number_text(node)
        if _NOT_FINITE.match(text):
            raise ConstructorError(None, None, f"{text} is not a JSON number", node.start_mark)
        value = float(text.replace("_", "")) if _FLOAT.match(text) else self.construct_yaml_float(node)
        if not math.isfinite(value):
            return text
        return int(value) if value.is_integer() else value

    def construct_boolean(self, node: Any) -> bool:
        """Returns the value of a boolean."""
        text = self.construct_scalar(node)
        return bool(_TRUE.match(text)) or (not _FALSE.match(text) and self.construct_yaml_bool(node))

    def reject(self, node: Any) -> Any:
        """Raises ConstructorError for a tag whose value has no equivalent in JSON."""
        text = f"the tag {node.tag.replace(_tag(''), '!!')} is not allowed: its value cannot be written as JSON"
        raise ConstructorError(None, None, text, node.start_mark)

    def _number_text(self, node: Any) -> str:
        text = str(self.construct_scalar(node))
        if len(text) > _MAX_NUMBER:
            raise ConstructorError(None, None, f"a number has more than {_MAX_NUMBER} characters", node.start_mark)
        return text


def _tag(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"


_StrictLoader.add_constructor(_tag("int"), _StrictLoader.construct_integer)
_StrictLoader.add_constructor(_tag("float"), _StrictLoader.construct_float)
_StrictLoader.add_constructor(_tag("bool"), _StrictLoader.construct_boolean)
for _name in ("binary", "timestamp", "set", "omap", "pairs"):
    _StrictLoader.add_constructor(_tag(_name), _StrictLoader.reject)
# Resolvers, keyed by first character. If several match, the first one is used.
_StrictLoader.yaml_implicit_resolvers = {
    **{first: [(_tag("bool"), _TRUE), (_tag("bool"), _FALSE)] for first in "yYtToOfF"},
    **{first: [(_tag("bool"), _FALSE), (_tag("null"), _NULL)] for first in "nN"},
    **{first: [(_tag("int"), _INTEGER), (_tag("float"), _FLOAT)] for first in _NUMBER_STARTS},
    **{first: [(_tag("null"), _NULL)] for first in ("", "~")},
    "<": [(_tag("merge"), re.compile(r"<<\Z"))],
}
for _first in "+-.":
    _StrictLoader.yaml_implicit_resolvers[_first].append((_tag("float"), _NOT_FINITE))


class PortableDumper(yaml.SafeDumper):
    """A safe dumper that quotes every string that PyYAML, kubectl or Helm would read as a different value, such as
    ``n``.
    """


PortableDumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()),
        *_StrictLoader.yaml_implicit_resolvers.get(first, ()),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_StrictLoader.yaml_implicit_resolvers}
}


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [one for pair in node.value for one in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def parse_yaml(data: bytes, source: str) -> Any:
    """Returns the value of one YAML document. Raises ConfigError with ``source`` and the line."""
    return _parsed(data, source, lambda text: yaml.load(text, _StrictLoader))  # noqa: S506 - stricter than SafeLoader


def parse_yaml_documents(data: bytes, source: str) -> list[Any]:
    """Returns the values of all documents in a YAML stream. Raises ConfigError with ``source`` and the line."""
    documents: list[Any] = _parsed(data, source, lambda text: list(yaml.load_all(text, _StrictLoader)))
    return documents


def _parsed(data: bytes, source: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(data.decode())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(source, [f"is not valid YAML: {line}{error.problem or error.context}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(source, [f"is not UTF-8: {error.reason}"]) from error
    except _INVALID as error:
        raise ConfigError(source, [f"is not valid YAML: {' '.join(str(error).split())[:200]}"]) from error


def read_yaml(path: str) -> Any:
    """Returns the value of a YAML file. Raises ConfigError naming the file and the position."""
    try:
        # Symbolic links are followed: a file in a mounted ConfigMap is reached through two of them, which the
        # directory's owner created.
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}"]) from error
    if len(data) > MAX_FILE:
        raise ConfigError(path, [f"is larger than {MAX_FILE} bytes, so it cannot be a configuration file"])
    return parse_yaml(data, path)


def load_config(path: str | None, flags: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Returns the configuration in a file, overridden by ``flags``, a map with the same keys. If ``path`` is None, the
    flags override the defaults.

    The file and the flags are first validated separately, so that an invalid flag is not attributed to the file. Raises
    ConfigError.
    """
    document = read_yaml(path) if path else {}
    if path:
        parse_config(document, path)
    parse_config(dict(flags), "command line")
    return parse_config({**(document or {}), **flags}, path or "command line")
