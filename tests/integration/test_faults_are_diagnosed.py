# SPDX-License-Identifier: Apache-2.0
"""Five faults that operators encounter, each injected into a healthy node: the commands name the fault and a remedy."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from numa_tools.doctor.sources.inquiry import RIGHTS

from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import captured, offline, write_tree
from tests.stage.pods import cpus
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
MACHINE = "32intel64-2p8co2t+8ve"
RESERVED = "0-1,16-17"


@pytest.fixture
def healthy_node(open_stage: OpenStage) -> Stage:
    """Returns a healthy node with an unallocated claim. All of the node's files are under one directory, which the
    commands use as the host root.
    """
    stage = open_stage(reserved_cpus=RESERVED)
    stage.add_ready_instance()
    ask_for(stage, "waiting", 4)
    paths = stage.paths
    write_tree(captured(MACHINE), paths.base)
    places = {"cdiDir": paths.cdi_dir, "runDir": paths.run_dir, "kubeletRootDir": paths.kubelet_root}
    places |= {"cgroupRoot": paths.cgroup_root, "nriSocket": paths.nri_socket}
    values = {key: f"/{path.relative_to(paths.base)}" for key, path in places.items()}
    values |= {"kubeconfig": str(paths.kubeconfig), "reservedCPUs": RESERVED}
    (paths.base / "commands.yaml").write_text(json.dumps(values))
    return stage


def told(stage: Stage, command: str) -> str:
    """Returns the output of a command that runs with the node's root mounted."""
    base = stage.paths.base
    flags = ["--config", str(base / "commands.yaml"), "--host-root", str(base), "--node", stage.settings.node]
    words = [sys.executable, "-m", "numa_tools", *flags, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    return done.stdout + done.stderr


def ask_for(stage: Stage, name: str, count: int) -> None:
    """Creates a claim for CPUs and leaves it unallocated."""
    document = {"metadata": {"name": name}, "spec": {"devices": {"requests": [cpus(count)]}}}
    stage.api(CLAIMS, "POST", document)


def nri_off(stage: Stage) -> None:
    """The runtime no longer serves NRI's socket."""
    next(one for one in stage.stand_ins if one.name == "runtime").kill()
    wait_for("the service to notice the lost connection", lambda: stage.state("/v1/backend")["problem"])


def gate_off(stage: Stage) -> None:
    """The API server restarts without the gate, and the slices are lost."""
    stage.api("/fake", "POST", {"gates": {"DRAConsumableCapacity": False}})
    for one in stage.slices():
        stage.api(f"/apis/resource.k8s.io/v1/resourceslices/{one['metadata']['name']}", "DELETE")


def static_cpu_manager(stage: Stage) -> None:
    """The kubelet's configuration file sets the static policy; the file is mounted as docs/doctor.md describes."""
    (stage.paths.kubelet_root / "config.yaml").write_text("cpuManagerPolicy: static\n")


def reserved_offline(stage: Stage) -> None:
    """A reserved CPU goes offline: the machine's files in sysfs change as they would under a real kernel."""
    shutil.rmtree(stage.paths.base / "sys/devices/system")
    write_tree(offline(captured(MACHINE), {1}), stage.paths.base)


def claim_too_big(stage: Stage) -> None:
    """A claim requests more CPUs than any NUMA node has."""
    ask_for(stage, "greedy", 17)


NAMED: dict[Callable[[Stage], None], dict[str, tuple[str, str]]] = {
    nri_off: {
        "doctor": ("[runtime.nri]", "enable NRI and set nriSocket to the path of its socket"),
        "explain waiting": ("nri-backend is not connected to the container runtime", "check that NRI is enabled"),
    },
    gate_off: {"doctor": ("(feature gate DRAConsumableCapacity). [api.gates]", "enable it in the API")},
    static_cpu_manager: {
        "doctor": ("CPU manager uses the static policy. [kubelet.cpu-manager]", "set cpuManagerPolicy: none")
    },
    reserved_offline: {
        "doctor": (
            "reservedCPUs: CPU 1 is offline",
            "bring the missing CPU or NUMA node online, or remove it from the setting",
        ),
        "explain cpu/1": ("CPU 1: offline: switched off in the kernel, even though reservedCPUs includes it", ""),
    },
    claim_too_big: {"explain greedy": ("cpudevnuma000 allows at most 12 of dra.cpu/cpu, 17 requested", "request less")},
}
"""For each fault and command: the message that names the fault, and the remedy."""


@pytest.mark.parametrize("fault", NAMED, ids=lambda one: one.__name__)
def test_the_fault_is_named(fault: Callable[[Stage], None], healthy_node: Stage) -> None:
    """The commands do not mention the fault before it occurs; afterwards they name it and give a remedy."""
    for command, (named, _) in NAMED[fault].items():
        assert named not in told(healthy_node, command)
    fault(healthy_node)
    for command, (named, remedy) in NAMED[fault].items():
        shown = told(healthy_node, command)
        assert named in shown
        assert remedy in shown


@pytest.mark.timeout(300)
def test_each_missing_rule_of_the_cluster_role_is_named(healthy_node: Stage) -> None:
    """The doctor names the verb and the resource that RBAC denies, and the rule to add."""
    assert "[api.rights" not in told(healthy_node, "doctor")
    for verb, group, resource in dict.fromkeys(right[:3] for right in RIGHTS):
        healthy_node.api("/fake", "POST", {"forbidden": [[verb, resource]]})
        shown = told(healthy_node, "doctor")
        assert f"RBAC does not let the driver {verb} {resource}" in shown
        assert f'apiGroups: ["{group}"], resources: [{resource}], verbs: [{verb}]' in shown
