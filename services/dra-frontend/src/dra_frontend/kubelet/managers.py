# SPDX-License-Identifier: Apache-2.0
"""Which policies the kubelet's own CPU and memory managers follow, by its files. Core.

With ``static`` they hand out CPUs and memory that claims know nothing of, and write cpusets of their own.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from dra_frontend.machine.file_tree import FileTree, HostTreeError

_KEYS: Final = {"cpu": "cpuManagerPolicy", "memory": "memoryManagerPolicy"}
# Below the kubelet's root; kubeadm puts the configuration there as well.
_CONFIGURATION: Final = "/config.yaml"


@dataclass(frozen=True, slots=True)
class ManagerPolicy:
    """The policy of one manager."""

    manager: str
    """``cpu`` or ``memory``."""
    policy: str
    """In the words of the kubelet: ``none``, ``static``, ``None``, ``Static``."""
    source: str
    """The file that says so, below the kubelet's root."""

    @property
    def is_static(self) -> bool:
        """Whether the manager pins containers."""
        return self.policy.lower() == "static"


def read_policies(kubelet_root: FileTree) -> tuple[ManagerPolicy, ...]:
    """Returns what can be read of both managers; nothing of a manager whose files are missing or not understood.

    The state file tells what the running kubelet does; its configuration, what the next one will do.
    """
    return tuple(_policies(kubelet_root))


def _policies(kubelet_root: FileTree) -> Iterator[ManagerPolicy]:
    configured = _map(kubelet_root, _CONFIGURATION)
    for manager, key in _KEYS.items():
        path = f"/{manager}_manager_state"
        said = ((path, _map(kubelet_root, path).get("policyName")), (_CONFIGURATION, configured.get(key)))
        for source, policy in said:
            if isinstance(policy, str) and policy:
                yield ManagerPolicy(manager, policy, source)
                break


def _map(tree: FileTree, path: str) -> Mapping[str, Any]:
    try:
        text = tree.read(path) or ""
        found = yaml.safe_load(text) if path == _CONFIGURATION else json.loads(text or "{}")
    except (HostTreeError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def static_note(policies: tuple[ManagerPolicy, ...]) -> str:
    """Returns what an operator should know; empty where no manager is static."""
    static = [f"{one.manager} manager ({one.source})" for one in policies if one.is_static]
    if not static:
        return ""
    return (
        f"the kubelet's {' and '.join(static)} is static: claims keep their CPUs, since the driver answers and audits, "
        "but Guaranteed pods may be given CPUs of claims, and then share the pool; set the policies to none"
    )
