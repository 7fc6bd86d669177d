# SPDX-License-Identifier: Apache-2.0
"""The kubelet's own managers are told from its files, and nothing in these files can hurt."""

import json

import pytest
from dra_frontend.kubelet.managers import ManagerPolicy, read_policies, static_note
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.trees import MemoryTree

CPU, MEMORY, CONFIGURATION = "/cpu_manager_state", "/memory_manager_state", "/config.yaml"


def policies(files: dict[str, str]) -> tuple[ManagerPolicy, ...]:
    """What is read of these files."""
    return read_policies(MemoryTree({path: text.encode() for path, text in files.items()}))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ()),
        (
            {CPU: '{"policyName":"static","defaultCpuSet":"0-7","checksum":1353318690}'},
            (ManagerPolicy("cpu", "static", CPU),),
        ),
        (
            {CPU: '{"policyName":"none","defaultCpuSet":"","checksum":1}', CONFIGURATION: "cpuManagerPolicy: static\n"},
            (ManagerPolicy("cpu", "none", CPU),),
        ),
        (
            {CONFIGURATION: "kind: KubeletConfiguration\ncpuManagerPolicy: static\nmemoryManagerPolicy: Static\n"},
            (ManagerPolicy("cpu", "static", CONFIGURATION), ManagerPolicy("memory", "Static", CONFIGURATION)),
        ),
        ({MEMORY: '{"policyName":"Static"}'}, (ManagerPolicy("memory", "Static", MEMORY),)),
        ({CPU: "", CONFIGURATION: "- a list\n"}, ()),
        ({CPU: "{", CONFIGURATION: "a: [\n"}, ()),
        ({CPU: '{"policyName": 3}', CONFIGURATION: "cpuManagerPolicy:\n"}, ()),
    ],
)
def test_the_policies_are_read(files: dict[str, str], found: tuple[ManagerPolicy, ...]) -> None:
    """The state file of the running kubelet wins over the configuration of the next one."""
    assert policies(files) == found


def test_only_static_is_worth_a_note() -> None:
    """The note names the managers and where it was read."""
    assert static_note(policies({CPU: '{"policyName":"none"}', MEMORY: '{"policyName":"None"}'})) == ""
    note = static_note(policies({CPU: '{"policyName":"static"}', CONFIGURATION: "memoryManagerPolicy: Static"}))
    assert note.startswith("the kubelet's cpu manager (/cpu_manager_state) and memory manager (/config.yaml) is static")


@settings(max_examples=50)
@given(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_content_is_survived(configuration: str, state: str) -> None:
    """Files of another program never stop the service."""
    assert policies({CPU: state, MEMORY: configuration, CONFIGURATION: configuration}) == ()
