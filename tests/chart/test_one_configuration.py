# SPDX-License-Identifier: Apache-2.0
"""The chart and the containers accept the same configurations.

There is one exception: the chart also rejects host paths that must not be mounted (`tests/chart/test_refusals.py`).
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from numa_contract.config import Config, ConfigError, parse_config
from numa_node.config_file import load_config, parse_yaml

from tests.chart.helm import CHART, HelmError, run
from tests.chart.test_yaml_reading import WORDS
from tests.chart.yaml_reader import helm_value

ACCEPTED = """
reservedCPUs: 0
reservedCPUs: 7
reservedCPUs: 010
reservedCPUs: 08
reservedCPUs: 0x10
reservedCPUs: 1e1
reservedCPUs: 0-1
reservedCPUs: 0,64
reservedCPUs: "0"
reservedCPUs: "0-1,64-65"
reservedCPUs: " 0-1 "
reservedCPUs: ""
reservedCPUs: ~
reservedCPUs:
reservedCPUs: 8191
hostSlices: on
hostSlices: yes
hostSlices: y
hugepageGuard: off
hugepageGuard: no
hugepageGuard: n
deviceMetadata: ~
withheldCPUs: 0
withheldCPUs: 010
withheldCPUs: 1.0
withheldCPUs: 1_0
withheldCPUs: ~
minSharedCPUs: 2
minSharedCPUs: ~
maxClaimFraction: 1
maxClaimFraction: 5e-1
maxClaimFraction: .5
hostnameOverride: 1:30
hostnameOverride: 2001-01-01
hostnameOverride: "off"
hostnameOverride: n1
cpuQuota: keep
cpuQuota: ~
poolGrowth: lazy
poolGrowth: ~
sharedPool: {grow: lazy}
sharedPool: {grow: ~}
sharedPool: {}
sharedPool: ~
irqs: keep
irqs: leave
{minSharedCPUs: 2, withheldCPUs: ~}
{sharedPool: {grow: ~}, poolGrowth: lazy}
memoryProtection: {allowed: [], maxFraction: 0}
memoryProtection: {allowed: ~}
hardwareErrors: {uncorrected: 0, correctedPerHour: 1e3}
reservedMemory: [{numaNode: 0, limits: {memory: 2Gi, hugepages-2Mi: 64Mi}}]
reservedMemory: [{numaNode: 0, limits: {memory: 1e9}}, {numaNode: 1, limits: {memory: 8589934592}}]
reservedMemory: [{numaNode: 0.0, limits: {memory: 2147483648, hugepages-1Gi: "0"}}]
reservedMemory: []
hugepagesOnDemand: [{numaNode: 0, size: 2Mi, pages: 1e2}]
hugepagesOnDemand: [{numaNode: 0, size: 2048kB, pages: 1}, {numaNode: 1, size: 1g, pages: 1}]
pagePort: 8082
pagePort: ~
apiVersion: ~
"""
REFUSED = """
reservedCPUs: off
reservedCPUs: -1
reservedCPUs: 0.5
reservedCPUs: 8192
reservedCPUs: 1:30
reservedCPUs: 3-0
reservedCPUs: 0,0
reservedCPUs: 0, 1
reservedCPUs: [0, 1]
reservedCPUs: "0,"
reservedCPUs: "000001"
reservedCPUs: 2001-01-01
hostSlices: "true"
hostSlices: "off"
hostSlices: 1
hugepageGuard: 0
withheldCPUs: "1"
withheldCPUs: 1.5
withheldCPUs: -1
withheldCPUs: on
minSharedCPUs: "1"
minSharedCPUs: -1
sharedPool: lazy
sharedPool: {grow: on}
sharedPool: {grwo: lazy}
poolGrowth: {grow: lazy}
{minSharedCPUs: 2, withheldCPUs: 2}
{sharedPool: {grow: lazy}, poolGrowth: immediate}
maxClaimFraction: 0
maxClaimFraction: "0.5"
maxClaimFraction: 1.5
maxClaimFraction: yes
maxClaimFraction: .inf
hostnameOverride: 5
hostnameOverride: off
hostnameOverride: 010
kubeconfig: no
cpuQuota: off
cpuQuota: no
irqs: off
groupBy: 3
logLevel: on
logFormat: ~x
memoryProtection: {allowed: low}
memoryProtection: {allowed: [off]}
memoryProtection: {allowed: [~]}
memoryProtection: {maxFraction: "1"}
hardwareErrors: {uncorrected: off}
reservedMemory: [{numaNode: 0, limits: {memory: 1.5Gi}}]
reservedMemory: [{numaNode: 0, limits: {memory: 0.5}}]
reservedMemory: [{numaNode: 0, limits: {memory: ~}}]
reservedMemory: [{numaNode: 0, limits: {memory: on}}]
reservedMemory: [{numaNode: 0, limits: {hugepages-0Mi: 1}}]
reservedMemory: [{numaNode: "0", limits: {memory: 1}}]
reservedMemory: [{numaNode: ~, limits: {memory: 1}}]
reservedMemory: [{numaNode: 0, limits: {memory: 1}}, {numaNode: 0, limits: {hugepages-2Mi: 1}}]
reservedMemory: {numaNode: 0}
hugepagesOnDemand: [{numaNode: 0, size: 2, pages: 1}]
hugepagesOnDemand: [{numaNode: 0, size: 2X, pages: 1}]
hugepagesOnDemand: [{numaNode: 0, size: 0Mi, pages: 1}]
hugepagesOnDemand: [{numaNode: 0, size: 2Mi, pages: "1"}]
pagePort: "8082"
pagePort: off
sysfsOverlay: /a/../b
apiVersion: 1
reservedCpus: 0
"""
ROWS = [(text, True) for text in ACCEPTED.split("\n") if text] + [(text, False) for text in REFUSED.split("\n") if text]


def by_the_program(path: Path) -> Config | None:
    """Returns the configuration that a container reads from a file, or None if the container would not start with that
    file.
    """
    try:
        return load_config(str(path))
    except ConfigError:
        return None


def by_the_chart(text: str, directory: Path) -> Path | None:
    """Returns the file that the chart passes to the containers for this ``driverConfig``, or None if Helm rejects
    it.
    """
    values = directory / "values.yaml"
    values.write_text(f"driverConfig:\n  {text}\n")
    arguments = ("--values", str(values), "--show-only", "templates/configmap.yaml")
    try:
        printed = run("template", "dra-driver-numa", str(CHART), *arguments)
    except HelmError:
        return None
    file = directory / "rendered.yaml"
    file.write_text(parse_yaml(printed.encode(), "configmap.yaml")["data"]["config.yaml"])
    return file


@pytest.mark.parametrize(("text", "accepted"), ROWS, ids=[text for text, _ in ROWS])
def test_chart_and_program_accept_the_same_configuration(text: str, accepted: bool, tmp_path: Path) -> None:
    """The same text in a values file and in a configuration file has the same meaning."""
    file = tmp_path / "config.yaml"
    file.write_text(f"{text}\n")
    rendered = by_the_chart(text, tmp_path)
    read = by_the_program(file)
    assert ((rendered is not None), (read is not None)) == (accepted, accepted)
    if rendered is not None:
        assert by_the_program(rendered) == read


def accepted_alone(key: str, value: Any) -> bool:
    """Returns True if the program accepts a configuration with only this key."""
    try:
        parse_config({key: value}, "config.yaml")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", Config.model_fields)
def test_schema_and_program_agree_on_every_scalar(name: str) -> None:
    """Each key is tried with words and numbers that YAML readers interpret differently. CPU lists are left out: the
    schema accepts numbers and strings, and a template validates them.
    """
    key = Config.model_fields[name].alias or name
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["driverConfig"]
    validator = jsonschema.Draft7Validator(schema)
    values = helm_value("".join(f"k{number:04}: {word}\n" for number, word in enumerate(WORDS)))
    for value in values.values() if key != "reservedCPUs" else ():
        assert accepted_alone(key, value) == validator.is_valid({key: value}), value
