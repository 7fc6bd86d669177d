# SPDX-License-Identifier: Apache-2.0
"""Parsing and merging the kubelet's documents, flags and unit files, without a node."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import Config, ConfigError
from numa_tools.doctor.checks.kubelet import CHECKS
from numa_tools.doctor.facts import KubeletConfig
from numa_tools.doctor.kubelet_command import Command, FlagError, parse_command
from numa_tools.doctor.kubelet_config import (
    Part,
    Reading,
    archived,
    kubelet_config,
    kubelet_of_reading,
    merge,
    merge_patch,
    misspelled,
    unarchived,
)
from numa_tools.doctor.model import Unread
from numa_tools.doctor.unit_files import UnitError, arguments_of, parse_environment, parse_service, words

from tests.rigs import kubeadm

_leaves = st.one_of(st.none(), st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2))
_keys = st.sampled_from(["cpuManagerPolicy", "featureGates", "reservedMemory", "b"])
_documents = st.dictionaries(
    _keys, st.recursive(_leaves, lambda inner: st.dictionaries(_keys, inner, max_size=3), max_leaves=6), max_size=4
)


def expected(documents: list[dict[str, Any]], path: tuple[str, ...]) -> Any:
    """Returns the value at a path according to RFC 7396, searching from the last document to the first."""
    for document in reversed(documents):
        value: Any = document
        for key in path:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, dict):
                break  # an earlier document decides
            else:
                return None  # a value that is not a map replaces earlier values beneath it
        else:
            return value
    return None


def leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the paths of all values in a document that are not maps."""
    return [
        leaf
        for key, one in value.items()
        for leaf in (leaves(one, (*path, key)) if isinstance(one, dict) else [(*path, key)])
    ]


@given(st.lists(_documents, max_size=4))
def test_the_last_document_that_sets_a_value_takes_precedence(documents: list[dict[str, Any]]) -> None:
    """Maps are merged, lists and scalars are replaced, null removes a key, and the inputs stay unchanged."""
    before = copy.deepcopy(documents)
    settings = merge(Part(str(number), one) for number, one in enumerate(documents)).settings
    assert documents == before
    for path in {leaf for one in documents for leaf in leaves(one)}:
        found: Any = settings
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        wanted = expected(documents, path)
        assert isinstance(found, dict) if isinstance(wanted, dict) else found == wanted
    assert all(expected(documents, path) is not None for path in leaves(settings))


@given(_documents, _documents)
def test_each_setting_has_the_origin_that_determined_it(first: dict[str, Any], second: dict[str, Any]) -> None:
    """The last part of the configuration that sets a key is the key's origin. A key that a part removes has no
    origin.
    """
    origins = merge([Part("first", first), Part("second", second)]).origins
    for key in {*first, *second} - {"featureGates"}:
        last = ("second", second) if key in second else ("first", first)
        assert origins.get(key) == (last[0] if last[1][key] is not None else None)


def test_the_remedy_names_the_flag_that_sets_a_policy() -> None:
    """The flag takes precedence, so a setting in a file would not help."""
    flags = Part("the unit kubelet.service", {"cpuManagerPolicy": "static"}, is_command_line=True)
    kubelet = kubelet_of_reading(Reading((Part("/c.yaml", {}), flags)), "")
    assert kubelet is not None
    check = next(one for one in CHECKS if one.id == "kubelet.cpu-manager")
    found = next(iter(check.judge(kubelet, Config(), Unread("", ""))))
    assert found.remedy.startswith("set --cpu-manager-policy in the unit kubelet.service to none, ")


def test_feature_gates_from_several_documents_are_merged() -> None:
    """A drop-in that sets one gate leaves the other gates unchanged, and each gate has its own origin."""
    found = merge([Part("a", {"featureGates": {"A": True, "B": True}}), Part("b", {"featureGates": {"B": False}})])
    assert found.settings == {"featureGates": {"A": True, "B": False}}
    assert found.origins == {"featureGates.A": "a", "featureGates.B": "b"}
    assert merge([Part("a", {"featureGates": {"A": True}}), Part("b", {"featureGates": None})]).origins == {}


def test_a_patch_with_another_type_replaces_the_value() -> None:
    """RFC 7396, section 2, requires this."""
    assert merge_patch({"a": 1}, ["b"]) == ["b"]
    assert merge_patch([1], {"a": {"b": None, "c": 2}}) == {"a": {"c": 2}}


def test_keys_are_matched_without_regard_to_case() -> None:
    """Go's decoder accepts reservedSystemCpus in a drop-in for reservedSystemCPUs."""
    assert misspelled({"reservedSystemCpus": "0", "cpuManagerPolicy": "none", "other": 1}) == ["reservedSystemCpus"]


FLAGS = {
    "--cpu-manager-policy=static": {"cpuManagerPolicy": "static"},
    "--cpu-manager-policy=none --cpu-manager-policy static": {"cpuManagerPolicy": "static"},
    "--topology_manager_policy=restricted": {"topologyManagerPolicy": "restricted"},
    "--reserved-cpus 0-1,4 --v=2 -x": {"reservedSystemCPUs": "0-1,4"},
    "--feature-gates=A=true,B=F --feature-gates C=1": {"featureGates": {"A": True, "B": False, "C": True}},
    "--reserved-memory=0:memory=1Gi,hugepages-2Mi=2Gi;1:memory=2Gi": {
        "reservedMemory": [
            {"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "2Gi"}},
            {"numaNode": 1, "limits": {"memory": "2Gi"}},
        ]
    },
    "--node-labels=--cpu-manager-policy=static": {},
    "-- --cpu-manager-policy=static": {},
}


@pytest.mark.parametrize("line", FLAGS)
def test_flags_are_parsed_as_the_kubelet_parses_them(line: str) -> None:
    """Covers every spelling that the kubelet accepts. If a string flag is repeated, the last one applies."""
    assert parse_command(line.split()).settings == FLAGS[line]


def test_paths_are_taken_from_flags() -> None:
    """The kubelet has no default for these files' paths, so they come from the command line."""
    found = parse_command(["--config", "/a", "--config-dir=/b", "--root-dir=/c"])
    assert found == Command("/a", "/b", "/c")


@pytest.mark.parametrize(
    "line", ["--feature-gates=A", "--feature-gates=A=on", "--reserved-memory=memory=1Gi", "--reserved-cpus"]
)
def test_flags_that_prevent_the_kubelet_from_starting_are_errors(line: str) -> None:
    """The kubelet cannot be running with such a command line, so no conclusions are drawn from it."""
    with pytest.raises(FlagError):
        parse_command([line])


UNIT = "kubelet.service"


def test_a_units_drop_in_replaces_the_command() -> None:
    """Variables from environment files override the unit's own, and unset variables are empty."""
    service = parse_service(["[Unit]\nExecStart=no\n[Service]\nExecStart=/usr/bin/kubelet\n", kubeadm.DROP_IN], UNIT)
    assert service.files == ("-/var/lib/kubelet/kubeadm-flags.env", "-/etc/default/kubelet")
    environment = parse_environment('KUBELET_KUBEADM_ARGS="--node-ip=1.2.3.4 --v=2"\n# A=b\n;c\n\n')
    assert arguments_of(service, environment, "kubelet") == (
        *("--kubeconfig=/etc/kubernetes/kubelet.conf", "--config=/var/lib/kubelet/config.yaml"),
        *("--node-ip=1.2.3.4", "--v=2"),
    )


COMMANDS = {
    "/usr/bin/kubelet --a \\\n  # a comment\n  --b=${X}y $$ ${Y}": ("--a", "--b=1 2y", "$", ""),
    "/usr/local/bin/kubenswrapper /usr/bin/kubelet --config=/c $X": ("--config=/c", "1", "2"),
    "@-/usr/bin/kubelet kubelet --a": ("--a",),
    ":/usr/bin/kubelet $X": ("$X",),
    "/usr/bin/kubelet %N %n %p %%N --hostname-override=%H": (
        *("kubelet", "kubelet.service", "kubelet", "%N", "--hostname-override=%H"),
    ),
    "/usr/bin/kubelet '--a=b c' \"d e\"": ("--a=b c", "d e"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_read_as_systemd_reads_them(command: str) -> None:
    """Covers prefixes, wrappers, quotes, continued lines, and variables as words and within words."""
    service = parse_service([f"[Service]\nEnvironment='X=1 2'\nExecStart={command}\n"], UNIT)
    assert arguments_of(service, {}, "kubelet") == COMMANDS[command]


@pytest.mark.parametrize(
    "text",
    [
        "[Service]\nExecStart=/opt/azure/containers/start-kubelet.sh\n",
        "[Service]\nExecStart=/bin/sh -c 'exec kubelet --v=2'\n",
        "[Service]\nExecStart=\n",
        "[Service]\nExecStart=/usr/bin/kubelet 'a\n",
        "[Service]\nExecStartPre=systemctl set-environment A=b\nExecStart=/usr/bin/kubelet $A\n",
        "[Service]\nEnvironmentFile=-/etc/default/%H\nExecStart=/usr/bin/kubelet\n",
        "[Service]\nPassEnvironment=A\nExecStart=/usr/bin/kubelet ${A}\n",
        "[Service]\nEnvironment=A=" + "x" * 9000 + "\nExecStart=/usr/bin/kubelet " + "$A " * 2000,
    ],
)
def test_arguments_that_the_unit_does_not_contain_are_an_error(text: str) -> None:
    """For example, the unit runs a script or a shell, uses a variable that is set elsewhere, or has a command whose
    expansion would not fit into memory.
    """
    with pytest.raises(UnitError):
        arguments_of(parse_service([text], UNIT), {}, "kubelet")


def test_environment_files_are_read_as_systemd_reads_them() -> None:
    """Covers quotes, continued lines and values with spaces. A quote that ends on a later line is an error."""
    text = 'A=--b --c="d"\nexport B=\'x y\'\nC="--a \\\n --b"\nD=1,\\\n2\nno assignment\n'
    assert parse_environment(text) == {"A": '--b --c="d"', "B": "x y", "C": "--a  --b", "D": "1,2"}
    assert words('--b --c="d e"') == ["--b", "--c=d e"]
    with pytest.raises(UnitError):
        parse_environment('A="b\nc"\n')


REMEDY = "ask"
_CONFIG = Config(reserved_cpus=frozenset({0}))
_NODE = {"status": {"capacity": {"cpu": "8", "memory": "8Gi"}, "allocatable": {"cpu": "7", "memory": "6Gi"}}}
_READS = {
    "kubelet.cpu-manager",
    "kubelet.memory-manager",
    "kubelet.topology-manager",
    "kubelet.gates",
    "kubelet.reserved-cpus",
    "kubelet.reserved-memory",
}


def results(reading: Reading, config: Config = _CONFIG) -> dict[str, str]:
    """Returns the result of each check that reads the kubelet's configuration. A check without findings is good."""
    kubelet = kubelet_of_reading(reading, REMEDY)
    assert isinstance(kubelet, KubeletConfig)
    found = {}
    for check in CHECKS:
        if "kubelet" in check.reads:
            facts = {"kubelet": kubelet, "config": config, "node": _NODE, "backend": Unread("", "")}
            findings = list(check.judge(*(facts[name] for name in check.reads)))
            found[check.id] = findings[0].level.value if findings else "good"
    return found


def test_no_check_is_good_unless_everything_was_read() -> None:
    """If a document does not contain a setting, that proves nothing as long as another document may contain it."""
    part = Part("/a", {"kind": "KubeletConfiguration"})
    seen, unseen = results(Reading((part,))), results(Reading((part,), incomplete="flags"))
    assert {seen[name] for name in _READS} == {"good"}
    assert {unseen[name] for name in _READS} == {"unknown"}
    published = Config(publish_node_allocatable_resource_mapping=True)
    assert results(Reading((part,), incomplete="flags"), published)["kubelet.gates"] == "unknown"
    assert results(Reading((part,)), published)["kubelet.gates"] == "note"


def test_a_known_setting_is_checked_even_if_others_are_unknown() -> None:
    """A fault is reported even if the configuration is incomplete."""
    settings = {"topologyManagerPolicy": "single-numa-node", "reservedSystemCPUs": "0-3", "cpuManagerPolicy": "static"}
    found = results(Reading((Part("/a", settings),), incomplete="flags"))
    assert (found["kubelet.topology-manager"], found["kubelet.reserved-cpus"]) == ("note", "problem")
    assert (found["kubelet.cpu-manager"], found["kubelet.memory-manager"]) == ("problem", "unknown")


def test_the_policy_in_effect_comes_from_the_state_file() -> None:
    """The state file alone determines the results of the managers' checks, even if everything else is unknown. Other
    checks stay unknown.
    """
    good = results(Reading(running={"cpu": "none", "memory": "None"}, incomplete="no file"))
    assert (good["kubelet.cpu-manager"], good["kubelet.memory-manager"]) == ("good", "good")
    assert good["kubelet.gates"] == "unknown"
    static = results(Reading((Part("/a", {}),), {"cpu": "static", "memory": "Static"}))
    assert (static["kubelet.cpu-manager"], static["kubelet.memory-manager"]) == ("problem", "problem")


def test_a_policy_that_would_apply_at_the_next_start_is_a_problem() -> None:
    """The kubelet does not start if its state file was written under a different policy."""
    found = results(Reading((Part("/a", {"cpuManagerPolicy": "static"}),), {"cpu": "none"}, "flags"))
    assert found["kubelet.cpu-manager"] == "problem"


def test_allbeta_and_allalpha_apply_to_gates_that_are_not_named() -> None:
    """A gate that is set by name overrides AllBeta and AllAlpha."""
    off = {"AllBeta": False}
    assert results(Reading((Part("/a", {"featureGates": off}),)))["kubelet.gates"] == "problem"
    named = off | {"DRAConsumableCapacity": True}
    assert results(Reading((Part("/a", {"featureGates": named}),)))["kubelet.gates"] == "good"
    published = Config(publish_node_allocatable_resource_mapping=True)
    part = Part("/a", {"featureGates": {"AllAlpha": True}})
    assert results(Reading((part,)), published)["kubelet.gates"] == "good"


def test_an_invalid_value_does_not_affect_other_checks() -> None:
    """The finding names the file that contains the value."""
    kubelet = kubelet_of_reading(Reading((Part("/a", {"reservedSystemCPUs": "9-1"}),), {"cpu": "static"}), REMEDY)
    assert kubelet is not None
    assert kubelet.incomplete is not None
    assert "/a: reservedSystemCPUs" in kubelet.incomplete.why
    assert kubelet.cpu_manager == "static"


def test_without_a_configuration_nothing_is_checked() -> None:
    """A node with neither a document nor a state file shows no trace of a kubelet, so there is no configuration."""
    assert kubelet_of_reading(Reading(incomplete="flags"), REMEDY) is None


@pytest.mark.parametrize(
    "reading",
    [
        Reading(
            (Part("/a", {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0-3"}),), {"memory": "None"}, "flags"
        ),
        Reading((Part("/a", {"featureGates": {"A": False}, "reservedMemory": [{"numaNode": 0}]}),)),
        Reading(running={"cpu": "static"}, incomplete="flags"),
    ],
)
def test_an_archive_returns_the_same_configuration(reading: Reading) -> None:
    """The checks give the same results on the node and on an archive from it."""
    kubelet = kubelet_of_reading(reading, REMEDY)
    assert kubelet is not None
    again = unarchived(archived(kubelet))
    assert archived(again) == archived(kubelet)
    assert again == kubelet
    configz = kubelet_config({"memoryManagerPolicy": "Static"}, "configz")
    assert unarchived(archived(configz)) == configz


def test_a_damaged_archive_is_an_error() -> None:
    """A damaged archive must not be treated as a configuration without settings, which would pass the checks."""
    documents: list[object] = [[], {}, {"settings": []}]
    for document in documents:
        with pytest.raises(ConfigError):
            unarchived(document)
