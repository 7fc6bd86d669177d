# SPDX-License-Identifier: Apache-2.0
"""The one configuration file, read strictly. Both containers read it with this code, so they cannot disagree."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import yaml
from numa_contract.config import Config, ConfigError, parse_config
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, ScalarNode

MAX_FILE: Final = 1 << 20
"""Bytes. A configuration is a screen of text; whatever is larger was mounted by mistake."""


DEPRECATED_FLAGS: Final = {
    "--reserved-cpus": "reservedCPUs",
    "--cpu-device-mode": "cpuDeviceMode",
    "--cpu-device-group-by": "groupBy",
}
"""Flag to key. Spelled like this by the CPU peer; both services take them, and they win over the file."""


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice: YAML 1.1 wants them unique, PyYAML keeps the last one silently."""

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        # The keys as they are written: what `<<` brings is laid beneath them later, and may be overridden.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.value in seen:
                raise ComposerError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return node


def parse_yaml(data: bytes, source: str) -> Any:
    """Returns the value of one YAML document; ConfigError names ``source`` and the line."""
    return _parsed(data, source, lambda text: yaml.load(text, _StrictLoader))  # noqa: S506 - a SafeLoader with one rule more


def parse_yaml_documents(data: bytes, source: str) -> list[Any]:
    """Returns the values of all documents of a YAML stream; ConfigError names ``source`` and the line."""
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
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise ConfigError(source, [f"is not valid YAML: {' '.join(str(error).split())[:200]}"]) from error


def read_yaml(path: str) -> Any:
    """Returns the value of a YAML file; ConfigError names file and place."""
    try:
        # A mounted ConfigMap is a link to a link, which its directory's owner placed there.
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}"]) from error
    if len(data) > MAX_FILE:
        raise ConfigError(path, [f"is larger than {MAX_FILE} bytes, that is not a configuration"])
    return parse_yaml(data, path)


def load_config(path: str | None, flags: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Returns the configuration of a file (None: the defaults) with flags, by key of the file, laid over it.

    Each is judged by itself first, so that a bad flag is not blamed on the file. Raises ConfigError.
    """
    document = read_yaml(path) if path else {}
    if path:
        parse_config(document, path)
    parse_config(dict(flags), "command line")
    return parse_config({**(document or {}), **flags}, path or "command line")
