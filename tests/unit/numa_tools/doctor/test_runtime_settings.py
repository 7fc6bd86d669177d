# SPDX-License-Identifier: Apache-2.0
"""A runtime's settings, from its files or its output. A value is clear only if every release that may be running would
use it.
"""

import json
import tomllib
from typing import Any

import pytest
from numa_node.runtimes.containerd import CRI_OF_1, CRI_OF_2, NRI, Release, RuntimeConfigError
from numa_node.runtimes.settings import CONTAINERD, CRI_O
from numa_tools.doctor.runtime_settings import (
    CriDisabledError,
    RuntimeConfig,
    Unclear,
    containerd_settings,
    crio_settings,
    printed_settings,
    settings_report,
)

from tests.fakes.containerd_dump import dump
from tests.rigs.containerd_files import toml_text

ON = f'[plugins."{NRI}"]\ndisable = false\n[plugins."{CRI_OF_1}"]\nenable_cdi = true\n'
BOTH = f'{ON}[plugins."{CRI_OF_2}"]\nenable_cdi = true\n'


def of(release: Release | None, *texts: str) -> dict[str, Any]:
    """Returns the settings from containerd's files."""
    return containerd_settings([(f"/f{number}", tomllib.loads(text)) for number, text in enumerate(texts)], release)


def crio(release: Release | None, *texts: str) -> dict[str, Any]:
    """Returns the settings from CRI-O's files."""
    return crio_settings([(f"/f{number}", tomllib.loads(text)) for number, text in enumerate(texts)], release)


@pytest.mark.parametrize(
    ("release", "nri", "connections", "cdi"),
    [((1, 7, 27), False, True, False), ((2, 1, 4), True, True, True), ((2, 3, 0), True, True, True)],
)
def test_a_key_that_is_not_set_has_the_releases_default(
    release: Release, nri: bool, connections: bool, cdi: bool
) -> None:
    """In 1.7, NRI and CDI are off by default."""
    found = of(release, "version = 2")
    assert (found["nri"], found["connections"], found["cdi"]) == (nri, connections, cdi)
    assert (found["socket"], found["cdi_directories"]) == ("/var/run/nri/nri.sock", ["/etc/cdi", "/var/run/cdi"])
    assert (found["validator"], found["required"], found["tolerated"]) == (False, [], "")


def test_without_a_known_release_all_releases_must_agree_on_a_value() -> None:
    """If a key is set where every release looks for it, its value is clear. A default that differs between releases is
    unclear, and the message names both values.
    """
    found = of(None, f"version = 2\n{ON}")
    assert (found["nri"], found["cdi"]) == (True, True)
    found = of(None, f"version = 2\n[plugins.'{NRI}']\nplugin_request_timeout = '5s'")
    reason = (
        "the runtime's release is unknown, and the value is false for containerd 1.7 and "
        "true for containerd 2.0.0 and 2.0.1"
    )
    assert found["nri"].reason.startswith(reason)


def test_a_version_that_a_release_cannot_read_excludes_that_release() -> None:
    """Release 1.7 does not read version 3 files, and only 2.3 and later read version 4."""
    assert of(None, "version = 3")["nri"] is True
    assert of(None, "version = 4")["cdi"] is True
    assert isinstance(of((1, 7, 27), "version = 3")["nri"], Unclear)


@pytest.mark.parametrize("release", [(1, 6, 8), (2, 9, 0), (3, 0, 0)])
def test_all_settings_are_unclear_for_a_release_with_unknown_rules(release: Release) -> None:
    """Nothing is assumed about the release, whatever the files contain."""
    found = of(release, f"version = 2\n{ON}")
    assert {type(one) for one in found.values()} == {Unclear}
    assert ".".join(map(str, release)) in found["nri"].reason


@pytest.mark.parametrize(
    "text",
    ['disabled_plugins = ["cri"]', f'version = 2\ndisabled_plugins = ["{CRI_OF_1}"]'],
)
def test_a_containerd_without_cri_is_not_the_kubelets_runtime(text: str) -> None:
    """Docker's package installs a file that disables CRI."""
    for release in (None, (1, 7, 27), (2, 1, 4)):
        with pytest.raises(CriDisabledError):
            of(release, text)


def test_a_release_in_which_cri_is_disabled_is_ruled_out() -> None:
    """2.x would find the name of its CRI plugin in the list of disabled plugins and would not run CRI, so the kubelet's
    containerd can only be 1.7.
    """
    found = of(None, f'version = 2\ndisabled_plugins = ["{CRI_OF_2}"]')
    assert (found["nri"], found["cdi"]) == (False, False)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("disable = 1", "nri"),
        ("socket_path = ['/a']", "socket"),
        ("default_validator = true", "validator"),
        ("[plugins.'io.containerd.nri.v1.nri'.default_validator]\nrequired_plugins = [1]", "required"),
        ("[plugins.'io.containerd.nri.v1.nri'.default_validator]\nrequired_plugins = 'a'", "required"),
        ("Disable = true", "nri"),
    ],
)
def test_a_value_of_the_wrong_type_is_unclear(lines: str, name: str) -> None:
    """If the value has the wrong type, containerd does not load the plugin."""
    found = of((2, 2, 0), f"version = 3\n[plugins.'{NRI}']\n{lines}")
    assert isinstance(found[name], Unclear)
    assert found["cdi"] is True


def test_an_empty_socket_path_means_the_default() -> None:
    """Neither runtime passes an empty path on to NRI."""
    assert of((2, 2, 0), f"version = 3\n[plugins.'{NRI}']\nsocket_path = ''")["socket"] == "/var/run/nri/nri.sock"
    files = "[crio.nri]\nnri_listen = '/run/a'", "[crio.nri]\nnri_listen = ''"
    assert crio((1, 34, 0), *files)["socket"] == "/var/run/nri/nri.sock"


def test_the_hugetlb_controller_matters_only_on_1_7() -> None:
    """The backend writes the limits on every release. In 2.x, the controller is off by default and may stay off."""
    text = f"version = 2\n[plugins.'{CRI_OF_1}']\ndisable_hugetlb_controller = false"
    assert (of((1, 7, 27), text)["hugetlb"], of((1, 7, 27), "version = 2")["hugetlb"]) == (True, False)
    assert of((2, 1, 0), "version = 2")["hugetlb"] is True


def test_each_cri_o_file_replaces_the_keys_that_it_contains() -> None:
    """Lists are replaced too. NRI and CDI are on by default."""
    found = crio((1, 34, 0))
    assert (found["nri"], found["connections"], found["cdi"]) == (True, True, True)
    found = crio(
        (1, 34, 0),
        "[crio.nri]\nenable_nri = false\nnri_listen = '/run/a'\n[crio.runtime]\ncdi_spec_dirs = ['/a', '/b']",
        "[crio.nri]\nenable_nri = true\nnri_disable_connections = true\n[crio.runtime]\ncdi_spec_dirs = ['/c']",
    )
    assert (found["nri"], found["connections"], found["socket"]) == (True, False, "/run/a")
    assert found["cdi_directories"] == ["/c"]


def test_cri_o_supports_the_validator_since_1_34() -> None:
    """Earlier releases ignore the table, and without a known release the setting is unclear."""
    text = "[crio.nri.default_validator]\nnri_enable_default_validator = true\nnri_validator_required_plugins = ['x']"
    assert (crio((1, 34, 1), text)["validator"], crio((1, 34, 1), text)["required"]) == (True, ["x"])
    assert (crio((1, 33, 1), text)["validator"], crio((1, 33, 1), text)["required"]) == (False, [])
    assert isinstance(crio(None, text)["validator"], Unclear)
    assert crio(None)["validator"] is False


@pytest.mark.parametrize(
    "text",
    ["crio = 1", "[crio]\nnri = 1", "[crio.nri]\nenable_nri = 1", "[crio.nri]\nEnable_NRI = true", "[Crio.nri]"],
)
def test_ambiguous_cri_o_files_are_unclear(text: str) -> None:
    """CRI-O's TOML library ignores case when it matches names."""
    assert isinstance(crio((1, 34, 0), text)["nri"], Unclear)


@pytest.mark.parametrize("release", [(1, 29, 3), (1, 99, 0)])
def test_all_settings_are_unclear_for_an_unknown_cri_o_release(release: Release) -> None:
    """1.30 is the first supported release."""
    assert {type(one) for one in crio(release).values()} == {Unclear}


@pytest.mark.parametrize(("release", "on"), [("1.7", False), ("2.1", True), ("2.2", True), ("2.3", True)])
def test_a_dump_contains_the_settings_in_use(release: str, on: bool) -> None:
    """No merge rules are needed."""
    software, found, _ = printed_settings(toml_text(dump(release)))
    assert (software, found["nri"], found["cdi"], found["connections"]) == (CONTAINERD, on, on, True)
    assert (found["hugetlb"], found["validator"]) == (on, False)


def test_a_key_that_a_dump_does_not_contain_is_unclear() -> None:
    """Every release prints these keys, so output without them is not a dump."""
    document = dump("2.2")
    del document["plugins"][NRI]["disable"]
    _, found, _ = printed_settings(toml_text(document))
    assert (type(found["nri"]), found["cdi"]) == (Unclear, True)


def test_cri_os_output_is_recognised() -> None:
    """The output contains every key, though crio config prints keys with default values as comments."""
    text = "[crio]\n[crio.runtime]\ncdi_spec_dirs = ['/a']\n[crio.nri]\nenable_nri = false\n"
    text += "nri_listen = '/run/a'\nnri_disable_connections = false\n"
    software, found, _ = printed_settings(text)
    assert (software, found["nri"], found["cdi"], found["cdi_directories"]) == (CRI_O, False, True, ["/a"])
    _, found, _ = printed_settings("[crio]\n[crio.nri]\n# enable_nri = true\n")
    assert isinstance(found["nri"], Unclear)


def test_the_report_for_the_archive_contains_plain_values() -> None:
    """For an unclear setting, the report gives the reason."""
    runtime = RuntimeConfig(CONTAINERD, "/f", "command", of(None, "version = 2"), (2, 1, 4), ("/f",))
    report = json.loads(json.dumps(settings_report(runtime)))
    assert (report["release"], report["files"], report["settings"]["validator"]) == ("2.1.4", ["/f"], False)
    assert "unknown" in report["settings"]["nri"]["unclear"]


@pytest.mark.parametrize("text", ["[", "", "version = 2", "a = " + "[" * 100_000, json.dumps({})])
def test_input_that_is_not_the_output_of_a_runtime_is_refused(text: str) -> None:
    """For example, a config.toml is refused, because it does not contain the defaults."""
    with pytest.raises(RuntimeConfigError):
        printed_settings(text)
