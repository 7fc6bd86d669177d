# SPDX-License-Identifier: Apache-2.0
"""Commands that the plugin runs through kubectl in the driver's pod on a node. The fake cluster has no kubelet that
could run them, so kubectl is a fake as well.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.rig import PODS, Plugin
from tests.rigs.builders import NODE


def driver_pod(*ports: dict[str, Any]) -> dict[str, Any]:
    """Returns the driver's pod on the node, with these ports."""
    return {
        "metadata": {"name": "driver-1", "labels": {"app.kubernetes.io/part-of": "dra-driver-numa"}},
        "spec": {
            "nodeName": NODE,
            "containers": [{"name": "frontend", "ports": list(ports)}],
            "volumes": [
                {"name": "config", "configMap": {"name": "dra-driver-numa-config"}},
                {"name": "registry-cpu", "hostPath": {"path": "/var/lib/kubelet/plugins_registry/dra.cpu"}},
            ],
        },
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize("name", ["status", "doctor", "page"])
@pytest.mark.parametrize("volumes", [None, [], [{"name": "plugins_registry", "emptyDir": {}}, {"hostPath": None}]])
async def test_a_pod_that_only_has_the_drivers_label_is_not_used(plugin: Plugin, name: str, volumes: Any) -> None:
    """Any tenant can create a pod with the driver's label. Commands must not run in such a pod, even if it is newer
    than the driver's pod, or if the driver is not running.
    """
    forged = driver_pod({"name": "page", "containerPort": 80})
    forged["metadata"] |= {"name": "forged", "creationTimestamp": "2999-01-01T00:00:00Z"}
    forged["spec"] |= {"volumes": volumes}
    plugin.server.store.create(PODS, "tenant", forged)
    code, out, err = await plugin.run(name, NODE)
    assert (code, out, "no running pod of dra-driver-numa on node node-a" in err) == (1, "", True)
    plugin.server.store.create(PODS, "numa", driver_pod({"name": "page", "containerPort": 8082}))
    code, out, err = await plugin.run(name, NODE, *(["--no-browser"] if name == "page" else []))
    assert (code, "driver-1" in out + err, "forged" in out + err) == (0, True, False)


@pytest.mark.parametrize("name", ["status", "doctor"])
async def test_a_command_runs_on_the_node_and_its_status_is_passed_on(plugin: Plugin, name: str) -> None:
    """The command runs in a container of the driver's pod on that node. If the node has no such pod, the command
    reports that.
    """
    code, _, err = await plugin.run(name, NODE)
    assert (code, "no running pod of dra-driver-numa on node node-a" in err) == (1, True)
    plugin.server.store.create(PODS, "numa", driver_pod())
    code, out, _ = await plugin.run(name, NODE, "-o", "json", FAKE_KUBECTL_STATUS="1")
    command = ["--", "dra-frontend", name, "-o", "json"]
    assert (code, json.loads(out)) == (1, ["-n", "numa", "driver-1", "-c", "frontend", *command])


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["-o", "yaml"], ["-o", "yaml"]),
        (["-o", "wide"], ["-o", "wide"]),
        (["-w"], ["--watch"]),
        (["-o", "table"], []),
    ],
)
async def test_output_formats_of_status_are_passed_on(plugin: Plugin, words: list[str], passed: list[str]) -> None:
    """The command on the node supports the plugin's output formats. A table is its default and needs no flag."""
    plugin.server.store.create(PODS, "numa", driver_pod())
    _, out, _ = await plugin.run("status", NODE, *words)
    assert json.loads(out)[5:] == ["--", "dra-frontend", "status", *passed]


async def test_doctor_gets_the_kubelets_configuration_with_the_users_permissions(plugin: Plugin) -> None:
    """The driver has no permission for nodes/proxy, so the plugin reads the kubelet's configuration with the user's
    permissions. If the user lacks this permission, too, the command runs without the configuration.
    """
    plugin.server.store.create(PODS, "numa", driver_pod())
    plugin.server.options.kubelets[NODE] = {"cpuManagerPolicy": "static"}
    _, out, _ = await plugin.run("doctor", NODE)
    assert json.loads(out)[-3:] == ["doctor", "--kubelet-config", "-"]
    assert json.loads(out)[0] == "-i"
    plugin.server.options.forbidden.add(("get", "nodes/proxy"))
    assert json.loads((await plugin.run("doctor", NODE))[1])[-1] == "doctor"


async def test_doctor_runs_in_an_older_image_without_an_unknown_flag(plugin: Plugin) -> None:
    """During a rollout, a pod's image may be older than the plugin and may not support the flag. The command then runs
    without the flag. Other errors and exit statuses are passed on unchanged.
    """
    plugin.server.store.create(PODS, "numa", driver_pod())
    plugin.server.options.kubelets[NODE] = {"cpuManagerPolicy": "static"}
    older = {"FAKE_KUBECTL_UNKNOWN": "--kubelet-config", "FAKE_KUBECTL_STATUS": "1"}
    code, out, err = await plugin.run("doctor", NODE, "-o", "json", **older)
    assert (code, json.loads(out)[-4:]) == (1, ["dra-frontend", "doctor", "-o", "json"])
    assert err.startswith("kubectl numa: the image of pod driver-1 is older than this plugin")
    assert "usage" not in err
    other = {"FAKE_KUBECTL_ERRORS": "dra-frontend: config.yaml: cannot be read\n", "FAKE_KUBECTL_STATUS": "2"}
    code, out, err = await plugin.run("doctor", NODE, **other)
    assert (code, err) == (2, other["FAKE_KUBECTL_ERRORS"])
    assert len(out.splitlines()) == 1, "the command runs only once"


def test_the_configuration_is_read_from_standard_input(tmp_path: Path) -> None:
    """kubectl exec passes standard input on; a document that is not a map is reported as a usage error before anything
    else is read.
    """
    command = [sys.executable, "-m", "numa_tools", "doctor", "--host-root", str(tmp_path), "--kubelet-config", "-"]
    done = subprocess.run(command, input=b"[]", capture_output=True, check=False)
    assert (done.returncode, b"is not a map" in done.stderr) == (2, True)


async def test_the_page_is_forwarded(plugin: Plugin) -> None:
    """A local port is forwarded to the one that the pod declares; if the pod declares none, the error names the
    setting.
    """
    plugin.server.store.create(PODS, "numa", driver_pod({"name": "page", "containerPort": 8082}))
    code, out, err = await plugin.run("page", NODE, "--no-browser")
    assert (code, out) == (0, "http://localhost:40001/   (Ctrl-C stops it)\n")
    assert json.loads(err) == ["-n", "numa", "pod/driver-1", ":8082"]
    plugin.server.store.delete(PODS, "numa", "driver-1")
    plugin.server.store.create(PODS, "numa", driver_pod())
    code, _, err = await plugin.run("page", NODE)
    assert (code, "driverConfig.pagePort" in err) == (1, True)
