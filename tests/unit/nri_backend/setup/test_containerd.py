# SPDX-License-Identifier: Apache-2.0
import copy
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.setup.containerd import Change, manual_changes, missing_settings, warnings, write_drop_in
from numa_node.runtimes.containerd import Dump, RuntimeConfigError, read_dump

from tests.fakes.containerd_dump import CRI_2, CRI_3, NRI, Document, dump, merge

RELEASES = ("1.7", "2.0", "2.1", "2.2", "2.3")
VALIDATING = ("2.2", "2.3")
CDI = "/var/run/cdi"


def as_read(document: Document) -> Dump:
    """Returns the dump after formatting it as TOML and parsing it again."""
    settings = [Change((plugin,), section, None) for plugin, section in document["plugins"].items()]
    plugins = write_drop_in(Dump(3, {}, ()), settings)
    top = {key: value for key, value in document.items() if key != "plugins"}
    return read_dump("".join(f"{key} = {json.dumps(value)}\n" for key, value in top.items()) + plugins)


def missing(document: Document, **options: Any) -> list[str]:
    """Returns one line for each missing setting."""
    return [str(one) for one in missing_settings(as_read(document), CDI, **options)]


def test_only_containerd_1_7_lacks_settings_by_default() -> None:
    """In containerd 1.7, CDI, NRI and the hugetlb controller are off. In containerd 2, the hugetlb controller may stay
    off, since the backend writes the limits.
    """
    assert [line for release in RELEASES[1:] for line in missing(dump(release))] == []
    assert missing(dump("1.7")) == [
        f'[plugins."{CRI_2}"] enable_cdi is false, must be true',
        f'[plugins."{CRI_2}"] disable_hugetlb_controller is true, must be false',
        f'[plugins."{NRI}"] disable is true, must be false',
    ]
    elsewhere = missing_settings(as_read(dump("2.1")), "/srv/cdi")
    assert [one.required for one in elsewhere] == [["/etc/cdi", "/var/run/cdi", "/srv/cdi"]]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("nri", "cri", "key"),
    [
        ({"disable": True}, {}, "disable"),
        ({"disable_connections": True}, {}, "disable_connections"),
        ({"plugin_request_timeout": "1500ms"}, {}, "plugin_request_timeout"),
        ({"plugin_registration_timeout": "1m0.5s"}, {}, None),
        ({"plugin_registration_timeout": "4.999s"}, {}, "plugin_registration_timeout"),
        ({}, {"enable_cdi": False}, "enable_cdi"),
        ({}, {"cdi_spec_dirs": ["/etc/cdi"]}, "cdi_spec_dirs"),
        ({}, {"cdi_spec_dirs": []}, "cdi_spec_dirs"),
        ({}, {"cdi_spec_dirs": ["/run/cdi/"]}, None),
    ],
)
def test_the_drop_in_sets_the_missing_settings_and_nothing_else(
    release: str, nri: Document, cri: Document, key: str | None
) -> None:
    """Once the drop-in is merged according to the release's rules, nothing is missing and no other key has changed."""
    before = dump(release, nri, cri)
    lacking = missing_settings(as_read(before), CDI)
    assert (key in {one.path[-1] for one in lacking}) is (key is not None)
    drop_in = tomllib.loads(write_drop_in(as_read(before), lacking)) if lacking else {"plugins": {}}
    # For containerd 2, the drop-in contains only the missing keys and no version line, so it fits a config.toml of any
    # version.
    assert release == "1.7" or ("version" not in drop_in and sum(map(len, drop_in["plugins"].values())) == len(lacking))
    after = merge(release, copy.deepcopy(before), drop_in)
    assert missing(after) == []
    expected = copy.deepcopy(before)
    for one in lacking:
        expected["plugins"][one.path[0]][one.path[1]] = one.required
    assert after == expected


@pytest.mark.parametrize("release", VALIDATING)
def test_the_plugin_can_be_required(release: str) -> None:
    """The default validator requires the plugin by its name without the index, in addition to plugins that were already
    required.
    """
    others = {"default_validator": {"enable": False, "required_plugins": ["other"], "reject_oci_hook_adjustment": True}}
    before = dump(release, others)
    assert missing(before) == []
    settings = missing_settings(as_read(before), CDI, require_plugin=True)
    drop_in = tomllib.loads(write_drop_in(as_read(before), settings))
    assert drop_in["plugins"] == {
        NRI: {
            "default_validator": {
                "enable": True,
                "required_plugins": ["other", "dra-driver-numa"],
                "tolerate_missing_plugins_annotation": "dra-driver-numa/tolerate-missing",
            }
        }
    }
    assert missing(merge(release, before, drop_in), require_plugin=True) == []


@pytest.mark.parametrize("release", [one for one in RELEASES if one not in VALIDATING])
def test_releases_that_cannot_require_plugins_must_be_updated(release: str) -> None:
    """These releases would ignore the ``default_validator`` table, and containers would start without the plugin."""
    assert "2.2 or later" in manual_changes(as_read(dump(release)), require_plugin=True)[0]
    assert not [line for line in missing(dump(release), require_plugin=True) if "validator" in line]
    assert manual_changes(as_read(dump(release))) == []


@pytest.mark.parametrize("release", ["1.7", "2.3"])
def test_a_disabled_plugin_requires_a_manual_change(release: str) -> None:
    """A disabled plugin has no section in the dump, and a drop-in cannot remove it from disabled_plugins."""
    document = dump(release) | {"disabled_plugins": [NRI]}
    del document["plugins"][NRI]
    assert manual_changes(as_read(document), require_plugin=True) == [
        f'disabled_plugins contains "{NRI}": remove it from the file that sets it; drop-ins can only extend the list'
    ]
    assert not [line for line in missing(document) if NRI in line]


def test_an_nri_socket_at_another_path_is_a_warning() -> None:
    """The driver must be configured with the same path. /run and /var/run count as the same directory."""
    assert warnings(as_read(dump("2.1", {"socket_path": "/run/nri/nri.sock"}))) == []
    (warning,) = warnings(as_read(dump("2.1", {"socket_path": "/run/other.sock"})))
    assert (
        warning
        == "containerd's NRI socket is '/run/other.sock': set nriSocket in this driver's configuration to that path"
    )


def test_a_dump_from_2_0_may_lack_settings() -> None:
    """Dumps from releases 2.0.0 to 2.0.5 omit the settings that come from a 1.7 configuration. A dump from 2.0 can be
    recognized by plugin_dir, which no other release prints.
    """
    (warning,) = warnings(as_read(dump("2.0") | {"plugin_dir": ""}))
    assert "containerd config migrate" in warning


def test_disabled_plugins_of_1_7_may_have_short_names() -> None:
    """A version 1 file uses short names, and the dump repeats them."""
    document = dump("1.7") | {"disabled_plugins": ["cri"]}
    del document["plugins"][CRI_2]
    assert manual_changes(as_read(document)) == [
        'disabled_plugins contains "cri": remove it from the file that sets it; drop-ins can only extend the list'
    ]
    assert not [line for line in missing(document) if CRI_2 in line]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version = 2\n[\n", "is not TOML"),
        ("", "has version 'None'; supported versions are 2, 3, 4"),
        ("version = 1\n", "has version '1'"),
        ("version = 5\n", "has version '5'"),
        ("version = 3\n", "use the output of .containerd config dump."),
        ("version = 3\nplugins = 1\n", "has version '3'"),
        ("a = " + "[" * 100_000, "is not TOML"),
    ],
)
def test_input_that_is_not_a_dump_is_rejected(text: str, expected: str) -> None:
    """One example is a configuration file, which does not necessarily contain the settings that containerd uses."""
    with pytest.raises(RuntimeConfigError, match=expected):
        read_dump(text)


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(st.characters(codec="utf-8"))
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=5))
def test_a_repeated_section_parses_to_the_same_values(section: Document) -> None:
    """A drop-in for containerd 1.7 repeats the dump's section, with any names and values."""
    setting = Change((NRI, "disable"), False, True)
    text = write_drop_in(Dump(2, {NRI: section}, ()), [setting])
    assert tomllib.loads(text) == {"version": 2, "plugins": {NRI: section | {"disable": False}}}


KEYS = st.sampled_from(["enable_cdi", "cdi_spec_dirs", "disable", "plugin_request_timeout", "default_validator", "x"])
SECTION = st.dictionaries(KEYS | st.just("required_plugins"), VALUES, max_size=4)


@given(
    st.sampled_from([2, 3, 4]) | VALUES,
    st.dictionaries(st.sampled_from([NRI, CRI_2, CRI_3]), SECTION | VALUES, max_size=3) | VALUES,
    st.lists(st.sampled_from([NRI, CRI_2, CRI_3]), max_size=2) | VALUES,
)
def test_any_dump_is_either_rejected_or_gets_a_valid_drop_in(version: Any, plugins: Any, disabled: Any) -> None:
    document = {"version": version, "plugins": plugins, "disabled_plugins": disabled}
    # Each value is also written as the only entry of a list, since a drop-in can contain tables within lists.
    lists = [Change(("dump", key), [value], None) for key, value in document.items()]
    text = write_drop_in(Dump(3, {}, ()), lists)
    assert tomllib.loads(text)["plugins"]["dump"] == {key: [value] for key, value in document.items()}
    top = [line.replace(" = [", " = ", 1)[:-1] for line in text.splitlines() if line.split(" = ")[0] in document]
    try:
        dumped = read_dump("\n".join(top))
    except RuntimeConfigError:
        return
    lacking = missing_settings(dumped, CDI, require_plugin=True)
    assert tomllib.loads(write_drop_in(dumped, lacking)).keys() <= {"version", "plugins"}
    manual_changes(dumped, require_plugin=True)
    warnings(dumped)
