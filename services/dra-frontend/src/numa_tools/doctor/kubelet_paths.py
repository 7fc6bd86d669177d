# SPDX-License-Identifier: Apache-2.0
"""Paths of the kubelet's configuration in common distributions. This module does no I/O.

The paths are those of kubeadm, nodeadm from awslabs/amazon-eks-ami, k3s-io/k3s and rancher/rke2, siderolabs/talos,
openshift/machine-config-operator, k0sproject/k0s, GKE, Azure/AgentBaker and canonical/microk8s.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KubeletPaths:
    """The ``--config`` file and the ``--config-dir`` directory of a distribution."""

    config: str
    drop_ins: str = ""


ROOT: Final = "ROOT"
"""Placeholder for the kubelet's root directory, which is configurable."""
DISTRIBUTION_PATHS: Final = (
    # kubeadm. The Kubernetes documentation suggests this drop-in directory.
    KubeletPaths(f"{ROOT}/config.yaml", "/etc/kubernetes/kubelet.conf.d"),
    # EKS: nodeadm (Amazon Linux 2023) and bootstrap.sh (Amazon Linux 2).
    KubeletPaths("/etc/kubernetes/kubelet/config.json", "/etc/kubernetes/kubelet/config.json.d"),
    KubeletPaths("/etc/kubernetes/kubelet/kubelet-config.json", "/etc/kubernetes/kubelet/kubelet-config.json.d"),
    # Talos.
    KubeletPaths("/etc/kubernetes/kubelet.yaml"),
    # OpenShift. On a kubeadm node, a file with this name is a kubeconfig.
    KubeletPaths("/etc/kubernetes/kubelet.conf", "/etc/openshift/kubelet.conf.d"),
    # k0s, newer and older releases.
    KubeletPaths("/run/k0s/kubelet/config.yaml"),
    KubeletPaths("/var/lib/k0s/kubelet-config.yaml"),
    # GKE.
    KubeletPaths("/home/kubernetes/kubelet-config.yaml"),
    # AKS.
    KubeletPaths("/etc/default/kubeletconfig.json"),
)
ENVIRONMENT_FILES: Final = (
    f"{ROOT}/kubeadm-flags.env",
    "/etc/default/kubelet",
    "/etc/sysconfig/kubelet",
    "/etc/eks/kubelet/environment",
)
"""Environment files that contain flags, in the order in which kubeadm's unit passes those flags."""
VARIABLES: Final = ("KUBELET_", "NODEADM_KUBELET_")
"""Prefixes of the variables that contain flags in environment files."""
UNIT_DIRECTORIES: Final = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""Directories with systemd units, in order of precedence."""
MICROK8S_ARGUMENTS: Final = "/var/snap/microk8s/current/args/kubelet"


@dataclass(frozen=True, slots=True)
class RancherDistribution:
    """A distribution that passes ``kubelet-arg`` from its own configuration to the kubelet."""

    name: str
    units: tuple[str, ...]

    @property
    def configuration(self) -> str:
        """Path of the distribution's configuration file. Its drop-ins are in the directory with the same name plus
        ``.d``.
        """
        return f"/etc/rancher/{self.name}/config.yaml"

    @property
    def data(self) -> str:
        """Path of the distribution's data directory unless ``data-dir`` is set."""
        return f"/var/lib/rancher/{self.name}"


RANCHER_DISTRIBUTIONS: Final = (
    RancherDistribution("k3s", ("k3s.service", "k3s-agent.service")),
    RancherDistribution("rke2", ("rke2-server.service", "rke2-agent.service")),
)
