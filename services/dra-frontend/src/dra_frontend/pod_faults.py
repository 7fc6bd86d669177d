# SPDX-License-Identifier: Apache-2.0
"""Finds requirements that the service's pod does not meet. This module is used before startup, for the status and by
the doctor.
"""

from collections.abc import Iterator

from dra_frontend.api_server.credentials import kubeconfig, read_configuration
from dra_frontend.api_server.errors import KubeConfigError
from dra_frontend.node.preflight import PreflightFault, check_pod, read_mounts
from dra_frontend.settings import Settings


def own_faults(settings: Settings) -> list[PreflightFault]:
    """Returns the pod's faults: unusable node directories, or no access to the API server. Blocks."""
    faults = check_pod(settings.config, contained=settings.in_pod, mounts=read_mounts())
    return [*faults, *_access_faults(settings)]


def visible_faults(settings: Settings) -> list[PreflightFault]:
    """Returns those faults from own_faults() that a command running alongside the service can detect. Blocks.

    In a debugging pod the node's directories are under another root, and the mounts and the token are not the driver's.
    """
    contained = settings.in_pod and settings.host_root == "/"
    faults = check_pod(settings.config, settings.host_root, contained=contained, mounts=read_mounts())
    return [*faults, *(_access_faults(settings) if contained or settings.config.kubeconfig else ())]


def _access_faults(settings: Settings) -> Iterator[PreflightFault]:
    path = settings.config.kubeconfig
    try:
        read_configuration(kubeconfig(path))
    except KubeConfigError as error:
        # The error for a pod without a token already includes the remedy.
        yield PreflightFault(
            f"the API server cannot be queried: {error}", "correct the file, or kubeconfig" if path else ""
        )
