# SPDX-License-Identifier: Apache-2.0
"""The driver reads YAML as kubectl and Helm do, so a file has the same meaning everywhere."""

import random
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from dra_frontend.allocation.parameters import CpuConfig, MemoryConfig
from numa_contract.config import Config, ConfigError
from numa_node.config_file import PortableDumper, parse_yaml
from pydantic import BaseModel

from hack.chart_values import ChartValues
from tests.chart.helm import HelmError
from tests.chart.yaml_reader import helm_value

WORDS = (
    *("off", "Off", "OFF", "on", "yes", "No", "y", "n", "Y", "N", "true", "TRUE", "nO", "oN", "~", "null", "Null", ""),
    *(
        "0",
        "8",
        "08",
        "010",
        "0o10",
        "0x10",
        "0b11",
        "1_000",
        "0_1",
        "+5",
        "-0",
        "0770",
        "0888",
        "1,000",
        "0,64",
        "0-3",
    ),
    *("1:30", "1:30:00", "2001-01-01", "2001-01-01T00:00:00Z", "1e3", "1e+3", "1.0", ".5", "1e5000", "1_0.5", "="),
    *("2Gi", "1e9", "v1alpha1", "<", "4096", "0.1.0", '"off"', "'010'", "!!str off", "!!str 010"),
)
"""Plain scalars that YAML 1.1, YAML 1.2, PyYAML and Go interpret differently, and the values that the driver's settings
and parameters allow.
"""


def generated(seed: int, count: int = 800) -> list[str]:
    """Returns random plain scalars that look like numbers and words."""
    source = random.Random(seed)
    texts = ["".join(source.choices("0012379_.eExXobBOafn+-:,", k=source.randint(1, 7))) for _ in range(count)]
    return [text for text in texts if text[0] not in "-:," and text[-1] != ":"]


def typed(values: dict[str, Any]) -> list[tuple[str, type, Any]]:
    """Returns the values with their types, since in Python False equals 0 and 1.0 equals 1."""
    return [(key, type(value), value) for key, value in values.items()]


@pytest.mark.parametrize("words", [WORDS, generated(1), generated(2)], ids=["chosen", "1", "2"])
def test_every_scalar_has_the_value_that_helm_and_kubectl_give_it(words: list[str]) -> None:
    """A setting or a parameter cannot be a boolean, a number or a date in one reader and a string in another."""
    text = "".join(f"k{number:04}: {word}\n" for number, word in enumerate(words))
    assert typed(parse_yaml(text.encode(), "some.yaml")) == typed(helm_value(text))


@pytest.mark.parametrize("words", [WORDS, generated(1)], ids=["chosen", "1"])
def test_a_printed_string_is_read_as_the_same_string(words: list[str]) -> None:
    """``simulate -o yaml`` and other commands quote a name such as ``n``. Without the quotes, kubectl would read it as
    a boolean.
    """
    printed = yaml.dump({f"k{number:04}": word for number, word in enumerate(words)}, Dumper=PortableDumper)
    assert list(helm_value(printed).values()) == list(words)


@pytest.mark.parametrize("word", [".inf", "-.Inf", ".NaN"])
def test_a_number_that_json_cannot_represent_is_rejected(word: str) -> None:
    """JSON has no infinity and no NaN, so the cluster could not store such a value."""
    with pytest.raises(HelmError):
        helm_value(f"key: {word}")
    with pytest.raises(ConfigError, match=r"line 1: .* is not a JSON number"):
        parse_yaml(f"key: {word}".encode(), "some.yaml")


def choices(annotation: Any) -> set[str]:
    """Returns the values of all enumerations in a type and in the models that it contains."""
    if get_origin(annotation) is Literal:
        return {word for word in get_args(annotation) if isinstance(word, str)}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {word for field in annotation.model_fields.values() for word in choices(field.annotation)}
    inner = get_args(annotation) if get_origin(annotation) in (Union, UnionType, list, tuple, dict, Annotated) else ()
    return {word for one in inner for word in choices(one)}


@pytest.mark.parametrize("model", [CpuConfig, MemoryConfig, Config, ChartValues])
def test_every_enumeration_value_is_a_string_without_quotes(model: type[BaseModel]) -> None:
    """A value such as ``off`` would otherwise reach the driver as a boolean. The empty string is always written with
    quotes.
    """
    found = sorted(choices(model) - {""})
    assert len(found) >= 9
    text = "".join(f"- {word}\n" for word in found)
    assert helm_value(text) == parse_yaml(text.encode(), "words") == found
