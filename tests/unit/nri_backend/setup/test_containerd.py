# SPDX-License-Identifier: Apache-2.0
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.setup.containerd import RuntimeConfigError, notes, read_runtime_file, switch_on

NRI = "io.containerd.nri.v1.nri"
CRI_2 = "io.containerd.grpc.v1.cri"
CRI_3 = "io.containerd.cri.v1.runtime"
CDI = "/var/run/cdi"

STOCK_1_7 = f"""# Written by an installer.
version = 2
[plugins]
  [plugins."{CRI_2}"]
    sandbox_image = "pause:3.9"   # pinned
    disable_hugetlb_controller = true
    enable_cdi = false
    [plugins."{CRI_2}".containerd]
      snapshotter = "overlayfs"
  [plugins."{NRI}"]
    disable = true
    disable_connections = false
    socket_path = "/var/run/nri/nri.sock"
"""


def changed(text: str) -> tuple[dict[str, Any], list[str]]:
    """What the file says afterwards, and what is told."""
    after, changes = switch_on([read_runtime_file("config.toml", text)], CDI)
    return tomllib.loads(after), changes


def test_containerd_1_7_gets_all_three() -> None:
    """In a file of version 2 CDI, NRI and the hugetlb controller are switched on in place; all else stays."""
    after, changes = switch_on([read_runtime_file("config.toml", STOCK_1_7)], CDI)
    assert after == STOCK_1_7.replace("enable_cdi = false", "enable_cdi = true").replace(
        "disable_hugetlb_controller = true", "disable_hugetlb_controller = false"
    ).replace("disable = true", "disable = false")
    assert changes == [
        f'[plugins."{CRI_2}"] enable_cdi = true (was false)',
        f'[plugins."{CRI_2}"] disable_hugetlb_controller = false (was true)',
        f'[plugins."{NRI}"] disable = false (was true)',
    ]


def test_containerd_2_has_other_names_and_keeps_its_hugetlb_setting() -> None:
    """In a file of version 3 the CRI plugin has another name, and limits are ours to write (ADR 0002)."""
    after, changes = changed(f"version = 3\n[plugins.'{CRI_3}']\ndisable_hugetlb_controller = true\n")
    assert after["plugins"] == {
        CRI_3: {"disable_hugetlb_controller": True, "enable_cdi": True},
        NRI: {"disable": False, "disable_connections": False},
    }
    assert changes[0] == f'[plugins."{CRI_3}"] enable_cdi = true (was not said)'


@pytest.mark.parametrize("version", [2, 3, 4])
def test_doing_it_again_changes_nothing(version: int) -> None:
    """The result needs no change; nothing is told then."""
    once, _ = switch_on([read_runtime_file("a", f"version = {version}\n")], CDI)
    assert switch_on([read_runtime_file("a", once)], CDI) == (once, [])


def test_trap_7_7_cdi_is_not_taken_for_granted_on_containerd_1_7() -> None:
    """containerd 1.7 has CDI off unless its file says otherwise, and then every pod with a claim fails."""
    after, _ = changed("version = 2\n")
    assert after["plugins"][CRI_2]["enable_cdi"] is True


def test_a_drop_in_replaces_whole_sections() -> None:
    """What an imported file says of a plugin replaces all that the first one says; it is named when it undoes CDI."""
    main = read_runtime_file("config.toml", 'version = 2\nimports = ["conf.d/*.toml"]\n')
    drop_in = f"version = 2\n[plugins.'{CRI_2}'.containerd]\nx = 1\n"
    with pytest.raises(RuntimeConfigError, match=r"nvidia.toml, imported by config.toml, .* run .* on nvidia"):
        switch_on([main, read_runtime_file("nvidia.toml", drop_in)], CDI)
    mended, _ = switch_on([read_runtime_file("nvidia.toml", drop_in)], CDI)
    after, changes = switch_on([main, read_runtime_file("nvidia.toml", mended)], CDI)
    assert (after, changes) == (main.text, [])


OFF = f"""version = 3
[plugins.'{NRI}']
disable = true
[plugins.'{CRI_3}']
enable_cdi = false
cdi_spec_dirs = ['/etc/cdi']
"""


def test_containerd_2_merges_key_by_key() -> None:
    """What a drop-in's sections do not speak of stays as the first file says: that is where it is switched on."""
    main = read_runtime_file("config.toml", OFF)
    speaks = f"version = 3\n[plugins.'{NRI}']\nplugin_path = '/x'\n[plugins.'{CRI_3}']\ncdi_spec_dirs = ['{CDI}']\n"
    after, changes = switch_on([main, read_runtime_file("gpu.toml", speaks)], CDI)
    assert tomllib.loads(after)["plugins"][NRI]["disable"] is False
    assert [change.rpartition(" (")[2] for change in changes] == ["was false)", "was true)", "was not said)"]


def test_a_drop_in_that_switches_it_off_is_named() -> None:
    """The last file that says a key has the last word on it."""
    main = read_runtime_file("config.toml", "version = 3\n")
    with pytest.raises(RuntimeConfigError) as caught:
        switch_on([main, read_runtime_file("off.toml", OFF)], CDI)
    its = "off.toml, imported by config.toml, has the last word on"
    assert str(caught.value).split("; ") == [
        "off.toml: cdi_spec_dirs lacks /var/run/cdi, where the claims' files are: add it to ['/etc/cdi']",
        *(f'{its} [plugins."{section}"]: run this command on off.toml too' for section in (CRI_3, NRI)),
    ]


def test_an_imported_file_may_say_no_version() -> None:
    """containerd takes its sections by their names; on its own it would be of version 1."""
    main = read_runtime_file("config.toml", "version = 2\n")
    silent = read_runtime_file("gpu.toml", f"[plugins.'{CRI_2}']\nenable_cdi = true\n", main)
    with pytest.raises(RuntimeConfigError, match=r"gpu\.toml, imported by .*: give it the line 'version = 2' and run"):
        switch_on([main, silent], CDI)


def test_version_2_is_right_on_either_containerd() -> None:
    """1.7 takes the drop-in's section whole, with the default directories in it; 2.x still has those of the first."""
    first = f"version = 2\n[plugins.'{CRI_2}']\ncdi_spec_dirs = ['/etc/cdi']\n[plugins.'{NRI}']\nsocket_path = '/a'\n"
    last = f"[plugins.'{CRI_2}']\nenable_cdi = true\ndisable_hugetlb_controller = false\n"
    main = read_runtime_file("config.toml", first)
    chain = [main, read_runtime_file("gpu.toml", last, main)]
    with pytest.raises(RuntimeConfigError, match=r"config\.toml: cdi_spec_dirs lacks"):
        switch_on(chain, CDI)
    with pytest.raises(RuntimeConfigError, match=r"gpu\.toml: cdi_spec_dirs lacks"):
        switch_on([read_runtime_file("config.toml", first.replace("/etc/cdi", "/srv/cdi")), chain[1]], "/srv/cdi")
    silent = read_runtime_file("nri.toml", f"version = 2\n[plugins.'{NRI}']\ndisable = false\n")
    assert notes([*chain, silent]) == ["containerd's NRI socket is /a: set nriSocket of this driver to it"]


def test_only_who_undoes_it_is_named() -> None:
    """Of two drop-ins each key is the last one's; what an earlier one says of it is nothing."""
    texts = ("disable = false\ndisable_connections = true\n", "disable_connections = false\n")
    drop_ins = [
        read_runtime_file(f"{n}.toml", f"version = 3\n[plugins.'{NRI}']\n{text}") for n, text in enumerate(texts)
    ]
    after, _ = switch_on([read_runtime_file("config.toml", "version = 3\n"), *drop_ins], CDI)
    assert NRI not in tomllib.loads(after)["plugins"]


def test_versions_2_and_3_are_not_mixed() -> None:
    """No containerd takes both: 1.7 cannot read the newer one, 2.x passes over sections of the older one."""
    chain = [read_runtime_file("config.toml", "version = 2\n"), read_runtime_file("new.toml", "version = 3\n")]
    with pytest.raises(RuntimeConfigError, match=r"^new\.toml: is of version 3 and .* config\.toml of version 2"):
        switch_on(chain, CDI)


def test_the_default_directories_are_known() -> None:
    """Another directory than containerd's own two has to be said."""
    with pytest.raises(RuntimeConfigError, match=r"lacks /srv/cdi, .*: add it to \['/etc/cdi', '/var/run/cdi'\]"):
        switch_on([read_runtime_file("config.toml", "version = 3\n")], "/srv/cdi")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version = 2\n[\n", "is no TOML"),
        ("", "says no version, which means 1; .*'containerd config migrate'"),
        ("version = 1\n", "says version = 1"),
        ("version = 5\n", "says version = 5"),
        ("version = true\n", "says version = True"),
        ('version = "2"\n', "says version = 2"),
        (f'version = 2\ndisabled_plugins = ["{NRI}"]\n', f"disabled_plugins names {NRI}: take it out"),
        ('version = 2\ndisabled_plugins = ["cri"]\n', "disabled_plugins names cri"),
        (f"version = 3\n[plugins.'{CRI_3}']\ncdi_spec_dirs = ['/etc/cdi']\n", "cdi_spec_dirs lacks /var/run/cdi"),
        ("version = 2\nplugins = 1\n", "plugins is no table"),
        (f"version = 2\n[plugins.'{CRI_2}']\ncdi_spec_dirs = ['/etc/cdi']\n", "cdi_spec_dirs lacks /var/run/cdi"),
        (f"version = 3\n[plugins.'{CRI_3}']\ncdi_spec_dirs = []\n", r"cdi_spec_dirs lacks .*: add it to \[\]"),
        (f"version = 3\n[plugins.'{CRI_3}']\ncdi_spec_dirs = 1\n", "cdi_spec_dirs lacks /var/run/cdi"),
        (f"version = 2\n[plugins]\n'{NRI}' = 1\n", "is laid out in a way .* say by hand: .*enable_cdi = true"),
    ],
)
def test_what_cannot_be_switched_on_is_named_with_a_remedy(text: str, expected: str) -> None:
    """One error says what is in the way and what to do."""
    with pytest.raises(RuntimeConfigError, match=f"^config.toml: .*{expected}"):
        changed(text)


def test_the_cdi_directory_may_be_spelled_the_other_way() -> None:
    """/var/run is /run: either spelling of the directory is the same."""
    _, changes = changed(f"version = 3\n[plugins.'{CRI_3}']\ncdi_spec_dirs = ['/etc/cdi', '/run/cdi/']\n")
    assert len(changes) == 3


def test_another_nri_socket_is_told() -> None:
    """The driver has to be told of a socket that is not at the usual place."""
    file = read_runtime_file("a", f"version = 3\n[plugins.'{NRI}']\nsocket_path = '/run/other.sock'\n")
    assert notes([file]) == ["containerd's NRI socket is /run/other.sock: set nriSocket of this driver to it"]
    assert notes([read_runtime_file("a", STOCK_1_7)]) == []


SECTIONS = st.dictionaries(
    st.sampled_from(["enable_cdi", "disable", "disable_connections", "disable_hugetlb_controller", "other"]),
    st.booleans(),
)


@given(st.sampled_from([2, 3]), st.dictionaries(st.sampled_from([NRI, CRI_2, CRI_3, "else"]), SECTIONS))
def test_the_meaning_differs_in_the_wanted_keys_alone(version: int, plugins: dict[str, dict[str, bool]]) -> None:
    """Whatever the sections said, they say the same afterwards, but for CDI, NRI and, in version 2, hugetlb."""
    lines = [f"version = {version}"]
    for name, section in plugins.items():
        lines += [f'[plugins."{name}"]', *(f"{key} = {str(value).lower()}" for key, value in section.items())]
    after, _ = changed("\n".join(lines))
    expected: dict[str, Any] = {name: dict(section) for name, section in plugins.items()}
    cri = expected.setdefault(CRI_2 if version == 2 else CRI_3, {})
    cri["enable_cdi"] = True
    if version == 2:
        cri["disable_hugetlb_controller"] = False
    expected.setdefault(NRI, {}).update(disable=False, disable_connections=False)
    assert after == {"version": version, "plugins": expected}
