# SPDX-License-Identifier: Apache-2.0
"""Finds what the pod of the service lacks, for the service before it starts, for its status and for the doctor."""

from collections.abc import Iterator

from dra_frontend.api_server.credentials import kubeconfig, read_configuration
from dra_frontend.api_server.errors import KubeConfigError
from dra_frontend.node.preflight import Fault, check_pod, read_mounts
from dra_frontend.settings import Settings


def own_faults(settings: Settings) -> list[Fault]:
    """Returns what this pod lacks: directories of the node, and a way to the API server. Blocks."""
    faults = check_pod(settings.config, contained=settings.in_pod, mounts=read_mounts())
    return [*faults, *_access_faults(settings)]


def seen_faults(settings: Settings) -> list[Fault]:
    """Returns the faults of own_faults() as far as a command can see them that may run beside the service. Blocks.

    In a debugging pod the node's directories lie below another root, and its mounts and its token are not those of the
    driver.
    """
    contained = settings.in_pod and settings.host_root == "/"
    faults = check_pod(settings.config, settings.host_root, contained=contained, mounts=read_mounts())
    return [*faults, *(_access_faults(settings) if contained or settings.config.kubeconfig else ())]


def _access_faults(settings: Settings) -> Iterator[Fault]:
    path = settings.config.kubeconfig
    try:
        read_configuration(kubeconfig(path))
    except KubeConfigError as error:
        # The error of a pod without a token contains its remedy.
        yield Fault(f"the API server cannot be asked: {error}", "correct the file, or kubeconfig" if path else "")
