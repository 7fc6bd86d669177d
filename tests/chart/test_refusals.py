# SPDX-License-Identifier: Apache-2.0
"""Values that cannot work are rejected when the chart is rendered, and the message names the key."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.chart.helm import CHART, Document, HelmError, render, run

UID_SOCKET = "/plugins_registry/dra.memory/reg-00000000-0000-0000-0000-000000000000.sock"
LONGEST_KUBELET_ROOT = "/var/lib/" + "k" * (107 - len(UID_SOCKET) - len("/var/lib/"))
LONGEST_RUN_DIRECTORY = "/run/" + "r" * (107 - len("/run/") - 1 - 36 - len("/state.sock"))

BAD: list[tuple[Document, str]] = [
    # Keys that do not exist, at every level.
    ({"driverconfig": {}}, "(root): Additional property driverconfig "),
    ({"driverConfig": {"reservedCpus": "0"}}, "- driverConfig: Additional property reservedCpus "),
    ({"frontend": {"image": {"name": "x"}}}, "- frontend.image: Additional property name "),
    # The services' settings.
    ({"driverConfig": {"reservedCPUs": 0.5}}, "driverConfig.reservedCPUs"),
    ({"driverConfig": {"reservedCPUs": "0..3"}}, 'driverConfig.reservedCPUs: "0..3" is not a list of CPUs'),
    (
        {"driverConfig": {"minSharedCPUs": 0, "withheldCPUs": 2}},
        "driverConfig.minSharedCPUs: is the former name of driverConfig.withheldCPUs, and both are given; remove",
    ),
    (
        {
            "driverConfig": {"sharedPool": {"grow": "lazy"}},
            "groups": [{"name": "a", "driverConfig": {"poolGrowth": "lazy"}}],
        },
        "group a: driverConfig.sharedPool: is the former name of driverConfig.poolGrowth, and both are given",
    ),
    ({"driverConfig": {"cpuDeviceMode": "both"}}, "driverConfig.cpuDeviceMode"),
    ({"driverConfig": {"groupBy": "numa"}}, "driverConfig.groupBy"),
    ({"driverConfig": {"apiVersion": "v1"}}, "driverConfig.apiVersion"),
    ({"driverConfig": {"logLevel": 4}}, "driverConfig.logLevel"),
    ({"driverConfig": {"hugepageGuard": "yes"}}, "driverConfig.hugepageGuard"),
    ({"driverConfig": {"reservedMemory": [{"numaNode": -1, "limits": {}}]}}, "driverConfig.reservedMemory.0.numaNode"),
    (
        {"driverConfig": {"reservedMemory": [{"numaNode": 0, "limits": {"gold": 1}}]}},
        "- driverConfig.reservedMemory.0.limits: Additional property gold ",
    ),
    (
        {"driverConfig": {"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1.5Gi"}}]}},
        "driverConfig.reservedMemory.0.limits.memory",
    ),
    ({"driverConfig": {"reservedMemory": {"memory": "1Gi"}}}, "- driverConfig.reservedMemory: Invalid type"),
    # Host paths.
    ({"driverConfig": {"kubeletRootDir": "var/lib/kubelet"}}, "driverConfig.kubeletRootDir"),
    ({"driverConfig": {"kubeletRootDir": ""}}, "driverConfig.kubeletRootDir"),
    ({"driverConfig": {"kubeletRootDir": LONGEST_KUBELET_ROOT + "k"}}, "driverConfig.kubeletRootDir: the socket"),
    ({"driverConfig": {"runDir": LONGEST_RUN_DIRECTORY + "r"}}, "driverConfig.runDir: the socket"),
    ({"driverConfig": {"nriSocket": "/run/" + "n" * 100 + "/nri.sock"}}, "driverConfig.nriSocket: the socket"),
    ({"driverConfig": {"nriSocket": "/run/nri.sock"}}, "the directory of driverConfig.nriSocket"),
    ({"driverConfig": {"runDir": "/run/../etc"}}, "driverConfig.runDir: /run/../etc must be"),
    ({"driverConfig": {"runDir": "/run"}}, "driverConfig.runDir: /run is mounted"),
    ({"driverConfig": {"cdiDir": "/etc/cdi"}}, "driverConfig.cdiDir: /etc/cdi is mounted"),
    ({"driverConfig": {"cdiDir": "/root"}}, "under /run, /var/run, which a reboot empties"),
    ({"driverConfig": {"runDir": "/boot"}}, "driverConfig.runDir: /boot is mounted into the pod and must be"),
    ({"driverConfig": {"runDir": "/runs/numa"}}, "driverConfig.runDir: /runs/numa is mounted"),
    ({"driverConfig": {"runDir": "/run/containerd"}}, "driverConfig.runDir: /run/containerd belongs to another"),
    (
        {"driverConfig": {"cdiDir": "/var/run/systemd/cdi"}},
        "driverConfig.cdiDir: /var/run/systemd/cdi belongs to",
    ),
    (
        {"driverConfig": {"nriSocket": "/etc/kubernetes/x.sock"}},
        "the directory of driverConfig.nriSocket: /etc/kubernetes",
    ),
    ({"driverConfig": {"cgroupRoot": "/home"}}, "driverConfig.cgroupRoot: /home is mounted"),
    ({"driverConfig": {"cgroupRoot": "/sys/fs"}}, "driverConfig.cgroupRoot: /sys/fs is mounted"),
    ({"driverConfig": {"kubeletRootDir": "/etc/kubelet"}}, "driverConfig.kubeletRootDir: /etc/kubelet is mounted"),
    ({"driverConfig": {"kubeletRootDir": "/var/lib"}}, "driverConfig.kubeletRootDir: /var/lib is mounted"),
    ({"driverConfig": {"cdiDir": "/run/dra-driver-numa"}}, "must not be driverConfig.runDir"),
    (
        {"driverConfig": {"cdiDir": "/var/run/dra-driver-numa/cdi"}},
        "driverConfig.cdiDir: /var/run/dra-driver-numa/cdi must not be driverConfig.runDir",
    ),
    (
        {"driverConfig": {"cdiDir": "/var/lib/kubelet/plugins"}},
        "driverConfig.cdiDir: /var/lib/kubelet/plugins is mounted into the pod",
    ),
    (
        {"driverConfig": {"nriSocket": "/run/dra-driver-numa/nri/nri.sock"}},
        "driverConfig.nriSocket: /run/dra-driver-numa/nri must not be driverConfig.runDir",
    ),
    (
        {"driverConfig": {"runDir": "/run/nri/numa"}},
        "driverConfig.runDir: /run/nri/numa must not be the directory of driverConfig.nriSocket",
    ),
    ({"driverConfig": {"cgroupRoot": "/a:b"}}, "driverConfig.cgroupRoot: /a:b must"),
    # The pods.
    ({"frontend": {"image": {"tag": "a b"}}}, 'frontend.image.tag: "a b" is not a tag'),
    ({"frontend": {"image": {"digest": "sha256:1234"}}}, 'frontend.image.digest: "sha256:1234" is not a digest'),
    (
        {"backend": {"image": {"repository": "Upper/Case"}}},
        "backend.image.repository: Upper/Case:0.2.0 cannot be pulled",
    ),
    ({"global": {"imageRegistry": "MIRROR"}}, "global.imageRegistry: MIRROR/nri-backend:0.2.0 cannot be pulled"),
    ({"hostNetwork": True}, "hostNetwork: two instances cannot listen on the same ports of a node"),
    ({"backend": {"image": {"pullPolicy": "Sometimes"}}}, "backend.image.pullPolicy"),
    ({"frontend": {"port": 0}}, "frontend.port"),
    ({"frontend": {"port": 8081}}, "frontend.port and backend.port"),
    ({"driverConfig": {"pagePort": 8080}}, "driverConfig.pagePort: 8080 is already frontend.port or backend.port"),
    ({"driverConfig": {"pagePort": 0}}, "driverConfig.pagePort"),
    (
        {"fullnameOverride": "Not_A_Name"},
        'fullnameOverride: "Not_A_Name" must consist of at most 63 lower-case letters',
    ),
    ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels: app.kubernetes.io/name "),
    ({"updateStrategy": {"type": "Recreate"}}, "updateStrategy.type"),
    ({"updateStrategy": {"rollingUpdate": {"maxSurge": 0}}}, "updateStrategy.rollingUpdate: maxSurge and"),
    ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 1}}}, "updateStrategy.rollingUpdate: with maxSurge"),
    ({"updateStrategy": {"rollingUpdate": {"maxSurge": "all"}}}, "updateStrategy.rollingUpdate"),
    ({"updateStrategy": {"type": "OnDelete"}}, "updateStrategy: type OnDelete requires rollingUpdate: null"),
    ({"probes": {"liveness": {"periodSeconds": 0}}}, "probes.liveness.periodSeconds"),
    ({"tolerations": {"operator": "Exists"}}, "- tolerations: Invalid type"),
    ({"terminationGracePeriodSeconds": None}, "(root): terminationGracePeriodSeconds is required"),
    (
        {"resourceQuota": {"enabled": True}, "priorityClassName": ""},
        "resourceQuota: applies to pods with a priority class",
    ),
    ({"resourceQuota": {"pods": "many"}}, "resourceQuota.pods"),
    # Classes, hugepages, monitoring.
    ({"deviceClasses": {"hugepageSizes": ["2M"]}}, 'deviceClasses.hugepageSizes: "2M" is not the size of a hugepage'),
    (
        {"hugepageProvision": {"pages": [{"size": "3Mi", "count": 1}]}},
        'hugepageProvision.pages: "3Mi" is not the size of a hugepage, which is a power of two',
    ),
    ({"deviceClasses": {"hugepageSizes": ["2Mi", "2Mi"]}}, "deviceClasses: a class is named twice"),
    ({"hugepageProvision": {"enabled": True}}, "hugepageProvision.pages: is empty"),
    (
        {
            "hugepageProvision": {"enabled": True, "pages": [{"size": "1G", "count": 4}]},
            "driverConfig": {"hugepagesOnDemand": [{"numaNode": 1, "size": "1Gi", "pages": 4}]},
        },
        "hugepageProvision.pages: sets pages of 1Gi on NUMA node 1, which driverConfig.hugepagesOnDemand frees again",
    ),
    (
        {"hugepagesOnDemand": {"labelPolicy": {"classes": ["A_b"]}}},
        "hugepagesOnDemand.labelPolicy.classes.0",
    ),
    ({"hugepageProvision": {"pages": [{"size": "2Mi"}]}}, "- hugepageProvision.pages.0: count is required"),
    ({"metrics": {"podMonitor": {"interval": "often"}}}, "metrics.podMonitor.interval"),
    # Each alert links to a page; without an address the link would be broken.
    ({"metrics": {"prometheusRule": {"enabled": True}}}, "metrics.prometheusRule.runbookURL: is empty"),
    ({"metrics": {"prometheusRule": {"runbookURL": "docs/symptoms.md"}}}, "metrics.prometheusRule.runbookURL"),
    ({"networkPolicy": {"apiServerPorts": ["https"]}}, "networkPolicy.apiServerPorts.0"),
    ({"networkPolicy": {"apiServerPorts": []}}, "networkPolicy.apiServerPorts"),
    (
        {"networkPolicy": {"apiServerCIDRs": ["10.0.0.1"]}},
        'networkPolicy.apiServerCIDRs: "10.0.0.1" is not a range of addresses: a single address is 10.0.0.1/32',
    ),
    ({"appArmorProfile": "Localhost"}, "appArmorProfile"),
    ({"admissionPolicy": {"tolerateMissing": {"namespaces": ["Not_One"]}}}, "tolerateMissing.namespaces.0"),
]


@pytest.mark.parametrize(("values", "named"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_the_error_contains_the_key(values: Document, named: str) -> None:
    """Nothing is rendered, and the message names the key."""
    with pytest.raises(HelmError) as caught:
        render(values)
    assert named in str(caught.value)


def test_the_longest_paths_are_accepted() -> None:
    """The check does not reject any path that the kernel would accept."""
    assert render({"driverConfig": {"kubeletRootDir": LONGEST_KUBELET_ROOT, "runDir": LONGEST_RUN_DIRECTORY}})


def test_a_common_prefix_does_not_make_a_directory_nested() -> None:
    """A path that merely begins with the same characters as another path is not inside it."""
    assert render({"driverConfig": {"cdiDir": "/run/dra-driver-numa-cdi", "nriSocket": "/run/dra-driver-numa.nri/s"}})


@pytest.mark.parametrize("version", ["1.28.0", "1.33.5+k3s1"])
def test_clusters_without_the_api_are_rejected(version: str) -> None:
    """resource.k8s.io/v1 has existed since 1.34. If no version is given and there is no cluster, the chart is still
    rendered.
    """
    with pytest.raises(HelmError, match="chart requires kubeVersion"):
        run("template", "x", str(CHART), "--kube-version", version)
    assert run("template", "x", str(CHART), "--kube-version", "1.34.0-eks") == run("template", "x", str(CHART))


class Namespaces(BaseHTTPRequestHandler):
    """A fake API server for Helm's "lookup" of a Namespace."""

    def do_GET(self) -> None:
        """Returns the namespaces "closed" and "open"; nothing else exists."""
        levels = {"closed": "baseline", "open": "privileged"}
        path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
        found: Document | None = None
        if path == "/api/v1":
            kind = {"name": "namespaces", "kind": "Namespace", "namespaced": False, "verbs": ["get"]}
            found = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [kind]}
        elif name in levels:
            labels = {"pod-security.kubernetes.io/enforce": levels[name]}
            found = {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}}
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found or {"kind": "Status", "reason": "NotFound", "code": 404}).encode())

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """Returns a kubeconfig for a cluster with these namespaces."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Namespaces) as server:
        threading.Thread(target=server.serve_forever).start()
        cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
        context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
        document = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [context]}
        path = tmp_path / "kubeconfig"
        path.write_text(
            json.dumps(document | {"clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "c"}]})
        )
        yield path
        server.shutdown()


def test_a_namespace_that_forbids_the_pods_is_rejected(kubeconfig: Path) -> None:
    """The check requires access to a cluster; a namespace that permits the pods, or does not exist yet, is accepted."""
    ask = ("template", "x", str(CHART), "--kubeconfig", str(kubeconfig), "--dry-run=server", "--namespace")
    with pytest.raises(HelmError, match="namespace closed: enforces the Pod Security level baseline"):
        run(*ask, "closed")
    assert run(*ask, "open")
    assert run(*ask, "not-there")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"image": {"repository": "r"}}, "image: is a value of dra-driver-cpu's chart; use frontend.image and"),
        ({"resources": {}}, "use frontend.resources and backend.resources here"),
        ({"kubeletRootDir": "/var/lib/k0s/kubelet"}, "use driverConfig.kubeletRootDir here"),
        ({"healthzPort": 9090}, "use frontend.port here"),
        ({"healthzPath": "/h"}, "the path is always /healthz"),
        ({"sysfsOverlay": {}}, "use driverConfig.sysfsOverlay here"),
        (
            {"args": {"reservedCPUs": "0-1", "logLevel": 4}},
            "use driverConfig.logLevel (debug, info, warning or error), driverConfig.reservedCPUs here (docs/",
        ),
        ({"args": []}, "use driverConfig here"),
        ({"args": {"exposePCIeRoots": True}}, "use driverConfig.exposePCIeRoots here"),
        ({"extraArgs": ["--v=4"]}, "use frontend.extraArgs and backend.extraArgs here"),
        ({"extraVolumeMounts": []}, "use frontend.extraVolumeMounts and backend.extraVolumeMounts here"),
        ({"driverConfig": {"bindAddress": ":9090"}}, "use frontend.port here"),
    ],
)
def test_values_of_the_dra_driver_cpu_chart_are_rejected_with_their_replacement(values: Document, place: str) -> None:
    with pytest.raises(HelmError) as caught:
        render(values)
    assert place in str(caught.value)
