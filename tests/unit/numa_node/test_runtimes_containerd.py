# SPDX-License-Identifier: Apache-2.0
"""containerd's configuration, from its dump, and from its files according to each release's rules."""

import copy
import tomllib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_node.runtimes.containerd import (
    CRI_OF_1,
    CRI_OF_2,
    NRI,
    RULES,
    Documents,
    EffectiveConfig,
    Release,
    Rules,
    RuntimeConfigError,
    UndeterminedError,
    imports_of,
    read_dump,
    rules_for,
)

from tests.rigs.containerd_files import recorded

OLD, EARLY, MIDDLE, NEW = (1, 7, 27), (2, 0, 1), (2, 1, 9), (2, 3, 4)
ALL = (OLD, EARLY, MIDDLE, NEW)


def read(release: Release, *texts: str) -> EffectiveConfig:
    """Reads files according to a release's rules."""
    (rules,) = rules_for(release)
    return rules.read([(f"/f{number}", tomllib.loads(text)) for number, text in enumerate(texts)])


def cdi(release: Release, *texts: str) -> Any:
    """Returns the value of enable_cdi."""
    effective = read(release, *texts)
    return effective.value(effective.cri, "enable_cdi")


def section(name: str, *lines: str, version: int | None = 2) -> str:
    """Returns a file that has one section."""
    head = "" if version is None else f"version = {version}\n"
    return "\n".join([f'{head}[plugins."{name}"]', *lines])


ON = "enable_cdi = true"
OFF = "enable_cdi = false"
REGISTRY = section(f'{CRI_OF_1}".registry."x', 'config_path = "/x"')


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ((1, 7, 0), "containerd 1.7"),
        ((1, 7, 34), "containerd 1.7"),
        ((2, 0, 0), "containerd 2.0.0 and 2.0.1"),
        ((2, 0, 1), "containerd 2.0.0 and 2.0.1"),
        ((2, 0, 2), "containerd 2.0.2 to 2.2"),
        ((2, 2, 99), "containerd 2.0.2 to 2.2"),
        ((2, 3, 0), "containerd 2.3 and 2.4"),
        ((2, 4, 7), "containerd 2.3 and 2.4"),
        ((1, 6, 20), None),
        ((2, 5, 0), None),
        ((3, 0, 0), None),
    ],
)
def test_each_release_has_its_own_rules(release: Release, name: str | None) -> None:
    """Releases older or newer than the known ones have no rules."""
    assert [one.name for one in rules_for(release)] == ([name] if name else [])
    assert rules_for(None) == RULES


@pytest.mark.parametrize(("release", "expected"), [(OLD, None), (EARLY, True), (MIDDLE, True), (NEW, True)], ids=str)
def test_an_imported_section_replaces_the_whole_section_in_1_7_and_is_merged_in_2(
    release: Release, expected: Any
) -> None:
    """In 1.7, a drop-in that sets one registry key therefore resets config.toml's enable_cdi."""
    assert cdi(release, section(CRI_OF_1, ON), REGISTRY) is expected


@pytest.mark.parametrize("release", ALL)
def test_the_last_file_wins_and_lists_are_replaced(release: Release) -> None:
    """If the last file sets all of the keys in a section, both merge rules have the same result."""
    name = CRI_OF_1
    effective = read(
        release, section(name, ON, 'cdi_spec_dirs = ["/a", "/b"]'), section(name, OFF, 'cdi_spec_dirs = ["/c"]')
    )
    assert effective.value(effective.cri, "enable_cdi") is False
    assert effective.value(effective.cri, "cdi_spec_dirs") == ["/c"]


def test_the_new_section_is_unknown_to_1_7() -> None:
    """The new section's keys have no effect in 1.7. The old section's keys have no effect in a version 3 file, except
    from 2.3 on.
    """
    assert cdi(OLD, section(CRI_OF_2, ON)) is None
    for release in (EARLY, MIDDLE):
        assert cdi(release, section(CRI_OF_1, OFF, version=3)) is None
    assert cdi(NEW, section(CRI_OF_1, OFF, version=3)) is False


def test_2_0_0_replaces_the_new_section_with_the_old_one() -> None:
    """Later releases use the old section only for keys that the new section does not have."""
    main, drop_in = section(CRI_OF_1, 'cdi_spec_dirs = ["/a"]'), section(CRI_OF_2, OFF, version=None)
    assert cdi(EARLY, main, drop_in) is None
    for release in (MIDDLE, NEW):
        assert cdi(release, main, drop_in) is False
        assert read(release, main, drop_in).value(CRI_OF_2, "cdi_spec_dirs") == ["/a"]


def test_the_last_files_version_decides_in_2_0_to_2_2_and_each_files_own_in_2_3() -> None:
    """In 2.0 to 2.2, a version 3 drop-in next to a version 2 config.toml hides config.toml's old section."""
    files = section(CRI_OF_1, OFF), section(NRI, "disable = false", version=3)
    assert cdi(MIDDLE, *files) is None
    assert cdi(NEW, *files) is False
    assert cdi(MIDDLE, *files[::-1]) is False


def test_files_without_a_version_have_short_names_in_1_7_and_no_effect_in_2_0_to_2_2() -> None:
    """Releases 2.0 to 2.2 rename a version 1 file's section but do not use it, whereas 2.3 does."""
    for text in ("[plugins.cri]\nenable_cdi = true", "version = 1\n[plugins.cri]\nenable_cdi = true"):
        assert (cdi(OLD, text), cdi(MIDDLE, text), cdi(NEW, text)) == (True, None, True)
    nri = "[plugins.nri]\ndisable = false"
    assert read(OLD, nri).value("nri", "disable") is False
    assert read(NEW, nri).value(NRI, "disable") is None


def test_the_last_files_version_decides_which_names_are_valid_in_1_7() -> None:
    """A version 2 drop-in next to a version 1 file makes the file's short names invalid, and 1.7 then does not
    start.
    """
    with pytest.raises(UndeterminedError, match="plugin name 'cri'"):
        read(OLD, "[plugins.cri]\nenable_cdi = true", "version = 2")
    assert cdi(OLD, "version = 2", "[plugins.cri]\nenable_cdi = true\n", "version = 1\n") is True


@pytest.mark.parametrize("release", ALL)
def test_the_lists_of_disabled_plugins_are_combined(release: Release) -> None:
    """A drop-in therefore cannot remove a plugin from disabled_plugins."""
    files = f'version = 2\ndisabled_plugins = ["{NRI}"]', "version = 2\ndisabled_plugins = []"
    assert (read(release, *files).has_nri, read(release, *files).has_cri) == (False, True)
    docker = 'disabled_plugins = ["cri"]'
    assert (read(release, docker).has_nri, read(release, docker).has_cri) == (True, False)


@pytest.mark.parametrize(
    ("release", "text", "expected"),
    [
        (OLD, "version = 3", "does not support configuration version 3"),
        (MIDDLE, "version = 4", "do not support configuration version 4"),
        (NEW, "version = 5", "'s configuration version 5"),
        *((one, "version = -1", "version -1") for one in ALL),
        *((one, "version = true", "does not start") for one in ALL),
        *((one, 'version = "2"', "does not start") for one in ALL),
        *((one, "plugins = 1", "does not start") for one in ALL),
        *((one, "disabled_plugins = [1]", "not a string") for one in ALL),
        *((one, "[Plugins]", "differently") for one in ALL),
        *((one, 'version = 2\ndisabled_plugins = ["cri"]', "does not start if") for one in ALL),
        (OLD, 'version = 2\nrequired_plugins = ["cri"]', "does not start if"),
        *((one, f'[plugins.cri]\n[plugins."{CRI_OF_1}"]', "under two names") for one in (EARLY, MIDDLE, NEW)),
    ],
)
def test_files_that_prevent_a_release_from_starting_give_no_result(release: Release, text: str, expected: str) -> None:
    """The reason describes the error in the file, and no setting is guessed."""
    with pytest.raises(UndeterminedError, match=expected):
        read(release, text)


def test_a_key_that_differs_only_in_case_gives_no_result() -> None:
    """The TOML library in 2.x ignores case when it matches names."""
    with pytest.raises(UndeterminedError, match="differently"):
        cdi(MIDDLE, section(CRI_OF_2, "Enable_CDI = false", version=3))
    with pytest.raises(UndeterminedError, match="not a table"):
        cdi(MIDDLE, f'version = 3\n[plugins]\n"{CRI_OF_2}" = 1')


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        (["conf.d/*.toml"], ["/etc/x/conf.d/*.toml"]),
        (["../y.toml", "/a//b/../c.toml", "//z"], ["/etc/y.toml", "/a/c.toml", "/z"]),
        ([""], ["/etc/x"]),
    ],
)
def test_relative_imports_start_at_the_importing_file(imports: list[str], expected: list[str]) -> None:
    """Import paths are relative to the directory of the file that contains them. Paths are cleaned as in Go's
    filepath.
    """
    assert imports_of("/etc/x/config.toml", {"imports": imports}) == expected


@pytest.mark.parametrize("case", recorded(), ids=lambda case: "")
@pytest.mark.parametrize("release", [(1, 7, 24), (2, 1, 9)], ids=str)
def test_files_are_read_as_real_releases_read_them(case: dict[str, Any], release: Release) -> None:
    """Each recorded containerd dump has the values that result from its release's rules, or the defaults. Files that a
    release did not accept are also rejected by the release's rules.
    """
    expected, names = case[".".join(map(str, release))], breadth_first(case["files"])
    (rules,) = rules_for(release)
    files = [(name, tomllib.loads(case["files"][name])) for name in names]
    found, refusal = read_or_refuse(rules, files)
    if found is None:
        # If a section appears under two names, containerd picks one at random, so there is no fixed result to compare
        # with.
        assert expected is None or "under two names" in refusal
        return
    assert expected is not None
    defaults = {"enable_cdi": release >= (2,), "cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"]}
    defaults |= {"disable_hugetlb_controller": True, "disable": release < (2,), "disable_connections": False}
    defaults |= {"socket_path": "/var/run/nri/nri.sock"}
    pairs = {NRI: found.nri, CRI_OF_1 if release < (2,) else CRI_OF_2: found.cri}
    for printed, own in pairs.items():
        # A disabled plugin is printed without its defaults, if at all.
        for key, value in expected.get(printed, {}).items():
            mine = found.value(own, key)
            assert (defaults[key] if mine is None and own not in found.disabled else mine) == value, (printed, key)
    off = {"cri", CRI_OF_1, CRI_OF_2} & set(expected["disabled_plugins"])
    assert found.has_cri is not bool(off if release >= (2,) else CRI_OF_1 not in expected)


def read_or_refuse(rules: Rules, files: Documents) -> tuple[EffectiveConfig | None, str]:
    """Returns the settings that result from the files and the rules, or None and the reason."""
    try:
        return rules.read(files), ""
    except UndeterminedError as error:
        return None, str(error)


def breadth_first(files: dict[str, str]) -> list[str]:
    """Returns the generated files' names in the order in which containerd reads them."""
    order, pending = [], ["config.toml"]
    while pending:
        name = pending.pop(0)
        if name in order:
            continue
        order.append(name)
        for one in tomllib.loads(files[name]).get("imports", []):
            pending += sorted(other for other in files if other.startswith("conf.d/")) if "*" in one else ["more.toml"]
    return order


KEYS = st.sampled_from(["enable_cdi", "cdi_spec_dirs", "x"])
LEAVES = st.booleans() | st.lists(st.sampled_from(["/a", "/b"]), max_size=2)
TABLES = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, max_size=2), max_size=3)
DOCUMENTS = st.lists(
    st.builds(
        lambda table: {"version": 2, "plugins": table}, st.dictionaries(st.sampled_from([CRI_OF_1, NRI]), TABLES)
    ),
    max_size=4,
)


def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Returns all values that are not tables, keyed by path."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return found


@given(DOCUMENTS)
def test_merging_keeps_the_last_value_of_each_key(documents: list[dict[str, Any]]) -> None:
    """In 2.x, each value comes from the last file that has the key. In 1.7, each section comes from the last file that
    has it. The input documents stay unchanged.
    """
    before = copy.deepcopy(documents)
    files = [(str(number), one) for number, one in enumerate(documents)]
    old, new = (rules_for(release)[0].read(files) for release in (OLD, MIDDLE))
    sections = {name: one["plugins"][name] for one in documents for name in one["plugins"]}
    assert old.plugins == sections
    for path, value in leaves(new.plugins).items():
        if path[0] != CRI_OF_2:
            last = [one for one in documents if path in leaves(one["plugins"])][-1]
            assert leaves(last["plugins"])[path] == value
    assert documents == before


@given(st.lists(st.sampled_from(recorded()), min_size=1, max_size=1))
def test_reading_a_file_twice_changes_nothing(cases: list[dict[str, Any]]) -> None:
    """A file that is read again at the end takes precedence over the files before it. If it was already the last file,
    nothing changes.
    """
    names = breadth_first(cases[0]["files"])
    files = [(name, tomllib.loads(cases[0]["files"][name])) for name in names]
    for rules in RULES:
        try:
            once, twice = rules.read(files), rules.read([*files, files[-1]])
        except UndeterminedError:
            continue
        assert once == twice


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(["cri", CRI_OF_1, CRI_OF_2, NRI, "disable", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cri", "nri", CRI_OF_1, CRI_OF_2, NRI, "enable_cdi", "disable"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
TOP = st.dictionaries(
    st.sampled_from(["version", "plugins", "disabled_plugins", "imports", "Version"]), ANY, max_size=4
)


@given(st.lists(TOP, max_size=3))
def test_malformed_files_raise_only_undetermined_error(documents: list[dict[str, Any]]) -> None:
    for rules in RULES:
        with suppress(UndeterminedError):
            effective = rules.read([("/f", one) for one in documents])
            effective.value(effective.cri, "enable_cdi")
            effective.value(effective.nri, "default_validator", "enable")
    for one in documents:
        with suppress(UndeterminedError):
            imports_of("/f", one)


def test_a_dump_from_1_7_may_have_short_names_in_disabled_plugins() -> None:
    """containerd prints the list as it appears in a version 1 file, and prints no section for the plugin."""
    dump = read_dump(f'version = 2\ndisabled_plugins = ["cri"]\n[plugins."{NRI}"]\ndisable = true\n')
    assert (dump.is_disabled(CRI_OF_1), dump.is_disabled(NRI)) == (True, False)
    with pytest.raises(RuntimeConfigError, match="use the output of"):
        read_dump(f'version = 2\n[plugins."{NRI}"]\ndisable = true\n')


def test_a_dump_from_2_0_is_recognised() -> None:
    """Releases 2.0.0 to 2.0.5 print a dump without a version 2 file's settings. Only 2.0 prints plugin_dir."""
    sections = f'[plugins."{NRI}"]\n[plugins."{CRI_OF_2}"]\n'
    assert read_dump(f'version = 3\nplugin_dir = ""\n{sections}').of_2_0
    assert not read_dump(f"version = 3\n{sections}").of_2_0
    former = f'[plugins."{NRI}"]\n[plugins."{CRI_OF_1}"]\n'
    assert not read_dump(f'version = 2\nplugin_dir = ""\n{former}').of_2_0
