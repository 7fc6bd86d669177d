# SPDX-License-Identifier: Apache-2.0
"""The runtime that the kubelet uses, determined from a tree's files, processes and sockets."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.node.host_tree import HostTree
from numa_contract.config import ConfigError
from numa_contract.reports import BackendStatus
from numa_node.runtimes.containerd import CRI_OF_1, CRI_OF_2, NRI
from numa_node.runtimes.settings import CONTAINERD, CRI_O
from numa_tools.doctor.kubelet_config import Part, Reading, kubelet_config, kubelet_of_reading
from numa_tools.doctor.model import Unread
from numa_tools.doctor.runtime_in_use import (
    INSTALLATIONS,
    FoundRuntimes,
    ReportedRuntime,
    given_runtime,
    remedy_of,
    reported_runtime,
    runtime_in_use,
    with_endpoint,
)
from numa_tools.doctor.runtime_settings import RuntimeConfig, Unclear
from numa_tools.doctor.sources.runtimes import read_given_runtime, read_runtimes

from tests.fakes.containerd_dump import dump
from tests.rigs.containerd_files import toml_text

PLAIN = "etc/containerd/config.toml"
K3S = "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
RKE2 = "var/lib/rancher/rke2/agent/etc/containerd/config.toml"
K0S = "etc/k0s/containerd.toml"
MICROK8S = "var/snap/microk8s/current/args/containerd.toml"
TALOS = "etc/cri/containerd.toml"
CRIO = "etc/crio/crio.conf"
CRIO_DROP_IN = "etc/crio/crio.conf.d/10-nri.conf"
DOCKER = 'disabled_plugins = ["cri"]\n'
OFF = f'version = 3\n[plugins."{NRI}"]\ndisable = true\n'
ON = f'version = 3\n[plugins."{NRI}"]\ndisable = false\n'
CRIO_OFF = "[crio.nri]\nenable_nri = false\n"
CONTAINERD_2 = ReportedRuntime(CONTAINERD, (2, 1, 4), "")
K3S_2 = ReportedRuntime(CONTAINERD, (2, 1, 4), "-k3s1")
CRIO_1_34 = ReportedRuntime(CRI_O, (1, 34, 0), "")
UNREAD = Unread("", "")


def write(root: Path, files: Mapping[str, str]) -> HostTree:
    """Returns a tree with the given files."""
    for path, text in files.items():
        at = root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    return HostTree(root)


def process(number: int, *arguments: str, spaces: str = "", environment: str = "") -> dict[str, str]:
    """Returns a process's files."""
    base, name = f"proc/{number}", arguments[0].rpartition("/")[2]
    status = f"Name:\t{name}\nNSpid:\t{number}{spaces}\n"
    command = "".join(f"{one}\0" for one in arguments)
    return {
        f"{base}/comm": f"{name}\n",
        f"{base}/cmdline": command,
        f"{base}/status": status,
        f"{base}/environ": environment,
    }


def listen(root: Path, path: str) -> None:
    """Creates a listening socket. Since socket paths must be short, the working directory is changed to the socket's
    directory before the socket is bound.
    """
    at = root / path
    at.parent.mkdir(parents=True, exist_ok=True)
    here = Path.cwd()
    os.chdir(at.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(at.name)
    finally:
        os.chdir(here)


def in_use(tree: HostTree, reported: ReportedRuntime | None = None) -> RuntimeConfig:
    """Returns the runtime that was found."""
    found = runtime_in_use(read_runtimes(tree), reported, "elsewhere")
    assert isinstance(found, RuntimeConfig), found
    return found


def unread(tree: HostTree, reported: ReportedRuntime | None = None) -> Unread:
    """Returns the reason why no runtime was found."""
    found = runtime_in_use(read_runtimes(tree), reported, "elsewhere")
    assert isinstance(found, Unread), found
    return found


@pytest.mark.parametrize(
    ("path", "reported"),
    [
        (PLAIN, CONTAINERD_2),
        (K3S, K3S_2),
        (RKE2, K3S_2),
        (K0S, CONTAINERD_2),
        (MICROK8S, CONTAINERD_2),
        (TALOS, CONTAINERD_2),
    ],
)
def test_each_distributions_file_is_read(path: str, reported: ReportedRuntime, tmp_path: Path) -> None:
    """The file belongs to the only runtime on the node, whether or not the runtime's release is known."""
    tree = write(tmp_path, {path: OFF})
    for known in (None, reported):
        found = in_use(tree, known)
        assert (found.software, found.source, found.settings["nri"]) == (CONTAINERD, f"/{path}", False)


def test_every_location_has_a_command_that_prints_the_settings() -> None:
    """The command contains the path to the distribution's file, unless containerd finds the file by itself."""
    commands = {one.owner: one.command for one in INSTALLATIONS}
    assert (commands["containerd"], commands["CRI-O"]) == ("containerd config dump", "crio status config")
    assert all(f"--config {one.config} config dump" in one.command for one in INSTALLATIONS[1:-1])


@pytest.mark.parametrize("files", [{CRIO: CRIO_OFF}, {CRIO_DROP_IN: CRIO_OFF}, {CRIO: "", CRIO_DROP_IN: CRIO_OFF}])
@pytest.mark.parametrize("docker", [True, False])
@pytest.mark.parametrize("reported", [None, CRIO_1_34])
def test_cri_os_files_are_read(
    files: dict[str, str], docker: bool, reported: ReportedRuntime | None, tmp_path: Path
) -> None:
    """CRI-O's files are read even if Docker's containerd is also on the node."""
    found = in_use(write(tmp_path, {**files, **({PLAIN: DOCKER} if docker else {})}), reported)
    assert (found.software, found.settings["nri"], found.command) == (CRI_O, False, "crio status config")


@pytest.mark.parametrize("reported", [None, K3S_2])
def test_docker_next_to_k3s_is_not_the_kubelets_runtime(reported: ReportedRuntime | None, tmp_path: Path) -> None:
    """The kubelet cannot use a containerd without the CRI service."""
    found = in_use(write(tmp_path, {PLAIN: DOCKER, K3S: ON}), reported)
    assert (found.source, found.settings["nri"]) == (f"/{K3S}", True)


def test_docker_alone_leaves_the_settings_unknown(tmp_path: Path) -> None:
    """The message gives the reason and the command."""
    why = unread(write(tmp_path, {PLAIN: DOCKER}), CONTAINERD_2)
    assert f"containerd's CRI service is disabled in /{PLAIN}" in why.why
    assert "containerd config dump" in why.remedy


@pytest.mark.parametrize("reported", [CRIO_1_34, ReportedRuntime("docker", (24, 0, 0), "")])
def test_files_of_a_runtime_that_the_kubelet_does_not_use_are_ignored(
    reported: ReportedRuntime, tmp_path: Path
) -> None:
    """The kubelet's own report is the strongest evidence. The remedy applies to the runtime that the
    kubelet reports.
    """
    why = unread(write(tmp_path, {PLAIN: ON}), reported)
    assert "containerd config dump" not in why.remedy
    assert ("crio status config" in why.remedy) is (reported is CRIO_1_34)


def test_files_left_by_a_removed_k3s_are_ignored(tmp_path: Path) -> None:
    """Only the containerd of k3s and RKE2 has a version suffix. If the kubelet reports a version without one, k3s's
    file is a leftover. If the version has one, the file at the usual path is not in use.
    """
    assert f"/{K3S}" in unread(write(tmp_path / "a", {K3S: ON}), CONTAINERD_2).why
    assert "k3s/data/current/bin/containerd" in unread(write(tmp_path / "b", {PLAIN: ON}), K3S_2).remedy


def test_two_possible_runtimes_leave_the_settings_unknown(tmp_path: Path) -> None:
    """The message names both files and gives both commands."""
    why = unread(write(tmp_path, {PLAIN: ON, CRIO: CRIO_OFF}))
    assert f"/{PLAIN}" in why.why
    assert f"/{CRIO}" in why.why
    assert "containerd config dump" in why.remedy
    assert "crio status config" in why.remedy


def test_an_existing_socket_identifies_the_runtime(tmp_path: Path) -> None:
    """/run is an in-memory file system, so a socket in it belongs to a runtime that has run since the last boot."""
    tree = write(tmp_path, {PLAIN: ON, CRIO: CRIO_OFF})
    listen(tmp_path, "run/crio/crio.sock")
    assert in_use(tree).software == CRI_O
    listen(tmp_path, "run/containerd/containerd.sock")
    assert "cannot be determined" in unread(tree).why


def test_the_socket_on_the_kubelets_command_line_identifies_the_runtime(tmp_path: Path) -> None:
    """The kubelet's flag takes precedence over existing sockets."""
    endpoint = "--container-runtime-endpoint=unix:///var/run/crio/crio.sock"
    tree = write(tmp_path, {PLAIN: ON, CRIO: CRIO_OFF, **process(7, "/usr/bin/kubelet", endpoint)})
    listen(tmp_path, "run/containerd/containerd.sock")
    assert in_use(tree).software == CRI_O


def test_the_endpoint_in_the_kubelets_configuration_identifies_the_runtime(tmp_path: Path) -> None:
    """The configured endpoint takes precedence over existing sockets and over the running process's flag, which is an
    earlier part of the configuration.
    """
    tree = write(tmp_path, {PLAIN: ON, CRIO: CRIO_OFF, **process(7, "/usr/bin/kubelet")})
    listen(tmp_path, "run/containerd/containerd.sock")
    kubelet = kubelet_config({"containerRuntimeEndpoint": "unix:///var/run/crio/crio.sock"}, "configz")
    found = runtime_in_use(with_endpoint(read_runtimes(tree), kubelet), None, "elsewhere")
    assert isinstance(found, RuntimeConfig)
    assert found.software == CRI_O


@pytest.mark.parametrize("unseen", ["", "its command line is not visible"])
def test_an_endpoint_that_may_be_replaced_is_not_evidence(unseen: str) -> None:
    """A command line that is not visible may contain a flag that sets a different endpoint."""
    reading = Reading((Part("/c.yaml", {"containerRuntimeEndpoint": "unix:///run/crio/crio.sock"}),), incomplete=unseen)
    kubelet = kubelet_of_reading(reading, "remedy")
    assert kubelet is not None
    endpoint = with_endpoint(FoundRuntimes((), endpoint="/run/c.sock"), kubelet).endpoint
    assert endpoint == ("/run/c.sock" if unseen else "unix:///run/crio/crio.sock")


@pytest.mark.parametrize("table", ["[grpc]", '[plugins."io.containerd.server.v1.grpc"]'])
def test_the_socket_in_containerds_own_files_is_compared_with_the_kubelets(table: str, tmp_path: Path) -> None:
    """A second containerd, such as the one for Bottlerocket's host containers, serves a different socket."""
    endpoint = "--container-runtime-endpoint=unix:///run/kubelets.sock"
    files = {PLAIN: f'{ON}{table}\naddress = "/run/kubelets.sock"\n', "srv/host.toml": OFF}
    running = {
        **process(7, "/usr/bin/kubelet", endpoint),
        **process(8, "containerd"),
        **process(9, "containerd", "--config", "/srv/host.toml"),
    }
    assert in_use(write(tmp_path, {**files, **running})).source == f"/{PLAIN}"


def test_the_file_on_the_process_command_line_is_read(tmp_path: Path) -> None:
    """The unit's ExecStart names the file, so the file at the usual path is not used."""
    arguments = "--config=/srv/c.toml", "--log-level", "debug", "--address", "/srv/c.sock"
    tree = write(tmp_path, {PLAIN: ON, "srv/c.toml": OFF, **process(9, "/usr/bin/containerd", *arguments)})
    assert (in_use(tree).source, in_use(tree).settings["nri"]) == ("/srv/c.toml", False)


def test_a_running_containerd_without_a_file_uses_its_defaults(tmp_path: Path) -> None:
    """A distribution's file is ignored as a leftover if the distribution is not running."""
    tree = write(tmp_path, {K0S: OFF, **process(9, "/usr/bin/containerd")})
    assert in_use(tree, CONTAINERD_2).settings["nri"] is True
    assert in_use(tree, ReportedRuntime(CONTAINERD, (1, 7, 20), "")).settings["nri"] is False
    assert isinstance(in_use(tree).settings["nri"], Unclear)


@pytest.mark.parametrize(
    "other",
    [
        process(9, "containerd", "--config", "/srv/c.toml", "config", "dump"),
        process(9, "containerd", "-c", "/srv/c.toml", spaces="\t1"),
        process(9, "containerd-shim", "-c", "/srv/c.toml"),
        {"proc/9/comm": "containerd\n"} | {f"proc/{number}/stat": "" for number in range(10, 20)},
    ],
    ids=["a command that prints the configuration", "in a container", "another program", "a process that has exited"],
)
def test_processes_other_than_the_nodes_containerd_are_ignored(other: dict[str, str], tmp_path: Path) -> None:
    """Such a process may be a command that prints the configuration, a runtime inside a container, or a process that
    exited while it was being read.
    """
    assert in_use(write(tmp_path, {PLAIN: ON, "srv/c.toml": OFF, **other})).source == f"/{PLAIN}"


@pytest.mark.parametrize(
    ("arguments", "environment", "clear"),
    [
        ((), "", True),
        (("--log-level", "debug"), "", True),
        (("--enable-nri=false",), "", False),
        (("--nri-listen", "/x"), "", False),
        (("--cdi-spec-dirs", "/x"), "", False),
        ((), "A=b\0CONTAINER_CDI_SPEC_DIRS=/x\0", False),
    ],
)
def test_cri_o_options_that_override_its_files_make_the_settings_unclear(
    arguments: tuple[str, ...], environment: str, clear: bool, tmp_path: Path
) -> None:
    """The options come from the running process's command line and environment."""
    running = process(9, "/usr/bin/crio", *arguments, environment=environment)
    found = in_use(write(tmp_path, {CRIO: CRIO_OFF, **running}), CRIO_1_34)
    assert isinstance(found.settings["nri"], Unclear) is not clear
    assert bool(found.incomplete) is not clear


def test_cri_o_reads_the_directory_on_its_command_line(tmp_path: Path) -> None:
    """Every file in the directory is read, in name order and whatever its extension."""
    files = {"srv/d/20.toml": CRIO_OFF, "srv/d/10/x~": "[crio.nri]\nenable_nri = true\nnri_listen = '/run/x'\n"}
    found = in_use(write(tmp_path, {**files, **process(9, "crio", "--config-dir", "/srv/d")}), CRIO_1_34)
    assert (found.settings["nri"], found.settings["socket"]) == (False, "/run/x")
    assert found.files == ("/srv/d/10/x~", "/srv/d/20.toml")


@pytest.mark.parametrize(("changed", "clear"), [(1_000_100, True), (1_000_500, False)])
def test_a_file_that_is_newer_than_the_process_is_not_in_effect(changed: int, clear: bool, tmp_path: Path) -> None:
    """The machine was booted at time 1,000,000, and the process was started 200 s later."""
    stat = f"9 (containerd) S {' '.join(['0'] * 18)} {200 * os.sysconf('SC_CLK_TCK')} 0\n"
    running = {**process(9, "containerd"), "proc/9/stat": stat, "proc/stat": "cpu 1\nbtime 1000000\n"}
    tree = write(tmp_path, {PLAIN: ON, **running})
    os.utime(tmp_path / PLAIN, (changed, changed))
    found = in_use(tree, CONTAINERD_2)
    assert isinstance(found.settings["nri"], Unclear) is not clear
    assert ("restart" in remedy_of(found)) is not clear


IMPORTING = 'version = 2\nimports = ["conf.d/*.toml", "last.toml"]\n'


def test_imports_are_read_breadth_first(tmp_path: Path) -> None:
    """The files that config.toml imports come before those that they in turn import, and each file is read once. A star
    also matches hidden files.
    """
    files = {
        PLAIN: IMPORTING,
        "etc/containerd/conf.d/20.toml": 'imports = ["../config.toml", "../deep.toml"]\n',
        "etc/containerd/conf.d/.10.toml": "",
        "etc/containerd/conf.d/30.conf": "",
        "etc/containerd/last.toml": "",
        "etc/containerd/deep.toml": "",
    }
    names = [".10.toml", "20.toml"]
    expected = [PLAIN, *(f"etc/containerd/conf.d/{name}" for name in names), "etc/containerd/last.toml"]
    assert in_use(write(tmp_path, files)).files == tuple(f"/{one}" for one in [*expected, "etc/containerd/deep.toml"])


def test_import_patterns_may_have_wildcards_in_directory_names(tmp_path: Path) -> None:
    """Go's filepath.Glob expands the pattern. The files may contain non-ASCII characters."""
    files = {PLAIN: 'imports = ["/etc/*/conf.d/?.toml", "/etc/x*/y.toml"]\n# ä\n', "etc/x1/conf.d/a.toml": ""}
    files |= {"etc/x0/y.toml": "", "etc/x0/conf.d/ab.toml": ""}
    assert in_use(write(tmp_path, files)).files == (f"/{PLAIN}", "/etc/x1/conf.d/a.toml", "/etc/x0/y.toml")


def _links(root: Path) -> None:
    (root / "etc/containerd/conf.d").symlink_to("../containerd/conf.d")


def _fifo(root: Path) -> None:
    os.mkfifo(root / "etc/containerd/last.toml")


def _many(root: Path) -> None:
    directory = root / "etc/containerd/conf.d"
    directory.mkdir()
    for number in range(70):
        (directory / f"{number}.toml").write_text("")


def _very_many(root: Path) -> None:
    directory = root / "etc/containerd/conf.d"
    directory.mkdir()
    for number in range(300):
        (directory / f"{number}.toml").touch()


def _heavy(root: Path) -> None:
    directory = root / "etc/containerd/conf.d"
    directory.mkdir()
    for number in range(6):
        (directory / f"{number}.toml").write_text("#" * 1_000_000)


def _large(root: Path) -> None:
    with (root / "etc/containerd/last.toml").open("wb") as file:
        file.truncate(2 << 20)


HOSTILE: dict[str, tuple[Any, str, str]] = {
    "an import that does not exist": (None, IMPORTING, "does not exist"),
    "a symlink loop": (_links, IMPORTING, "symbolic links"),
    "a FIFO": (_fifo, IMPORTING, "not a regular file"),
    "a large file": (_large, IMPORTING, "bytes"),
    "too many files": (_many, IMPORTING, "more than 64 files"),
    "too many matches": (_very_many, IMPORTING, "more than 256 files"),
    "too many patterns": (None, f"imports = {['*'] * 300}\n", "more than 256 patterns"),
    "files that are too large in total": (_heavy, IMPORTING, "larger than 4 MiB in total"),
    "a directory": (None, 'imports = ["/etc"]\n', "regular file"),
    "invalid TOML": (None, "[", "not TOML"),
    "deep nesting": (None, "a = " + "[" * 100_000, "not TOML"),
    "a pattern with brackets": (None, 'imports = ["[ab]*.toml"]\n', "does not expand"),
    "a path with NUL": (None, 'imports = ["a\\u0000b"]\n', "not a valid path"),
    "imports that are not a list": (None, 'imports = "a"\n', "does not start"),
    "imports in a different case": (None, 'Imports = ["a"]\n', "differently"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_cannot_be_read_completely_leave_all_settings_unclear(what: str, tmp_path: Path) -> None:
    """The number and the sizes of the files are limited, and the reason names the file."""
    spoil, text, reason = HOSTILE[what]
    tree = write(tmp_path, {PLAIN: text})
    if spoil:
        spoil(tmp_path)
    found = in_use(tree, CONTAINERD_2)
    assert {type(one) for one in found.settings.values()} == {Unclear}
    assert reason in found.incomplete


def test_an_absolute_symlink_stays_inside_the_tree(tmp_path: Path) -> None:
    """The symlink is resolved from the tree's root, as containerd on the node resolves it."""
    tree = write(tmp_path / "root", {"etc/containerd/real.toml": OFF})
    (tmp_path / "root" / PLAIN).symlink_to("/etc/containerd/real.toml")
    assert in_use(tree).settings["nri"] is False


def test_drop_ins_that_no_file_imports_are_named(tmp_path: Path) -> None:
    """Only drop-ins for NRI or CDI are named."""
    drop_ins = {"etc/containerd/conf.d/a.toml": "# nri\n", "etc/containerd/conf.d/b.toml": "# other\n"}
    assert in_use(write(tmp_path, {PLAIN: "version = 3\n", **drop_ins})).stray == ("/etc/containerd/conf.d/a.toml",)


@pytest.mark.parametrize(
    ("node", "runtime", "expected"),
    [
        ("containerd://2.1.4", "", CONTAINERD_2),
        ("containerd://2.1.4-k3s1", "cri-o 1.34.0", K3S_2),
        ("cri-o://1.34.0", "", CRIO_1_34),
        ("", "containerd v2.1.4", CONTAINERD_2),
        ("", "cri-o 1.34.0", CRIO_1_34),
        ("docker://24.0.0", "", ReportedRuntime("docker", (24, 0, 0), "")),
        ("containerd://Unknown", "", ReportedRuntime(CONTAINERD, None, "Unknown")),
        ("", "", None),
    ],
)
def test_the_runtime_is_the_one_that_the_node_object_reports(
    node: str, runtime: str, expected: ReportedRuntime | None
) -> None:
    """Without a report, the runtime is the one to which the backend is connected."""
    document = {"status": {"nodeInfo": {"containerRuntimeVersion": node}}} if node else UNREAD
    backend = BackendStatus(instance="b", runtime=runtime) if runtime else UNREAD
    assert reported_runtime(document, backend) == expected


@pytest.mark.parametrize("document", [{}, {"status": None}, {"status": {"nodeInfo": {"containerRuntimeVersion": 1}}}])
def test_a_node_object_without_a_report_reports_nothing(document: dict[str, Any]) -> None:
    """Before the kubelet's first status update, the Node object does not name a runtime."""
    found = reported_runtime(document, UNREAD)
    assert found is None or found.release is None


def printed(release: str, **more: Any) -> str:
    """Returns a release's dump as a string."""
    return toml_text({**more, **dump(release)})


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (printed("2.1"), None),
        (printed("2.1"), CONTAINERD_2),
        (printed("2.1", plugin_dir=""), ReportedRuntime(CONTAINERD, (2, 0, 6), "")),
        (printed("1.7"), ReportedRuntime(CONTAINERD, (1, 7, 27), "")),
        (printed("2.3"), ReportedRuntime(CONTAINERD, (2, 3, 0), "")),
    ],
)
def test_a_dump_from_the_kubelets_containerd_is_used(text: str, reported: ReportedRuntime | None) -> None:
    """The dump replaces all files. Drop-ins that are not imported do not appear in it."""
    found = given_runtime(text, reported)
    assert isinstance(found, RuntimeConfig)
    assert not any(isinstance(one, Unclear) for one in found.settings.values())
    assert found.incomplete


@pytest.mark.parametrize(
    ("text", "reported", "reason"),
    [
        (printed("2.1"), CRIO_1_34, "the kubelet uses CRI-O"),
        ("[crio]\n", CONTAINERD_2, "the kubelet uses containerd"),
        (printed("1.7"), CONTAINERD_2, "not from containerd 2.1.4"),
        (printed("2.3"), CONTAINERD_2, "not from containerd 2.1.4"),
        (printed("2.1", plugin_dir=""), None, "2.0.0 to 2.0.5"),
        (printed("2.0", plugin_dir=""), ReportedRuntime(CONTAINERD, (2, 0, 5), ""), "2.0.0 to 2.0.5"),
        (toml_text({**dump("2.1"), "disabled_plugins": [CRI_OF_1]}), CONTAINERD_2, "without the CRI service"),
        (toml_text({**dump("2.1"), "disabled_plugins": [CRI_OF_2]}), None, "without the CRI service"),
    ],
)
def test_a_dump_from_another_runtime_is_not_used(text: str, reported: ReportedRuntime | None, reason: str) -> None:
    """The reason describes the mismatch."""
    found = given_runtime(text, reported)
    assert isinstance(found, Unread)
    assert reason in found.why


def test_a_given_file_of_another_kind_is_a_usage_error(tmp_path: Path) -> None:
    """A missing file and a file larger than 4 MiB are usage errors too."""
    given = tmp_path / "dump"
    with pytest.raises(ConfigError):
        read_given_runtime(str(given), None)
    given.write_text("version = 2\n")
    with pytest.raises(ConfigError, match="config dump"):
        read_given_runtime(str(given), None)
    with given.open("wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(ConfigError, match="bytes"):
        read_given_runtime(str(given), None)
