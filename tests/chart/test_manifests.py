# SPDX-License-Identifier: Apache-2.0
"""Files that are generated from the chart: the plain manifest, the kind cluster and the provisioning file."""

import subprocess
from pathlib import Path

import yaml
from dra_frontend.machine.discovery import discover
from numa_contract.config import Config
from numa_tools.commands.provision_plan import plan, read_requested

from tests.chart.helm import CHART, EVERYTHING, HELM, Document, only, render
from tests.rigs.trees import captured

HACK = Path(__file__).parents[2] / "hack"


def manifest(directory: Path, *arguments: str, **environment: str) -> str:
    """Returns the output of ``make manifests``."""
    command = [str(HACK / "manifests.sh"), *arguments]
    env = {"PATH": "/usr/bin:/bin", "HELM": str(HELM), "HOME": str(directory), **environment}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=True).stdout


def test_the_plain_manifest_is_what_the_chart_installs(tmp_path: Path) -> None:
    """The plain manifest contains the same objects, in a namespace whose labels permit the pods; the test pod is left
    out.
    """
    found = [document for document in yaml.safe_load_all(manifest(tmp_path)) if document]
    namespace = found.pop(0)
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    assert found == render({"tests": {"create": False}}, namespace=namespace["metadata"]["name"])


def test_the_plain_manifest_is_reproducible(tmp_path: Path) -> None:
    """The plain manifest does not depend on the locale, time zone or working directory, so two releases differ only
    where something has changed.
    """
    assert manifest(tmp_path) == manifest(Path("/"), LC_ALL="tr_TR.UTF-8", TZ="Pacific/Chatham")


def test_the_plain_manifest_accepts_values(tmp_path: Path) -> None:
    """The values are passed to Helm, which parses a list with only one CPU as a number."""
    for flag in ("--set", "--set-string"):
        assert 'reservedCPUs: "0"' in manifest(tmp_path, flag, "driverConfig.reservedCPUs=0")


def test_the_kind_cluster_has_what_the_driver_needs() -> None:
    """The feature gate is on, there is a worker node, and the containerd patches enable CDI and NRI."""
    cluster: Document = yaml.safe_load((HACK / "kind.yaml").read_text())
    assert cluster["featureGates"] == {"DRAConsumableCapacity": True}
    assert {node["role"] for node in cluster["nodes"]} == {"control-plane", "worker"}
    (patch,) = cluster["containerdConfigPatches"]
    assert "enable_cdi = true" in patch
    assert "disable = false" in patch


def kind_up(directory: Path, **environment: str) -> list[str]:
    """Returns the commands that ``make kind-up`` runs; its programs are replaced by scripts that record the calls."""
    for tool in ("docker", "kind", "kubectl", "helm"):
        (directory / tool).write_text(f'#!/bin/sh\necho "{tool} $*" >>"{directory}/calls"\n')
        (directory / tool).chmod(0o755)
    env = {"PATH": f"{directory}:/usr/bin:/bin", **environment}
    subprocess.run([str(HACK / "kind.sh"), "up"], env=env, capture_output=True, timeout=60, check=True)
    return (directory / "calls").read_text().splitlines()


def test_kind_gets_images_built_from_this_tree(tmp_path: Path) -> None:
    """Both images are built and loaded before the chart is installed, even if docker already has images with these
    names.
    """
    calls = kind_up(tmp_path)
    built = [call.rsplit(maxsplit=2)[1] for call in calls if call.startswith("docker build")]
    assert [name.rpartition(":")[0] for name in built] == ["localhost/dra-frontend", "localhost/nri-backend"]
    steps = [" ".join(call.split()[:2]) for call in calls]
    assert steps.index("kind load") < steps.index("helm install")
    assert set(built) <= set(calls[steps.index("kind load")].split())


def test_kind_uses_a_given_image_without_building_it(tmp_path: Path) -> None:
    """Only the other image is built."""
    calls = kind_up(tmp_path, FRONTEND_IMAGE="example.com/front:7")
    assert ["nri-backend" in call for call in calls if call.startswith("docker")] == [True]
    (install,) = [call for call in calls if call.startswith("helm install")]
    assert "frontend.image.repository=example.com/front,frontend.image.tag=7" in install


def test_the_frontend_reads_the_provisioning_file() -> None:
    """The init container's file is mounted at the path in its arguments, and the command accepts the file."""
    documents = render({**EVERYTHING, "hugepageProvision": {"enabled": True, "pages": [{"size": "2Mi", "count": 4}]}})
    (init,) = only(documents, "DaemonSet")["spec"]["template"]["spec"]["initContainers"]
    assert init["args"] == ["provision", "--pool-root=/host", "/etc/dra-driver-numa/hugepages.yaml"]
    text = next(d["data"]["hugepages.yaml"] for d in documents if "hugepages.yaml" in d.get("data", {}))
    targets = plan(discover(captured("32intel64-2p8co2t+8ve")), read_requested(yaml.safe_load(text), "hugepages.yaml"))
    assert sum(target.pages for target in targets) == 4


def test_the_charts_readme_lists_every_default_host_path() -> None:
    """The README lists the host paths that the pods mount."""
    text = (CHART / "README.md").read_text()
    for key in ("kubelet_root_dir", "cdi_dir", "run_dir", "nri_socket", "cgroup_root"):
        assert str(Config.model_fields[key].default) in text
