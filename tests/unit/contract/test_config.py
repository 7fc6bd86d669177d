# SPDX-License-Identifier: Apache-2.0
"""Invalid keys and values in the configuration are rejected with an error that suggests a replacement."""

import pytest
from numa_contract.config import Config, ConfigError, parse_config


def test_keys_of_dra_driver_cpu_keep_their_names() -> None:
    """A dra-driver-cpu configuration file works unchanged if this driver knows all of its keys. No key is required."""
    assert parse_config(None, "f") == parse_config({}, "f") == Config() == parse_config({"cdiDir": None}, "f")
    config = parse_config(
        {"apiVersion": "v1alpha1", "reservedCPUs": "0-1,8", "hostnameOverride": "n", "cpuDeviceMode": "grouped"}, "f"
    )
    assert config.reserved_cpus == {0, 1, 8}
    assert config.hostname_override == "n"


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"reservedCpus": "0"}, "use reservedCPUs"),
        ({"nonsense": 1}, "nonsense: unknown key; known keys are allocator, apiVersion, "),
        (
            {"reservedCPUs": False},
            "reservedCPUs: got the boolean false (YAML reads off, no and n as false); write a CPU",
        ),
        ({"reservedCPUs": 0.5}, "reservedCPUs: got the number 0.5; write a CPU list in quotes"),
        ({"reservedCPUs": 8192}, "8192 exceeds the highest possible CPU number"),
        ({"reservedCPUs": -1}, "'-1' is neither a number nor a range"),
        ({"reservedCPUs": 1 << 5000}, "reservedCPUs: got a very large integer; write"),
        (
            {"cpuQuota": False},
            "cpuQuota: got the boolean false (YAML reads off, no and n as false); input should be 'raise'",
        ),
        ({"hostSlices": "off"}, "hostSlices: got the text 'off'; input should be a valid boolean"),
        ({"withheldCPUs": "1"}, "withheldCPUs: got the text '1'; input should be a valid integer"),
        ({"minSharedCPUs": "1"}, "minSharedCPUs: got the text '1'; input should be a valid integer"),
        (
            {"sharedPool": {"grow": "fast"}},
            "sharedPool.grow: got the text 'fast'; input should be 'immediate' or 'lazy'",
        ),
        ({"minSharedCPUs": 1, "withheldCPUs": 1}, "minSharedCPUs: is the former name of withheldCPUs, and both are gi"),
        (
            {"sharedPool": {"grow": "lazy"}, "poolGrowth": "lazy"},
            "sharedPool.grow: is the former name of poolGrowth, and both are given; remove sharedPool.grow",
        ),
        (
            {"memoryProtection": {"allowed": "low"}},
            "memoryProtection.allowed: got the text 'low'; input should be a list",
        ),
        ({"sharedPool": ["grow"]}, "sharedPool: got a list; input should be a map"),
        (
            {"hugepagesOnDemand": [{"numaNode": 0, "size": "2", "pages": 1}]},
            "'2' is not a page size such as 2Mi",
        ),
        ({"reservedCPUs": "3-1"}, "runs backwards"),
        ({"apiVersion": "v2"}, "apiVersion"),
        ({"cdiDir": "/etc/cdi"}, "must not be under /etc"),
        ({"cdiDir": "/./etc//cdi"}, "must not be under /etc"),
        ({"cdiDir": "var/cdi"}, "absolute"),
        ({"cpu_device_mode": "individual"}, "cpu_device_mode: unknown key"),
        ({"reservedMemory": [{"numa_node": 0, "limits": {}}]}, "reservedMemory.0.numa_node: unknown key"),
        ({"runDir": "/run/../etc"}, "without '..'"),
        ({"cpuDeviceMode": "magic"}, "cpuDeviceMode"),
        ({"reservedMemory": [{"numaNode": 0, "limits": {"gold": 1}}]}, "gold"),
        ({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1.5Gi"}}]}, "whole number"),
        ({"reservedMemory": [{"numaNode": 0, "limits": {}}, {"numaNode": 0, "limits": {}}]}, "twice"),
        ([], "must be a map"),
        ("text", "must be a map"),
    ],
)
def test_errors_contain_file_and_key(document: object, named: str) -> None:
    with pytest.raises(ConfigError, match=r"values\.yaml") as caught:
        parse_config(document, "values.yaml")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "document",
    [{"sharedPool": {"grow": None}}, {"memoryProtection": {"allowed": None, "maxFraction": None}}, {"pagePort": None}],
)
def test_a_key_without_a_value_counts_as_omitted(document: dict[str, object]) -> None:
    """At every level, a key without a value, such as ``grow:``, gets its default."""
    assert parse_config(document, "f") == Config()


@pytest.mark.parametrize(
    ("former", "present", "warning"),
    [
        ({"minSharedCPUs": 3}, {"withheldCPUs": 3}, "minSharedCPUs: is the former name of withheldCPUs"),
        ({"sharedPool": {"grow": "lazy"}}, {"poolGrowth": "lazy"}, "sharedPool.grow: is the former name of poolGrowth"),
        ({"irqs": "leave"}, {"irqs": "keep"}, "irqs: leave is the former name of keep"),
    ],
)
def test_a_deprecated_key_means_the_same_as_its_replacement(
    former: dict[str, object], present: dict[str, object], warning: str
) -> None:
    """The resulting configuration is the same, apart from a warning that names both keys."""
    read, expected = parse_config(former, "f"), parse_config(present, "f")
    assert read.model_dump() == expected.model_dump() != Config().model_dump()
    assert (read.former_names, expected.former_names) == ((warning,), ())
    assert read.model_copy(update={"log_level": "debug"}).former_names == (warning,)


def test_a_single_cpu_needs_no_quotes() -> None:
    """YAML parses a single CPU as an integer."""
    assert parse_config({"reservedCPUs": 8191}, "f").reserved_cpus == {8191}


def test_all_errors_are_reported_at_once() -> None:
    """A complete list of errors lets the operator fix the whole file in one go. The known keys are listed only for
    errors at the top level.
    """
    with pytest.raises(ConfigError) as caught:
        parse_config({"sharedPool": {"grwo": "lazy"}, "cdiDir": "x"}, "f")
    assert set(caught.value.faults) == {
        "sharedPool.grwo: unknown key",
        "cdiDir: must be an absolute path without '..'",
    }


@pytest.mark.parametrize("suffix", ["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"])
def test_reserved_memory_accepts_every_suffix_that_the_schema_allows(suffix: str) -> None:
    """A value that passes the chart's schema must not prevent either container from starting."""
    limits = {"memory": f"4{suffix}", "hugepages-2Mi": "64Mi"}
    config = parse_config({"reservedMemory": [{"numaNode": 1, "limits": limits}]}, "test")
    base, power = (1024 if suffix.endswith("i") else 1000), " kMGT".find(suffix.upper().replace("K", "k")[:1] or " ")
    assert config.reserved_bytes(1) == 4 * base**power
    assert config.reserved_bytes(1, 2 << 20) == 64 << 20
    assert config.reserved_bytes(0) == 0


def test_the_message_contains_only_the_first_errors() -> None:
    """The error for one unknown key lists all known keys, so without a limit, the message for a file full of unknown
    keys would be megabytes long.
    """
    with pytest.raises(ConfigError) as caught:
        parse_config({f"key{number}": 1 for number in range(1000)}, "f")
    assert "key15: unknown key" in str(caught.value)
    assert str(caught.value).endswith("; and 984 more")
    assert len(str(caught.value)) < 1 << 14


@pytest.mark.parametrize("key", ["a\x1b[31mb", "a\nb", "k" * 10_000])
def test_a_key_cannot_write_to_the_terminal_or_fill_the_message(key: str) -> None:
    """The error reaches logs and terminals, where an escape sequence could hide or forge lines."""
    for document in ({key: 1}, {"reservedMemory": [{key: 1}]}):
        with pytest.raises(ConfigError) as caught:
            parse_config(document, "f")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1200
