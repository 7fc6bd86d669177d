# SPDX-License-Identifier: Apache-2.0
"""The rendered chart is accepted by Kubernetes 1.34 to 1.37 and requests no more permissions than it needs."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.kubelet.plugin import PluginPaths
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import HugepagePool, NumaNode
from kubectl_numa.cli import mounts_registry
from numa_contract.config import Config, parse_config
from numa_contract.names import DRIVERS, TOLERATE_MISSING_ANNOTATION
from numa_tools.commands.classes import device_classes

from tests.chart import helm
from tests.chart.helm import EVERYTHING, Document, container, only, pod_of, render
from tests.chart.policies import policy
from tests.chart.schemas import VERSIONS, ValidationError, check_object
from tests.rigs.trees import captured

EXAMPLES = helm.CHART.parents[1] / "examples/values"
MATRIX: dict[str, Document] = {
    "defaults": {},
    "everything": EVERYTHING,
    "peer": {"fullnameOverride": "dracpu", "podLabels": {"app": "dracpu"}, "namespaceOverride": "kube-system"},
    "memory peer": {"fullnameOverride": "dramemory", "namespaceOverride": "kube-system"},
    "minimal": {
        "rbac": {"create": False},
        "serviceAccount": {"create": False},
        "admissionPolicy": {name: {"enabled": False} for name in ("parameters", "tolerateMissing")}
        | {"enabled": False},
        "deviceClasses": {"create": False},
        "tests": {"create": False},
        "selinuxType": "",
        "priorityClassName": "",
        "probes": {"startup": None, "liveness": None, "readiness": None},
        "networkPolicy": {"enabled": False},
        "hostHugepages": {"detect": False},
    },
    "customized": {
        "driverConfig": {
            "reservedCPUs": "0-1,64",
            "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": 4096}}],
            "kubeletRootDir": "/var/lib/k0s/kubelet/",
            "nriSocket": "/run/k3s/nri/nri.sock",
            "logFormat": "json",
        },
        "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
        "frontend": {"image": {"digest": "sha256:" + "ab" * 32}, "extraArgs": ["--log-level=debug"], "port": 9090},
        "backend": {"extraEnv": [{"name": "A", "value": "b"}], "resources": {"limits": {"memory": "200Mi"}}},
        "deviceClasses": {
            "hugepageSizes": ["64Ki", "512Mi"],
        },
        "imagePullSecrets": [{"name": "secret"}],
        "podAnnotations": {"a": "b"},
        "affinity": {"nodeAffinity": {}},
        "tolerations": [],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
    },
    **{path.stem: yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))},
    # Strings that YAML parses as a different type unless they are quoted.
    "apparmor": {"appArmorProfile": "RuntimeDefault"},
    "digits": {
        **EVERYTHING,
        "fullnameOverride": "123",
        "nameOverride": "007",
        "namespaceOverride": "1e3",
        "driverConfig": {"kubeletRootDir": "/var/lib/a, b #c"},
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    """The schemas of the supported Kubernetes versions accept every object, with unknown fields rejected."""
    different = {json.dumps(document) for values in MATRIX.values() for document in render(values)}
    assert len(different) > 30
    for document in map(json.loads, sorted(different)):
        check_object(document, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_reject_unknown_fields(version: str) -> None:
    """Shows that the validation in the test above detects errors."""
    daemon_set = copy.deepcopy(only(render(), "DaemonSet"))
    check_object(daemon_set, version)
    daemon_set["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(ValidationError, match="readinesProbe"):
        check_object(daemon_set, version)


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES.glob("*.yaml")])
def test_example_values_are_accepted_by_the_services(name: str) -> None:
    """The services can parse the configuration in a values file, and it differs from the default."""
    config = next(d for d in render(MATRIX[name]) if d["kind"] == "ConfigMap")["data"]["config.yaml"]
    assert parse_config(yaml.safe_load(config), name) != Config()


def test_numeric_names_stay_strings() -> None:
    """Names that consist of digits are rendered unchanged, even in kinds whose schemas are not part of Kubernetes."""
    values = MATRIX["digits"]
    for metadata in (document["metadata"] for document in render(values)):
        assert metadata.get("namespace", "1e3") == "1e3"
        assert re.match("123|dra[.]|numa-cpus", metadata["name"])
        assert set(map(type, metadata.get("labels", {}).values())) <= {str}
    assert "/var/lib/a, b #c/plugins_registry/dra.cpu" in helm.host_mounts(render(values), "frontend")


@pytest.mark.parametrize("name", ["defaults", "everything"])
def test_lint_is_silent(name: str, tmp_path: Path) -> None:
    """``helm lint --strict`` reports nothing, in any namespace."""
    values = tmp_path / "values.json"
    values.write_text(json.dumps(MATRIX[name]))
    told = helm.run("lint", "--strict", "--values", str(values), str(helm.CHART))
    assert "0 chart(s) failed" in told
    assert not {"[WARNING]", "[ERROR]", "Fail:"} & set(told.split())


def test_objects_contain_neither_comments_nor_blank_lines() -> None:
    """Comments in the templates are not part of the rendered objects."""
    shipped = helm.text(EVERYTHING).splitlines()
    assert len(shipped) > 1000
    stray = [line for line in shipped if not line.strip() or re.match(" *#", line)]
    assert {line.partition(" dra-")[0] for line in stray} == {"# Source:"}


@pytest.mark.parametrize(("exclusivity", "added"), [("pool", False), ("auto", True), ("partition", True)])
def test_the_capability_for_partitions_depends_on_the_mode(exclusivity: str, added: bool) -> None:
    """Pool mode does not require SYS_ADMIN. The pods of a group in pool mode do not have the capability, and the
    SecurityContextConstraints omit it if all groups use pool mode.
    """
    values: Document = {"driverConfig": {"cpuExclusivity": exclusivity}, "openshift": {"scc": {"create": True}}}
    documents = render(values)
    (scc,) = (one for one in documents if one["kind"] == "SecurityContextConstraints")
    wanted = ["DAC_OVERRIDE", *(["SYS_ADMIN"] if added else [])]
    assert pod_of(documents)["containers"][1]["securityContext"]["capabilities"]["add"] == wanted
    assert scc["allowedCapabilities"] == wanted


@pytest.mark.parametrize("name", MATRIX)
def test_containers_have_no_more_privileges_than_needed(name: str) -> None:
    """The containers are not privileged and use no host namespaces. They have a read-only root file system and a
    seccomp profile, and only the backend has capabilities.
    """
    documents = render(MATRIX[name])
    pod = pod_of(documents)
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    exclusivity = MATRIX[name].get("driverConfig", {}).get("cpuExclusivity", "auto")
    backend = ["DAC_OVERRIDE"] if exclusivity == "pool" else ["DAC_OVERRIDE", "SYS_ADMIN"]
    for one in [*pod.get("initContainers", []), *pod["containers"]]:
        profile = {"apparmor": "RuntimeDefault"}.get(name)
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **({"add": backend} if one["name"] == "backend" else {})},
            "readOnlyRootFilesystem": True,
            **({"appArmorProfile": {"type": profile}} if profile else {}),
        }
        assert not any("hostPort" in port for port in one.get("ports", []))


def test_each_container_has_only_its_own_paths() -> None:
    """The frontend reads cgroups and cannot reach the runtime; the backend writes to cgroups and its own directory."""
    documents = render()
    kubelet = "/var/lib/kubelet"
    own = [f"{kubelet}/{place}/{driver}" for place in ("plugins_registry", "plugins") for driver in DRIVERS]
    assert helm.host_mounts(documents, "frontend") == {
        "/run/dra-driver-numa": ("/run/dra-driver-numa", False),
        "/var/run/cdi": ("/var/run/cdi", False),
        **{path: (path, False) for path in own},
        "/sys/fs/cgroup": ("/sys/fs/cgroup", True),
    }
    backend = {
        "/run/dra-driver-numa": ("/run/dra-driver-numa", True),
        "/run/dra-driver-numa/backend": ("/run/dra-driver-numa/backend", False),
        "/var/run/cdi": ("/var/run/cdi", True),
        "/var/run/nri": ("/var/run/nri", True),
        "/sys/fs/cgroup": ("/sys/fs/cgroup", False),
        "/host/proc/irq": ("/proc/irq", False),
        "/host/sys/devices/virtual/workqueue": ("/sys/devices/virtual/workqueue", False),
        "/host/run/irqbalance": ("/run/irqbalance", True),
    }
    assert helm.host_mounts(documents, "backend") == backend
    # If detection of host processes' hugepages is off, the frontend does not mount the node's cgroup tree.
    documents = render({"hostHugepages": {"detect": False}})
    assert "/sys/fs/cgroup" not in helm.host_mounts(documents, "frontend")
    assert helm.host_mounts(documents, "backend") == backend
    # If moving interrupts is off, the backend has neither the mounts nor the argument for it.
    documents = render({"hostInterrupts": {"mount": False}})
    assert not any(path.startswith("/host/") for path in helm.host_mounts(documents, "backend"))
    assert "--kernel-root=/host" not in helm.container(documents, "backend")["args"]


def test_the_cdi_directory_is_mounted_as_a_whole() -> None:
    """The directory is created if missing. Files are renamed into place, so mounts of individual files would not
    show them.
    """
    for directory in ("/var/run/cdi", "/run/cdi"):
        documents = render({"driverConfig": {"cdiDir": directory}})
        (volume,) = [one for one in pod_of(documents)["volumes"] if one["name"] == "cdi"]
        assert volume["hostPath"] == {"path": directory, "type": "DirectoryOrCreate"}
        assert helm.host_mounts(documents, "frontend")[directory] == (directory, False)
        assert helm.host_mounts(documents, "backend")[directory] == (directory, True)


def test_neither_container_can_acquire_the_others_lock() -> None:
    """The frontend cannot see the backend's directory, because any process that can open a lock file can lock it."""
    documents = render({"driverConfig": {"runDir": "/run/numa"}})
    frontend = {mount["mountPath"]: mount for mount in container(documents, "frontend")["volumeMounts"]}
    (over,) = (
        volume for volume in pod_of(documents)["volumes"] if volume["name"] == frontend["/run/numa/backend"]["name"]
    )
    assert over == {"name": over["name"], "emptyDir": {}}
    order = [mount["mountPath"] for mount in container(documents, "backend")["volumeMounts"]]
    assert order.index("/run/numa") < order.index("/run/numa/backend")


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_kubelet_finds_the_sockets_in_the_mounted_directories(driver: str) -> None:
    """Both sockets of a driver are in that driver's directories, which the kubelet's plugin watcher scans."""
    paths = PluginPaths.under(Path("/var/lib/kubelet"), driver, "6d0c0de0-0000-4000-8000-000000000001")
    mounts = helm.host_mounts(render(), "frontend")
    assert mounts[str(paths.registration.parent)] == (f"/var/lib/kubelet/plugins_registry/{driver}", False)
    assert mounts[str(paths.dra.parent)] == (f"/var/lib/kubelet/plugins/{driver}", False)


@pytest.mark.parametrize("name", ["frontend", "backend"])
def test_memory_is_limited_and_cpu_time_is_not(name: str) -> None:
    """A container that leaks memory is killed when it reaches its limit. CPU time is not limited, because a throttled
    driver would delay every pod on the node.
    """
    resources = container(render(), name)["resources"]
    assert resources["limits"].keys() == {"memory"}
    assert resources["requests"].keys() == {"cpu", "memory"}


def test_the_drivers_pods_start_where_the_plugin_is_required() -> None:
    """If the driver's own pods required the plugin, the runtime would wait for a plugin that only they can start."""
    annotations = only(render(), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    assert annotations[TOLERATE_MISSING_ANNOTATION] == "true"


def test_the_network_policy_allows_only_metrics_and_the_api_server() -> None:
    """Only the frontend's port is open, so no client can connect to the backend. The API server's addresses and ports
    can be configured, and so can the clients that read metrics.
    """
    policy = only(render(), "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": "frontend"}]}]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": port} for port in (443, 6443)]}]
    named = {"networkPolicy": {"apiServerCIDRs": ["10.0.0.1/32"], "metricsFrom": [{"podSelector": {}}]}}
    policy = only(render(named), "NetworkPolicy")["spec"]
    assert policy["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    assert policy["ingress"][0]["from"] == [{"podSelector": {}}]


def test_the_kubectl_plugin_finds_the_pods_of_every_group() -> None:
    """``kubectl numa`` finds the driver's pod by a label and a mount, its container by name and the page by the port's
    name.
    """
    group = {"name": "quiet", "nodeSelector": {"quiet": "yes"}, "driverConfig": {"pagePort": 8083}}
    documents = render({"groups": [group], "driverConfig": {"pagePort": 8082}})
    templates = [one["spec"]["template"] for one in documents if one["kind"] == "DaemonSet"]
    ports = []
    for template in templates:
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "dra-driver-numa"
        assert mounts_registry(template), "kubectl numa recognizes the driver's pods by this mount"
        [frontend] = [one for one in template["spec"]["containers"] if one["name"] == "frontend"]
        ports += [port["containerPort"] for port in frontend["ports"] if port["name"] == "page"]
    assert sorted(ports) == [8082, 8083]
    assert "page" not in {port["name"] for port in container(render(), "frontend")["ports"]}


def test_only_the_frontend_can_call_the_api_server() -> None:
    """The backend gets no token. The frontend's token is bound to its pod, so the admission policy can determine the
    node that a request comes from.
    """
    documents = render()
    assert pod_of(documents)["automountServiceAccountToken"] is False
    mounts = {name: [m["name"] for m in container(documents, name)["volumeMounts"]] for name in ("frontend", "backend")}
    assert "token" in mounts["frontend"]
    assert "token" not in mounts["backend"]


def test_tools_for_dra_driver_cpu_find_what_they_expect() -> None:
    """Container 0 is the frontend and has the argument --config; the ConfigMap, its key, the ports and the environment
    variables have the expected names.
    """
    documents = render({"driverConfig": {"reservedCPUs": "0"}})
    first, second = pod_of(documents)["containers"]
    assert (first["name"], second["name"]) == ("frontend", "backend")
    for one, port in ((first, 8080), (second, 8081)):
        assert "--config=/etc/dra-driver-numa/config.yaml" in one["args"]
        assert [p["containerPort"] for p in one["ports"]] == [port]
        assert {env["name"] for env in one["env"]} == {"NODE_NAME", "POD_UID"}
    config = next(d for d in documents if d["kind"] == "ConfigMap")
    assert config["metadata"]["name"] == "dra-driver-numa-config"
    assert config["data"]["config.yaml"] == 'apiVersion: v1alpha1\nreservedCPUs: "0"\n'


@pytest.mark.parametrize(("values", "name"), [("peer", "dracpu"), ("memory peer", "dramemory")])
def test_the_chart_can_use_the_names_of_the_replaced_drivers(values: str, name: str) -> None:
    """The names, the label and the namespace can be those that tools for dra-driver-cpu or dra-driver-memory look
    for.
    """
    documents = render(MATRIX[values])
    daemon_set = only(documents, "DaemonSet")
    assert (daemon_set["metadata"]["name"], daemon_set["metadata"]["namespace"]) == (name, "kube-system")
    assert daemon_set["spec"]["template"]["metadata"]["labels"].get("app", "dramemory") == name
    assert f"{name}-config" in {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}


def test_an_update_leaves_no_gap() -> None:
    """On a tenth of the nodes at a time, the new pod is ready before the old one is terminated; no container binds a
    host port.
    """
    documents = render()
    strategy = only(documents, "DaemonSet")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}}
    assert "hostNetwork" not in pod_of(documents)


def test_the_pods_can_use_the_host_network() -> None:
    """The host network is necessary if the CNI itself has claims; OpenShift's constraints then permit it."""
    serial = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "10%"}}
    values = {"hostNetwork": True, "updateStrategy": serial, "openshift": {"scc": {"create": True}}}
    documents = render(values)
    assert pod_of(documents)["hostNetwork"] is True
    assert only(documents, "SecurityContextConstraints")["allowHostNetwork"] is True


@pytest.mark.parametrize(
    "key",
    [
        *("tolerations", "nodeSelector", "priorityClassName", "podLabels", "podAnnotations"),
        *("imagePullSecrets", "extraVolumes"),
    ],
)
def test_null_removes_a_default(key: str) -> None:
    """As in every chart, setting a value to null removes its default."""
    pod = pod_of(render({key: None}))
    assert key in {"podLabels", "podAnnotations", "extraVolumes"} or key not in pod


@pytest.mark.parametrize(
    ("repository", "pulled"),
    [
        ("localhost/nri-backend", "mirror:5000/numa/nri-backend:1"),
        ("registry.example/a/nri-backend", "mirror:5000/numa/a/nri-backend:1"),
        ("a/nri-backend", "mirror:5000/numa/a/nri-backend:1"),
    ],
)
def test_a_mirror_replaces_the_registry(repository: str, pulled: str) -> None:
    """The value is global.imageRegistry as in other charts, and unknown global values of other charts are accepted."""
    values = {"imageRegistry": "mirror:5000/numa/", "storageClass": "fast"}
    documents = render({"global": values, "backend": {"image": {"repository": repository, "tag": "1"}}})
    assert container(documents, "backend")["image"] == pulled
    assert container(documents, "frontend")["image"].startswith("mirror:5000/numa/dra-frontend:")


def test_each_image_can_be_changed_alone() -> None:
    """Setting one component's tag or digest leaves the other component's image unchanged; a digest takes precedence."""
    digest = "sha256:" + "0f" * 32
    image = {"repository": "registry.example:5000/a/nri-backend", "tag": "1.2.3", "digest": digest}
    documents = render({"backend": {"image": image}})
    assert container(documents, "backend")["image"] == f"registry.example:5000/a/nri-backend@{digest}"
    assert container(documents, "frontend")["image"] == container(render(), "frontend")["image"]
    tagged = render({"backend": {"image": {"tag": "1.2.3"}}})
    assert container(tagged, "backend")["image"].endswith(":1.2.3")


@pytest.mark.parametrize("name", ["frontend", "backend"])
def test_liveness_probes_do_not_depend_on_other_components(name: str) -> None:
    """Startup and liveness probes use /healthz, which requires neither the API server nor the runtime; readiness uses
    /readyz.
    """
    one = container(render(), name)
    paths = {kind: one[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert {one[kind]["httpGet"]["port"] for kind in paths} == {name}


@pytest.mark.parametrize("kinds", [{"liveness"}, {"startup", "liveness", "readiness"}], ids=len)
def test_probes_can_be_switched_off(kinds: set[str]) -> None:
    """A probe that is null is left out, and the others are kept."""
    documents = render({"probes": dict.fromkeys(kinds)})
    for name in ("frontend", "backend"):
        there = {key.removesuffix("Probe") for key in container(documents, name) if key.endswith("Probe")}
        assert there == {"startup", "liveness", "readiness"} - kinds


def test_pods_restart_when_the_configuration_changes() -> None:
    """The services read their configuration file only at startup, so its checksum is part of the pod template."""

    def checksum(values: Document) -> Any:
        return only(render(values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) != checksum({"driverConfig": {"logLevel": "debug"}})
    assert checksum({}) == checksum({"podLabels": {"a": "b"}})


def test_host_paths_follow_the_configuration() -> None:
    """One setting changes both the path that the services use and the mount."""
    documents = render({"driverConfig": {"kubeletRootDir": "/data/kubelet/", "nriSocket": "/run/k3s/nri/nri.sock"}})
    assert "/data/kubelet/plugins_registry/dra.cpu" in helm.host_mounts(documents, "frontend")
    assert helm.host_mounts(documents, "backend")["/run/k3s/nri"] == ("/run/k3s/nri", True)


def test_all_objects_are_in_the_namespace() -> None:
    """namespaceOverride applies to every namespaced object and to the subjects of bindings."""
    documents = render({**EVERYTHING, "namespaceOverride": "elsewhere"})
    assert {d["metadata"]["namespace"] for d in documents if "namespace" in d["metadata"]} == {"elsewhere"}
    assert only(documents, "ClusterRoleBinding")["subjects"][0]["namespace"] == "elsewhere"
    (condition,) = policy("own-node", {"namespaceOverride": "elsewhere"})["matchConditions"]
    assert '"system:serviceaccount:elsewhere:' in condition["expression"]


def classes(values: Document) -> dict[str, list[str]]:
    """Returns the CEL of every DeviceClass, by name."""
    documents = [one for one in render(values) if one["kind"] == "DeviceClass"]
    return {one["metadata"]["name"]: [s["cel"]["expression"] for s in one["spec"]["selectors"]] for one in documents}


def test_the_default_device_classes_are_the_documented_ones() -> None:
    """There are four classes by default, and one for each additional page size that is configured."""
    assert classes({}).keys() == {"dra.cpu", "dra.memory", "dra.hugepages-2m", "dra.hugepages-1g"}
    own = classes(MATRIX["customized"])
    assert own.keys() == {"dra.cpu", "dra.memory", "dra.hugepages-64k", "dra.hugepages-512m"}
    assert own["dra.cpu"] == ['device.driver == "dra.cpu"']


def test_device_classes_are_those_that_the_frontend_prints() -> None:
    """For a machine with far memory, the chart and "dra-frontend classes" create the same classes."""
    numa_nodes = {
        0: NumaNode(0, frozenset({0}), 1 << 30, (HugepagePool(2 << 20, 8, 8), HugepagePool(1 << 30, 8, 8))),
        1: NumaNode(1, frozenset(), 1 << 30, (HugepagePool(2 << 20, 8, 8), HugepagePool(1 << 30, 8, 8))),
    }
    machine = dataclasses.replace(discover(captured("64fake-4n2s2ca2c2t")), numa_nodes=numa_nodes)
    printed = {
        one["metadata"]["name"]: [s["cel"]["expression"] for s in one["spec"]["selectors"]]
        for one in device_classes(machine)
    }
    assert classes({"deviceClasses": {"farMemory": True}}) == printed
