# SPDX-License-Identifier: Apache-2.0
"""The one configuration file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import ConfigError
from numa_node.config_file import load_config, parse_yaml


@given(st.binary(max_size=60))
def test_no_bytes_give_a_traceback(data: bytes) -> None:
    """Any bytes are a value or a ConfigError of one line."""
    said = ""
    try:
        parse_yaml(data, "some.yaml")
    except ConfigError as error:
        said = str(error)
    assert not said or said.startswith("some.yaml: ")
    assert "\n" not in said


def test_flags_win_over_the_file_and_are_blamed_for_themselves(tmp_path: Path) -> None:
    """A wrong flag names the command line, a wrong key the file, whatever the flag says."""
    path = tmp_path / "config.yaml"
    path.write_text("groupBy: socket\nlogLevel: debug\n")
    config = load_config(str(path), {"groupBy": "machine"})
    assert (config.group_by, config.log_level) == ("machine", "debug")
    with pytest.raises(ConfigError, match="command line: groupBy"):
        load_config(str(path), {"groupBy": "galaxy"})
    path.write_text("groupBy: galaxy\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: groupBy"):
        load_config(str(path), {"groupBy": "machine"})


def test_a_merge_key_is_not_a_key_given_twice(tmp_path: Path) -> None:
    """YAML's `<<` brings keys that may be overridden."""
    path = tmp_path / "config.yaml"
    path.write_text("reservedMemory: [&a {numaNode: 0, limits: {memory: 64Mi}}, {<<: *a, numaNode: 1}]\n")
    assert [one.numa_node for one in load_config(str(path)).reserved_memory] == [0, 1]
