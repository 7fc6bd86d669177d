# SPDX-License-Identifier: Apache-2.0
"""The node tests translate the rendered pod into calls to the runtime. If a field of the pod changes, the calls change.
An unknown field causes an error that contains its path.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.chart.helm import EVERYTHING, render
from tests.node._pb import cri_pb2 as pb
from tests.node.rig.kubelet_pod import Identity, KubeletPod, NodeFacts, translate
from tests.node.rig.kubelet_resources import UntranslatableError, cpu_weight, quantity
from tests.node.rig.template import Fields, UnknownFieldError

NODE = NodeFacts("node-a", 10 << 30, resolvers=("10.0.2.3",))
IDENTITY = Identity("dra-driver-numa-abcde", "0b1d-22")
Document = dict[str, Any]


def translated(change: Callable[[Document], object] = lambda template: None, **values: Any) -> KubeletPod:
    """Returns the translation of the chart's pod after its template has been changed."""
    objects = copy.deepcopy(render(values))
    (daemonset,) = (one for one in objects if one["kind"] == "DaemonSet")
    change(daemonset["spec"]["template"])
    return translate(objects, IDENTITY, NODE)


def configs(pod: KubeletPod) -> list[bytes]:
    """Returns the serialized configurations of the sandbox and the containers, as the runtime receives them."""
    parts = [pod.sandbox, *(one.config for one in (*pod.init, *pod.containers))]
    return [part.SerializeToString(deterministic=True) for part in parts]


def backend(template: Document) -> Document:
    """Returns the rendered backend container."""
    found: Document = next(one for one in template["spec"]["containers"] if one["name"] == "backend")
    return found


@pytest.mark.parametrize("values", [{}, {**EVERYTHING}, {"appArmorProfile": "RuntimeDefault"}], ids=str)
def test_every_field_of_the_chart_is_translated_or_listed(values: Document) -> None:
    """With the default values and with every option on, every field of the pod template is translated, or is listed as
    one that another component reads.
    """
    helper = ["hugepages"] if "hugepagesOnDemand" in values.get("driverConfig", {}) else []
    assert [one.name for one in translated(**values).containers] == ["frontend", "backend", *helper]


CHANGES: dict[str, Callable[[Document], object]] = {
    "a capability": lambda t: backend(t)["securityContext"]["capabilities"]["add"].append("NET_ADMIN"),
    "a dropped capability": lambda t: backend(t)["securityContext"]["capabilities"].update(drop=["KILL"]),
    "privilege escalation": lambda t: backend(t)["securityContext"].update(allowPrivilegeEscalation=True),
    "a writable root file system": lambda t: backend(t)["securityContext"].update(readOnlyRootFilesystem=False),
    "a privileged container": lambda t: backend(t)["securityContext"].update(privileged=True),
    "another user": lambda t: backend(t)["securityContext"].update(runAsUser=1000),
    "another user for the whole pod": lambda t: t["spec"]["securityContext"].update(runAsUser=1000),
    "no seccomp filter": lambda t: t["spec"]["securityContext"]["seccompProfile"].update(type="Unconfined"),
    "an AppArmor profile": lambda t: backend(t)["securityContext"].update(appArmorProfile={"type": "Unconfined"}),
    "another SELinux type": lambda t: t["spec"]["securityContext"]["seLinuxOptions"].update(type="container_t"),
    "an argument": lambda t: backend(t)["args"].append("--log-level=debug"),
    "a command": lambda t: backend(t).update(command=["/bin/true"]),
    "a variable": lambda t: backend(t)["env"].append({"name": "X", "value": "1"}),
    "another image": lambda t: backend(t).update(image="localhost/other:1"),
    "a mount": lambda t: backend(t)["volumeMounts"].append({"name": "hidden", "mountPath": "/x"}),
    "a read-only mount": lambda t: backend(t)["volumeMounts"][2].update(readOnly=True),
    "mount propagation": lambda t: backend(t)["volumeMounts"][2].update(mountPropagation="Bidirectional"),
    "another host path": lambda t: t["spec"]["volumes"][2]["hostPath"].update(path="/elsewhere"),
    "a memory limit": lambda t: backend(t)["resources"]["limits"].update(memory="1Gi"),
    "a CPU limit": lambda t: backend(t)["resources"]["limits"].update(cpu="1"),
    "a CPU request": lambda t: backend(t)["resources"]["requests"].update(cpu="1"),
    "another priority class": lambda t: t["spec"].update(priorityClassName="other"),
    "the host network": lambda t: t["spec"].update(hostNetwork=True),
    "a label": lambda t: t["metadata"]["labels"].update(x="y"),
    "an annotation": lambda t: t["metadata"]["annotations"].update(x="y"),
    "a port": lambda t: backend(t)["ports"].append({"name": "other", "containerPort": 9}),
    "another grace period": lambda t: t["spec"].update(terminationGracePeriodSeconds=5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changing_the_pod_changes_the_calls_to_the_runtime(change: Callable[[Document], object]) -> None:
    """Security contexts, mounts, arguments, resources and other fields reach the configuration of the sandbox or of a
    container.
    """
    assert configs(translated(change)) != configs(translated())


UNKNOWN: dict[str, tuple[Callable[[Document], object], str]] = {
    "of the pod": (lambda t: t["spec"].update(shareProcessNamespace=True), r"spec\.shareProcessNamespace"),
    "of the pod's metadata": (lambda t: t["metadata"].update(finalizers=["x"]), r"metadata\.finalizers"),
    "of a container": (lambda t: backend(t).update(workingDir="/tmp"), r"containers\[1\]\.workingDir"),
    "of a container's security context": (
        lambda t: backend(t)["securityContext"].update(procMount="Unmasked"),
        r"securityContext\.procMount",
    ),
    "of the pod's security context": (
        lambda t: t["spec"]["securityContext"].update(fsGroup=1),
        r"securityContext\.fsGroup",
    ),
    "of a mount": (
        lambda t: backend(t)["volumeMounts"][0].update(recursiveReadOnly="Enabled"),
        r"volumeMounts\[0\]\.recursiveReadOnly",
    ),
    "of a volume": (lambda t: t["spec"]["volumes"].append({"name": "x", "nfs": {"server": "s"}}), r"nfs\.server"),
    "of a probe": (lambda t: backend(t)["livenessProbe"].update(exec={"command": ["x"]}), r"livenessProbe\.exec"),
    "of a resource": (lambda t: backend(t)["resources"].update(claims=[{"name": "x"}]), r"claims"),
}


@pytest.mark.parametrize(("change", "path"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_field_is_rejected_with_its_path(change: Callable[[Document], object], path: str) -> None:
    """The rig must not run a pod while ignoring one of its fields."""
    with pytest.raises(UnknownFieldError, match=path):
        translated(change)


VALUES: dict[str, Callable[[Document], object]] = {
    "a Localhost seccomp profile": lambda t: t["spec"]["securityContext"]["seccompProfile"].update(type="Localhost"),
    "a DNS policy": lambda t: t["spec"].update(dnsPolicy="None"),
    "a resource": lambda t: backend(t)["resources"]["limits"].update(pids="1"),
    "a downward API field": lambda t: backend(t)["env"][0]["valueFrom"]["fieldRef"].update(fieldPath="status.podIP"),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES.keys())
def test_an_unknown_value_is_rejected(change: Callable[[Document], object]) -> None:
    """A value without a rule raises an exception instead of being treated as the default."""
    with pytest.raises(UntranslatableError):
        translated(change)


def test_resources_are_computed_as_the_kubelet_computes_them() -> None:
    """CPU shares are computed from the requests, and the runtime's limits are computed from the pod's limits. The limit
    for memory and swap equals the memory limit, and the OOM score adjustment is that of a critical pod.
    """
    pod = translated()
    resources = pod.containers[1].config.linux.resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpu_period) == (204, 0, 100_000)
    assert resources.memory_limit_in_bytes == resources.memory_swap_limit_in_bytes == 256 << 20
    assert resources.oom_score_adj == -997
    assert {one.page_size: one.limit for one in resources.hugepage_limits} == {"2MB": 0, "1GB": 0}
    assert (pod.group.qos, pod.group.shares, pod.group.memory, pod.group.quota) == ("burstable", 307, 512 << 20, 0)


def test_the_oom_score_of_an_ordinary_pod_follows_its_memory_request() -> None:
    """A request for a tenth of the node's memory lowers the score by a tenth; a Guaranteed pod is protected."""

    def ordinary(template: Document) -> None:
        template["spec"].update(priorityClassName="other")
        backend(template)["resources"]["requests"]["memory"] = "1Gi"

    def guaranteed(template: Document) -> None:
        template["spec"].update(priorityClassName="other")
        for one in template["spec"]["containers"]:
            one["resources"] = {"limits": {"cpu": "1", "memory": "1Gi"}}

    assert translated(ordinary).containers[1].config.linux.resources.oom_score_adj == 900
    pod = translated(guaranteed)
    assert pod.containers[1].config.linux.resources.oom_score_adj == -997
    assert (pod.group.qos, pod.group.quota) == ("guaranteed", 200_000)


def test_a_restarted_container_has_the_next_attempt_number_and_its_own_log() -> None:
    """Nothing else about a container changes when it is started again."""
    container = translated().containers[0]
    first, second = container.started(0), container.started(1)
    assert first == container.config
    assert (second.metadata.attempt, second.log_path) == (1, "frontend/1.log")
    assert second.annotations["io.kubernetes.container.restartCount"] == "1"


def test_named_ports_of_probes_are_resolved() -> None:
    """A probe that names a port gets the number of that port. The intervals are those in the chart."""
    probe = translated(probes={"readiness": {"periodSeconds": 7}}).containers[1].probes["readiness"]
    assert (probe.path, probe.port, probe.period, probe.timeout) == ("/readyz", 8081, 7, 5)


def test_the_kubelets_volumes_have_their_files() -> None:
    """The configuration is in its volume, and the token's volume contains the three files of a service account."""
    volumes = {one.name: one for one in translated(driverConfig={"reservedCPUs": "0"}).volumes}
    assert "reservedCPUs" in volumes["config"].files["config.yaml"]
    assert volumes["token"].files.keys() == {"token", "ca.crt", "namespace"}
    assert (volumes["cgroup"].host_type, volumes["run"].host_type) == ("Directory", "DirectoryOrCreate")
    assert volumes["hidden"].path == "/var/lib/kubelet/pods/0b1d-22/volumes/kubernetes.io~empty-dir/hidden"


def test_a_pod_without_host_network_has_its_own_network() -> None:
    """The network and IPC namespaces are the pod's, and the PID namespace is the container's."""
    options = translated().sandbox.linux.security_context.namespace_options
    assert (options.network, options.pid, options.ipc) == (pb.POD, pb.CONTAINER, pb.POD)


@pytest.mark.parametrize(
    ("text", "value"), [("100m", "0.1"), ("256Mi", str(256 << 20)), ("1", "1"), ("1G", "1000000000"), (2, "2")]
)
def test_quantities_are_parsed_as_numbers(text: object, value: str) -> None:
    """The API allows decimal and binary suffixes."""
    assert quantity(text) == type(quantity(text))(value)


def test_the_default_share_corresponds_to_the_default_weight() -> None:
    """1024 shares (one CPU) correspond to a weight of 100, and the ends of both ranges correspond to each other."""
    assert [cpu_weight(shares) for shares in (2, 1024, 262144)] == [1, 100, 10000]


def test_a_document_is_not_changed_by_its_reader() -> None:
    """Fields.of() reads a copy, so a document can be read twice."""
    document = {"a": {"b": 1}, "c": [{"d": 2}]}
    fields = Fields.of(document)
    assert fields.inside("a").take("b") == 1
    with pytest.raises(UnknownFieldError, match=r"^c\[0\]\.d$"):
        fields.finish()
    assert document == {"a": {"b": 1}, "c": [{"d": 2}]}
