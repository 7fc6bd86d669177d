# SPDX-License-Identifier: Apache-2.0
import copy
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.setup.containerd import Setting, faults, missing_settings, notes, write_drop_in
from numa_node.runtimes.containerd import Dump, RuntimeConfigError, read_dump

from tests.fakes.containerd_dump import CRI_2, CRI_3, NRI, Document, dump, merge

RELEASES = ("1.7", "2.0", "2.1", "2.2", "2.3")
VALIDATING = ("2.2", "2.3")
CDI = "/var/run/cdi"


def as_read(document: Document) -> Dump:
    """The dump after a way through TOML."""
    settings = [Setting((plugin,), section, None) for plugin, section in document["plugins"].items()]
    plugins = write_drop_in(Dump(3, {}, ()), settings)
    top = {key: value for key, value in document.items() if key != "plugins"}
    return read_dump("".join(f"{key} = {json.dumps(value)}\n" for key, value in top.items()) + plugins)


def missing(document: Document, **options: Any) -> list[str]:
    """What is said to be missing."""
    return [str(one) for one in missing_settings(as_read(document), CDI, **options)]


def test_what_releases_lack_by_default() -> None:
    """1.7 has CDI, NRI and the hugetlb controller off; that of 2 stays as it is, since the backend writes limits."""
    assert [line for release in RELEASES[1:] for line in missing(dump(release))] == []
    assert missing(dump("1.7")) == [
        f'[plugins."{CRI_2}"] enable_cdi is false, must be true',
        f'[plugins."{CRI_2}"] disable_hugetlb_controller is true, must be false',
        f'[plugins."{NRI}"] disable is true, must be false',
    ]
    elsewhere = missing_settings(as_read(dump("2.1")), "/srv/cdi")
    assert [one.wanted for one in elsewhere] == [["/etc/cdi", "/var/run/cdi", "/srv/cdi"]]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("nri_says", "cri_says", "key"),
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
def test_the_drop_in_sets_what_is_missing_and_nothing_else(
    release: str, nri_says: Document, cri_says: Document, key: str | None
) -> None:
    """With the drop-in, merged as that release merges, the check finds nothing, and every other key is as it was."""
    before = dump(release, nri_says, cri_says)
    lacking = missing_settings(as_read(before), CDI)
    assert (key in {one.path[-1] for one in lacking}) is (key is not None)
    drop_in = tomllib.loads(write_drop_in(as_read(before), lacking)) if lacking else {"plugins": {}}
    # For 2 it has the missing keys alone, and no version line, so that it goes with a config.toml of any version.
    assert release == "1.7" or ("version" not in drop_in and sum(map(len, drop_in["plugins"].values())) == len(lacking))
    after = merge(release, copy.deepcopy(before), drop_in)
    assert missing(after) == []
    expected = copy.deepcopy(before)
    for one in lacking:
        expected["plugins"][one.path[0]][one.path[1]] = one.wanted
    assert after == expected


@pytest.mark.parametrize("release", VALIDATING)
@pytest.mark.fault("security S9")
def test_the_plugin_can_be_required(release: str) -> None:
    """The default validator gets the plugin's name without its index, beside others, and the annotation of our pods."""
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
def test_older_releases_cannot_require_plugins_and_are_told_so(release: str) -> None:
    """A table that an old containerd does not know would be ignored, and the node would stay open."""
    assert "2.2 or later" in faults(as_read(dump(release)), require_plugin=True)[0]
    assert not [line for line in missing(dump(release), require_plugin=True) if "validator" in line]
    assert faults(as_read(dump(release))) == []


@pytest.mark.parametrize("release", ["1.7", "2.3"])
def test_a_plugin_that_is_switched_off_is_a_fault(release: str) -> None:
    """A dump has no section of it, and a drop-in cannot take a name out of the list."""
    document = dump(release) | {"disabled_plugins": [NRI]}
    del document["plugins"][NRI]
    assert faults(as_read(document), require_plugin=True) == [
        f'disabled_plugins names "{NRI}": take it out of the file that says so; drop-ins only add to that list'
    ]
    assert not [line for line in missing(document) if NRI in line]


def test_another_nri_socket_is_noted() -> None:
    """The driver has to be told of a socket that is not at the usual place; /run is /var/run."""
    assert notes(as_read(dump("2.1", {"socket_path": "/run/nri/nri.sock"}))) == []
    (note,) = notes(as_read(dump("2.1", {"socket_path": "/run/other.sock"})))
    assert note == "containerd's NRI socket is '/run/other.sock': set nriSocket of this driver to it"


def test_a_dump_of_2_0_may_lack_settings() -> None:
    """2.0.0 to 2.0.5 do not take over the sections of 1.7 when they print a dump; only 2.0 prints plugin_dir."""
    (note,) = notes(as_read(dump("2.0") | {"plugin_dir": ""}))
    assert "containerd config migrate" in note


def test_short_names_switch_plugins_off_in_1_7() -> None:
    """A file of version 1 has them, and the dump repeats them."""
    document = dump("1.7") | {"disabled_plugins": ["cri"]}
    del document["plugins"][CRI_2]
    assert faults(as_read(document)) == [
        'disabled_plugins names "cri": take it out of the file that says so; drop-ins only add to that list'
    ]
    assert not [line for line in missing(document) if CRI_2 in line]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version = 2\n[\n", "is not TOML"),
        ("", "has version 'None'; known are 2, 3, 4"),
        ("version = 1\n", "has version '1'"),
        ("version = 5\n", "has version '5'"),
        ("version = 3\n", "must be what .containerd config dump. prints"),
        ("version = 3\nplugins = 1\n", "has version '3'"),
        ("a = " + "[" * 100_000, "is not TOML"),
    ],
)
def test_what_is_not_a_dump_is_refused(text: str, expected: str) -> None:
    """A configuration file alone does not say what containerd uses."""
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
def test_whatever_a_section_says_is_written_back(section: Document) -> None:
    """The section of containerd 1.7 that a drop-in repeats reads as it was, whatever names and values it has."""
    setting = Setting((NRI, "disable"), False, True)
    text = write_drop_in(Dump(2, {NRI: section}, ()), [setting])
    assert tomllib.loads(text) == {"version": 2, "plugins": {NRI: section | {"disable": False}}}


KEYS = st.sampled_from(["enable_cdi", "cdi_spec_dirs", "disable", "plugin_request_timeout", "default_validator", "x"])
SECTION = st.dictionaries(KEYS | st.just("required_plugins"), VALUES, max_size=4)


@given(
    st.sampled_from([2, 3, 4]) | VALUES,
    st.dictionaries(st.sampled_from([NRI, CRI_2, CRI_3]), SECTION | VALUES, max_size=3) | VALUES,
    st.lists(st.sampled_from([NRI, CRI_2, CRI_3]), max_size=2) | VALUES,
)
def test_odd_dumps_are_refused_or_judged(version: Any, plugins: Any, disabled: Any) -> None:
    """Whatever a file says: an error that names what is wrong, or a drop-in that can be read."""
    document = {"version": version, "plugins": plugins, "disabled_plugins": disabled}
    # As one entry each, in the form that lists of tables have in a drop-in.
    lists = [Setting(("dump", key), [value], None) for key, value in document.items()]
    text = write_drop_in(Dump(3, {}, ()), lists)
    assert tomllib.loads(text)["plugins"]["dump"] == {key: [value] for key, value in document.items()}
    top = [line.replace(" = [", " = ", 1)[:-1] for line in text.splitlines() if line.split(" = ")[0] in document]
    try:
        dumped = read_dump("\n".join(top))
    except RuntimeConfigError:
        return
    lacking = missing_settings(dumped, CDI, require_plugin=True)
    assert tomllib.loads(write_drop_in(dumped, lacking)).keys() <= {"version", "plugins"}
    faults(dumped, require_plugin=True)
    notes(dumped)
