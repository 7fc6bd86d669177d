# SPDX-License-Identifier: Apache-2.0
"""The kubelet's configuration, read from files as distributions write them, and from damaged files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from numa_tools import cli
from numa_tools.bundle.archive import extract
from numa_tools.doctor.facts import KubeletConfig
from numa_tools.doctor.kubelet_config import Reading, merge
from numa_tools.doctor.model import Unread
from numa_tools.doctor.sources.kubelet import choose_kubelet, read_files, read_kubelet

from tests.rigs import kubeadm
from tests.rigs.trees import small_machine, write_tree

ROOT = "/var/lib/kubelet"
HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
KUBEADM_UNIT = {
    "/usr/lib/systemd/system/kubelet.service": "[Unit]\nDescription=kubelet\n[Service]\nExecStart=/usr/bin/kubelet\n",
    "/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf": kubeadm.DROP_IN,
    "/var/lib/kubelet/kubeadm-flags.env": 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/c.sock"\n',
    # kubeadm's kubeconfig has the same name as OpenShift's configuration file.
    "/etc/kubernetes/kubelet.conf": "apiVersion: v1\nkind: Config\nclusters: []\n",
}


def process(number: int, *line: str, name: str = "kubelet", user: int = 0, inner: str = "") -> dict[str, str]:
    """Returns a process's files as the kernel shows them in the host's PID namespace."""
    numbers = f"{number}\t{inner}" if inner else f"{number}"
    return {
        f"/proc/{number}/comm": f"{name}\n",
        f"/proc/{number}/cmdline": "\0".join(line) + "\0",
        f"/proc/{number}/status": f"Name:\t{name}\nUid:\t{user}\t{user}\t{user}\t{user}\nNSpid:\t{numbers}\n",
        f"/proc/{number}/stat": f"{number} ({name} )) S 1 " + "0 " * 17 + "5000 0\n",
        "/proc/stat": "cpu  1 2 3\nbtime 4102444800\n",
    }


def written(base: Path, files: Mapping[str, str]) -> Path:
    """Returns a host root with the given files."""
    for path, text in files.items():
        (base / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (base / path[1:]).write_text(text)
    return base


def settings_of(reading: Reading) -> dict[str, Any]:
    """Returns the settings that result when all parts are applied in order."""
    return dict(merge(reading.parts).settings)


def found(base: Path, files: Mapping[str, str]) -> KubeletConfig:
    """Returns the result of reading a host root with the given files."""
    kubelet = read_kubelet(str(written(base, files)), ROOT, "node-a")
    assert isinstance(kubelet, KubeletConfig)
    return kubelet


STATIC = "cpuManagerPolicy: static\n"
KUBEADM_ENDPOINT = {"containerRuntimeEndpoint": "unix:///run/c.sock"}
K3S_UNIT = "[Service]\nEnvironmentFile=-/etc/default/%N\nExecStart=/usr/local/bin/k3s server\n"
K3S = {
    "/etc/systemd/system/k3s.service": "[Service]\nEnvironmentFile=-/etc/systemd/system/k3s.service.env\n"
    "ExecStart=/usr/local/bin/k3s \\\n    server \\\n\t'--kubelet-arg=topology-manager-policy=restricted' \\\n",
    "/etc/rancher/k3s/config.yaml": "token: s3cret\nkubelet-arg:\n- cpu-manager-policy=static\n- config=/a\n",
    "/etc/rancher/k3s/config.yaml.d/20.yaml": "kubelet-arg+:\n- reserved-cpus=0-3\n",
    "/var/lib/rancher/k3s/agent/etc/kubelet.conf.d/00-k3s-defaults.conf": HEAD + "failSwapOn: false\n",
}
RKE2 = "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d"
OPENSHIFT = """\
[Service]
EnvironmentFile=/etc/os-release
EnvironmentFile=-/etc/kubernetes/kubelet-env
ExecStart=/usr/local/bin/kubenswrapper \\
    /usr/bin/kubelet \\
      --config=/etc/kubernetes/kubelet.conf \\
      --config-dir=/etc/openshift/kubelet.conf.d \\
      --node-labels=node-role.kubernetes.io/worker,node.openshift.io/os_id=${ID} \\
      --v=${KUBELET_LOG_LEVEL}
"""
COMPLETE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "kubeadm": (
        KUBEADM_UNIT | {f"{ROOT}/config.yaml": HEAD + STATIC},
        KUBEADM_ENDPOINT | {"cpuManagerPolicy": "static"},
    ),
    "kubeadm with flags in /etc/default/kubelet": (
        KUBEADM_UNIT
        | {f"{ROOT}/config.yaml": HEAD + STATIC + "featureGates: {A: true, B: true}\n"}
        | {"/etc/default/kubelet": "KUBELET_EXTRA_ARGS='--cpu-manager-policy=none --feature-gates=B=false'\n"},
        KUBEADM_ENDPOINT | {"cpuManagerPolicy": "none", "featureGates": {"A": True, "B": False}},
    ),
    "kubeadm with --config-dir": (
        KUBEADM_UNIT
        | {f"{ROOT}/config.yaml": HEAD + "reservedSystemCPUs: '0'\n"}
        | {"/etc/default/kubelet": "KUBELET_EXTRA_ARGS=--config-dir=/etc/kubernetes/kubelet.conf.d\n"}
        | {"/etc/kubernetes/kubelet.conf.d/10.conf": HEAD + "topologyManagerPolicy: single-numa-node\n"}
        | {"/etc/kubernetes/kubelet.conf.d/20.conf": HEAD + "topologyManagerPolicy: null\nreservedSystemCPUs: 0-3\n"}
        | {"/etc/kubernetes/kubelet.conf.d/30.yaml": HEAD + STATIC},
        KUBEADM_ENDPOINT | {"reservedSystemCPUs": "0-3"},
    ),
    "a process wins over the unit": (
        KUBEADM_UNIT
        | {f"{ROOT}/config.yaml": HEAD + STATIC, "/a.yaml": HEAD + "topologyManagerPolicy: restricted\n"}
        | process(812, "/usr/bin/kubelet", "--config", "/a.yaml", "--reserved-cpus=1"),
        {"topologyManagerPolicy": "restricted", "reservedSystemCPUs": "1"},
    ),
    "a process of a pod or of a user is not the kubelet": (
        KUBEADM_UNIT
        | {f"{ROOT}/config.yaml": HEAD + STATIC}
        | process(812, "kubelet", "--cpu-manager-policy=none", inner="1")
        | process(813, "kubelet", "--cpu-manager-policy=none", user=1000),
        KUBEADM_ENDPOINT | {"cpuManagerPolicy": "static"},
    ),
    "EKS on Amazon Linux 2023": (
        {
            "/etc/systemd/system/kubelet.service": "[Service]\nEnvironmentFile=/etc/eks/kubelet/environment\n"
            "ExecStart=/usr/bin/kubelet $NODEADM_KUBELET_ARGS\n",
            "/etc/eks/kubelet/environment": "NODEADM_KUBELET_ARGS=--config=/etc/kubernetes/kubelet/config.json "
            "--config-dir=/etc/kubernetes/kubelet/config.json.d --node-ip=10.0.0.1\n",
            "/etc/kubernetes/kubelet/config.json": json.dumps(
                {
                    "kind": "KubeletConfiguration",
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "featureGates": {"RotateKubeletServerCertificate": True},
                },
                indent="\t",
            ),
            "/etc/kubernetes/kubelet/config.json.d/40-nodeadm.conf": json.dumps(
                {
                    "kind": "KubeletConfiguration",
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "cpuManagerPolicy": "static",
                    "reservedSystemCPUs": "0-3",
                }
            ),
        },
        {
            "featureGates": {"RotateKubeletServerCertificate": True},
            "cpuManagerPolicy": "static",
            "reservedSystemCPUs": "0-3",
        },
    ),
    "k3s": (
        K3S,
        {"topologyManagerPolicy": "restricted", "cpuManagerPolicy": "static", "reservedSystemCPUs": "0-3"},
    ),
    "RKE2": (
        {
            f"{RKE2}/00-rke2-defaults.conf": HEAD + STATIC,
            f"{RKE2}/10-cli-config.conf": HEAD + "featureGates: {A: true}\n",
        }
        | process(2057, "kubelet", f"--config-dir={RKE2}", "--read-only-port=0"),
        {"cpuManagerPolicy": "static", "featureGates": {"A": True}},
    ),
    "MicroK8s": (
        {
            "/var/snap/microk8s/current/args/kubelet": "--kubeconfig=${SNAP_DATA}/credentials/kubelet.config\n"
            "--root-dir=${SNAP_COMMON}/var/lib/kubelet\n# a comment\n--cpu-manager-policy=static\n"
            '--reserved-cpus="0-1"\n'
        },
        {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0-1"},
    ),
    "MicroK8s with a running process": (
        {"/var/snap/microk8s/9072/args/kubelet": "--cpu-manager-policy=static\n"}
        | process(
            7489,
            "/snap/microk8s/9072/kubelite",
            "--kubelet-args-file=/var/snap/microk8s/9072/args/kubelet",
            name="kubelite",
        ),
        {"cpuManagerPolicy": "static"},
    ),
    "Talos": (
        {"/etc/kubernetes/kubelet.yaml": HEAD + STATIC}
        | process(1500, "/usr/local/bin/kubelet", "--config=/etc/kubernetes/kubelet.yaml", "--hostname-override=a"),
        {"cpuManagerPolicy": "static"},
    ),
    "OpenShift": (
        {
            "/etc/systemd/system/kubelet.service": OPENSHIFT,
            "/etc/os-release": 'NAME="Red Hat Enterprise Linux CoreOS"\nID="rhel"\n',
            "/etc/kubernetes/kubelet.conf": HEAD + STATIC,
            "/etc/openshift/kubelet.conf.d/20-auto-sizing.conf": HEAD + "systemReserved: {memory: 1Gi}\n",
        },
        {"cpuManagerPolicy": "static"},
    ),
    "k0s": (
        {"/run/k0s/kubelet/config.yaml": HEAD + STATIC}
        | process(900, "/var/lib/k0s/bin/kubelet", "--config=/run/k0s/kubelet/config.yaml"),
        {"cpuManagerPolicy": "static"},
    ),
    "GKE": (
        {
            "/etc/systemd/system/kubelet.service": "[Service]\nEnvironmentFile=/etc/default/kubelet\n"
            "ExecStart=/home/kubernetes/bin/kubelet $KUBELET_OPTS\n",
            "/etc/default/kubelet": 'KUBELET_OPTS="--v=2 --config /home/kubernetes/kubelet-config.yaml"\n',
            "/home/kubernetes/kubelet-config.yaml": HEAD + STATIC,
        },
        {"cpuManagerPolicy": "static"},
    ),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_each_distributions_configuration_is_read_completely(name: str, tmp_path: Path) -> None:
    """The distribution's files, drop-ins and flags are merged as its kubelet merges them, and no setting is unknown."""
    files, settings = COMPLETE[name]
    reading = read_files(str(written(tmp_path, files)), ROOT)
    assert (settings_of(reading), reading.incomplete) == (settings, "")


AKS = {
    "/etc/systemd/system/kubelet.service": "[Service]\nEnvironmentFile=/etc/default/kubelet\n"
    "ExecStart=/opt/azure/containers/start-kubelet.sh\n",
    "/etc/default/kubelet": 'KUBELET_FLAGS="--cgroup-driver=systemd  --topology-manager-policy=restricted "\n',
    "/etc/default/kubeletconfig.json": json.dumps(
        {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1", "cpuManagerPolicy": "static"}
    ),
}
PARTLY: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "a configuration file alone": (
        {f"{ROOT}/config.yaml": STATIC},
        {"cpuManagerPolicy": "static"},
        "command line is not visible",
    ),
    "drop-ins that no file or flag names": (
        {f"{ROOT}/config.yaml": HEAD, "/etc/kubernetes/kubelet.conf.d/10.conf": HEAD + STATIC},
        {"cpuManagerPolicy": "static"},
        "command line is not visible",
    ),
    "flags without their unit": (
        {f"{ROOT}/kubeadm-flags.env": 'KUBELET_KUBEADM_ARGS="--cpu-manager-policy=static"\n'},
        {"cpuManagerPolicy": "static"},
        "the unit that passes flags to the kubelet is not visible",
    ),
    "AKS": (
        AKS,
        {"cpuManagerPolicy": "static", "topologyManagerPolicy": "restricted"},
        "start-kubelet.sh, not kubelet directly",
    ),
    "Talos without its process": (
        {"/etc/kubernetes/kubelet.yaml": HEAD + STATIC},
        {"cpuManagerPolicy": "static"},
        "command line is not visible",
    ),
    "k3s without its unit": (
        {path: text for path, text in K3S.items() if "systemd" not in path},
        {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0-3"},
        "no k3s unit is visible",
    ),
    "files of several distributions": (
        {f"{ROOT}/config.yaml": HEAD + STATIC, "/etc/kubernetes/kubelet.yaml": HEAD},
        {},
        f"any of {ROOT}/config.yaml, /etc/kubernetes/kubelet.yaml may be the kubelet's configuration",
    ),
    "units of several distributions": (KUBEADM_UNIT | K3S, {}, "several kubelets are installed"),
    "several processes": (
        process(1, "kubelet", "--a") | process(2, "kubelet", "--b"),
        {},
        "several kubelets are running",
    ),
    "a missing file named on the command line": (
        process(1, "kubelet", "--config=/a", "--cpu-manager-policy=static"),
        {"cpuManagerPolicy": "static"},
        "/a, which the kubelet's command line specifies, is not visible",
    ),
    "a missing directory": (
        process(1, "kubelet", "--config-dir=/none"),
        {},
        "/none does not exist, so the kubelet will not start",
    ),
    "a drop-in without apiVersion and kind": (
        process(1, "kubelet", "--config-dir=/d") | {"/d/1.conf": HEAD + STATIC, "/d/2.conf": "maxPods: 1\n"},
        {"cpuManagerPolicy": "static"},
        "/d/2.conf is not a KubeletConfiguration",
    ),
    "a drop-in key in a different case": (
        process(1, "kubelet", "--config-dir=/d") | {"/d/1.conf": HEAD + "reservedSystemCpus: '1'\n"},
        {},
        "/d/1.conf has 'reservedSystemCpus'",
    ),
    "a command line that is not readable": (
        process(1, "") | {"/proc/1/cmdline": ""},
        {},
        "the command line of process 1 cannot be read",
    ),
    "a relative path": (process(1, "kubelet", "--config=a.yaml"), {}, "a.yaml is relative"),
    "a flag that the kubelet refuses": (process(1, "kubelet", "--feature-gates=A"), {}, "--feature-gates has 'A'"),
    "a variable that relocates k3s's files": (
        K3S | {"/etc/systemd/system/k3s.service.env": "K3S_CONFIG_FILE=/other\n"},
        {"topologyManagerPolicy": "restricted", "cpuManagerPolicy": "static", "reservedSystemCPUs": "0-3"},
        "an environment variable relocates k3s's files",
    ),
    "a variable in an environment file that k3s's unit names with a specifier": (
        {"/etc/systemd/system/k3s.service": K3S_UNIT, "/etc/default/k3s": "K3S_DATA_DIR=/data\n"},
        {},
        "an environment variable relocates k3s's files",
    ),
    "a file that is not YAML": ({f"{ROOT}/config.yaml": "a: ["}, {}, "is not valid YAML"),
    "a duplicate key": ({f"{ROOT}/config.yaml": STATIC * 2}, {}, "is given twice"),
    "a large file": ({f"{ROOT}/config.yaml": "#" * (300 << 10)}, {}, "is larger than"),
    "deep nesting": ({f"{ROOT}/config.yaml": "[" * 5000}, {}, "nested more than"),
    "deep JSON": ({f"{ROOT}/config.yaml": '{"a":' * 5000}, {}, "nested more than"),
    "an alias bomb": (
        {f"{ROOT}/config.yaml": "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 9))},
        {},
        "has more than",
    ),
    "many drop-ins": (
        process(1, "kubelet", "--config-dir=/d") | {f"/d/{number}.conf": HEAD for number in range(300)},
        {},
        "/d has more than 256 drop-ins",
    ),
    "deep directories": (
        process(1, "kubelet", "--config-dir=/d") | {"/d" + "/d" * 20 + "/1.conf": HEAD},
        {},
        "directories deep",
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_the_reason_for_an_incomplete_configuration_is_reported(name: str, tmp_path: Path) -> None:
    """The settings that were found are still used."""
    files, settings, why = PARTLY[name]
    reading = read_files(str(written(tmp_path, files)), ROOT)
    assert settings_of(reading) == settings
    assert why in reading.incomplete


def test_drop_ins_are_applied_in_the_order_of_a_directory_walk(tmp_path: Path) -> None:
    """Entries are in byte order, and a directory's files come at the directory's position. Symlinks to files are
    followed, but symlinks to directories are not.
    """
    names = (
        "10.conf",
        "10/z.conf",
        "10-a.conf",
        "9.conf",
        "Z.conf",
        "a/b/1.conf",
        "a/b.conf",
        "x.conf/1.conf",
        ".conf",
    )
    files = process(1, "kubelet", "--config-dir=/d") | {f"/d/{name}": HEAD + STATIC for name in names}
    files |= {"/d/no.yaml": HEAD, "/d/1.conf~": HEAD, "/elsewhere/1.conf": HEAD}
    base = written(tmp_path, files)
    (base / "d/link.conf").symlink_to("/elsewhere/1.conf")
    (base / "d/linked").symlink_to("/elsewhere")
    reading = read_files(str(base), ROOT)
    first = (".conf", "10/z.conf", "10-a.conf", "10.conf", "9.conf", "Z.conf")
    wanted = (*first, "a/b/1.conf", "a/b.conf", "link.conf", "x.conf/1.conf")
    assert [part.origin for part in reading.parts] == [f"/d/{name}" for name in wanted]
    assert reading.incomplete == ""


def test_a_directory_behind_a_symlink_has_no_drop_ins(tmp_path: Path) -> None:
    """filepath.WalkDir does not follow the symlink."""
    base = written(tmp_path, process(1, "kubelet", "--config-dir=/d") | {"/real/1.conf": HEAD + STATIC})
    (base / "d").symlink_to("/real")
    assert read_files(str(base), ROOT).parts == ()


@pytest.mark.parametrize(
    "kind",
    [
        "a symlink loop",
        "a dangling symlink",
        "a FIFO",
        "a symlink to a directory",
        "not UTF-8",
        "a symlink out of the root",
    ],
)
def test_special_files_and_symlinks_out_of_the_root_are_not_read(kind: str, tmp_path: Path) -> None:
    """No read blocks, nothing outside the host root is read, and the result is marked as incomplete."""
    (tmp_path / "secret").write_text(HEAD + STATIC)
    base = written(tmp_path / "host", process(1, "kubelet", "--config-dir=/d") | {"/d/0.yaml": ""})
    entry = base / "d/1.conf"
    match kind:
        case "a symlink loop":
            entry.symlink_to("2.conf")
            (base / "d/2.conf").symlink_to("1.conf")
        case "a dangling symlink":
            entry.symlink_to("/nothing")
        case "a symlink out of the root":
            entry.symlink_to("../../../../secret")
        case "a FIFO":
            os.mkfifo(entry)
        case "a symlink to a directory":
            (base / "elsewhere").mkdir()
            entry.symlink_to("/elsewhere")
        case _:
            entry.write_bytes(b"a: \xff\n")
    reading = read_files(str(base), ROOT)
    assert reading.parts == ()
    assert "/d/1.conf" in reading.incomplete


def test_a_file_that_changed_after_the_kubelets_start_is_not_in_effect(tmp_path: Path) -> None:
    """The kubelet reads its files only once. Removing a drop-in is detected too, because it changes the directory's
    timestamp.
    """
    files = process(1, "kubelet", "--config=/a", "--config-dir=/d") | {"/a": HEAD, "/d/1.conf": HEAD}
    base = written(tmp_path, files)
    assert read_files(str(base), ROOT).incomplete == ""
    for path in ("a", "d", "d/1.conf"):
        os.utime(base / path, (4102444900, 4102444900))
        assert read_files(str(base), ROOT).incomplete == f"/{path} was changed after the kubelet started"
        os.utime(base / path, (1, 1))


def test_an_argument_file_that_changed_after_the_kubelets_start_is_not_in_effect(tmp_path: Path) -> None:
    """MicroK8s reads the kubelet's arguments from a file."""
    files, _ = COMPLETE["MicroK8s with a running process"]
    base, path = written(tmp_path, files), "/var/snap/microk8s/9072/args/kubelet"
    os.utime(f"{base}{path}", (4102444900, 4102444900))
    assert read_files(str(base), ROOT).incomplete == f"{path} was changed after the kubelet started"


def test_the_state_files_next_to_the_kubelets_root_directory_are_read_first(tmp_path: Path) -> None:
    """The state files are read even if nothing else is visible, as with k3s, whose flags are not in any file."""
    states = {"/cpu_manager_state": "static", "/memory_manager_state": "Static"}
    files = {ROOT + path: json.dumps({"policyName": name, "checksum": 1}) for path, name in states.items()}
    kubelet = found(tmp_path / "a", files)
    assert (kubelet.cpu_manager, kubelet.memory_manager) == ("static", "Static")
    assert kubelet.incomplete is not None
    assert "kubectl get --raw /api/v1/nodes/node-a/proxy/configz" in kubelet.incomplete.remedy
    moved = {path.replace(ROOT, "/other"): text for path, text in files.items()}
    assert found(tmp_path / "b", moved | process(1, "kubelet", "--root-dir=/other")).cpu_manager == "static"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"policyName": 1}', '{"policyName": ""}', "[" * 5000, "\xff"])
def test_a_damaged_state_file_is_ignored(text: str, tmp_path: Path) -> None:
    """The policy is then taken from the configuration."""
    kubelet = found(tmp_path, {f"{ROOT}/cpu_manager_state": text, f"{ROOT}/config.yaml": HEAD + STATIC})
    assert (kubelet.cpu_manager, dict(kubelet.running)) == ("static", {})


def test_configz_overrides_all_files(tmp_path: Path) -> None:
    """The running kubelet reports its own configuration. A response that cannot be parsed is ignored."""
    base = str(written(tmp_path, {f"{ROOT}/config.yaml": HEAD + STATIC}))
    answered = choose_kubelet(base, ROOT, "n", {"cpuManagerPolicy": "none"})
    assert isinstance(answered, KubeletConfig)
    assert (answered.source, answered.cpu_manager, answered.incomplete) == ("configz", "none", None)
    spoilt = choose_kubelet(base, ROOT, "n", {"reservedSystemCPUs": "x"})
    assert isinstance(spoilt, KubeletConfig)
    assert spoilt.cpu_manager == "static"
    nothing = choose_kubelet(str(tmp_path / "none"), ROOT, "n", Unread("w", "r"))
    assert isinstance(nothing, Unread)


CHECKS = ("cpu-manager", "memory-manager", "topology-manager", "gates", "reserved-cpus", "reserved-memory")
DOCTOR: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "a drop-in that may be read": (
        {f"{ROOT}/config.yaml": HEAD}
        | {
            "/etc/kubernetes/kubelet.conf.d/1.conf": HEAD
            + "topologyManagerPolicy: restricted\nreservedSystemCPUs: 0-3\n"
        },
        {"topology-manager": "note", "reserved-cpus": "problem"},
    ),
    "state files alone": (
        {
            f"{ROOT}/cpu_manager_state": '{"policyName":"none"}',
            f"{ROOT}/memory_manager_state": '{"policyName":"Static"}',
        },
        {"cpu-manager": "good", "memory-manager": "problem", "reserved-cpus": "note"},
    ),
    "everything": (
        COMPLETE["kubeadm"][0],
        dict.fromkeys(CHECKS, "good") | {"cpu-manager": "problem", "reserved-cpus": "note"},
    ),
    "nothing": ({}, {"reserved-cpus": "note"}),
}


@pytest.mark.parametrize("name", DOCTOR)
def test_the_doctor_reports_good_only_for_known_settings(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All other configuration checks are unknown, and an archive from the node leads to the same results. The note that
    the driver reserves no CPU does not depend on the kubelet's configuration.
    """
    files, wanted = DOCTOR[name]
    root, archive = written(write_tree(small_machine(), tmp_path / "host"), files), str(tmp_path / "a.tar.gz")
    (tmp_path / "config.yaml").write_text("{}")
    command = ["--config", str(tmp_path / "config.yaml"), "-o"]
    assert cli.main(["gather", "--host-root", str(root), *command, archive]) == 0
    with Path(archive).open("rb") as file:
        unpacked = extract(file, tmp_path)
    for place in (root, unpacked):
        capsys.readouterr()
        cli.main(["doctor", "--host-root", str(place), *command, "json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        results = {one["id"]: one["result"] for one in checks}
        assert {name: results[f"kubelet.{name}"] for name in CHECKS} == dict.fromkeys(CHECKS, "unknown") | wanted
        unknown = {
            one["findings"][0]["remedy"]
            for one in checks
            if one["id"] in {f"kubelet.{n}" for n in CHECKS} and one["result"] == "unknown"
        }
        assert all("kubectl get --raw /api/v1/nodes/" in one for one in unknown)


def test_an_archive_contains_no_secret_from_the_files(tmp_path: Path) -> None:
    """k3s's configuration contains the cluster's token, and a kubelet's configuration may contain HTTP headers."""
    files = K3S | {f"{ROOT}/cpu_manager_state": '{"policyName":"static"}'}
    root = written(write_tree(small_machine(), tmp_path / "host"), files)
    command = ["--node", "worker-1", "gather", "--mask", "--host-root", str(root), "-o", str(tmp_path / "a.tar.gz")]
    assert cli.main(command) == 0
    with (tmp_path / "a.tar.gz").open("rb") as file:
        unpacked = extract(file, tmp_path)
    texts = {path: path.read_text() for path in unpacked.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if "s3cret" in text or "worker-1" in text] == []
    kubelet = json.loads(texts[unpacked / "kubelet.json"])
    assert (kubelet["running"], kubelet["unseen"]) == ({"cpu": "static"}, None)
    assert kubelet["origins"]["reservedSystemCPUs"] == "--reserved-cpus in the configuration of k3s"
