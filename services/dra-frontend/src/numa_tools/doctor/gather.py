# SPDX-License-Identifier: Apache-2.0
"""Reads every source once. Also works while the service or the API server is down."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.devices.inventory import Inventory, InventoryError, build_inventory
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import FileTree, HostTreeError
from dra_frontend.node.host_tree import HostTree, host_path
from dra_frontend.pod_faults import visible_faults
from dra_frontend.settings import Settings, open_host
from numa_contract.records import AllocationRecord

from numa_tools.doctor.facts import Claims, Facts, PodFault, Service
from numa_tools.doctor.model import Unread, facts_or_none
from numa_tools.doctor.runtime_in_use import reported_runtime, runtime_in_use, with_endpoint
from numa_tools.doctor.sources.cluster import not_queried, read_cluster
from numa_tools.doctor.sources.directories import read_claims, read_run_directory, read_sockets
from numa_tools.doctor.sources.endpoint import find_service, read_service
from numa_tools.doctor.sources.kernel import open_file_limits, read_cgroups, read_kernel
from numa_tools.doctor.sources.kubelet import choose_kubelet, read_given_kubelet
from numa_tools.doctor.sources.runtimes import HOST_ROOT_REMEDY, read_given_runtime, read_runtimes


def read_machine(settings: Settings) -> Inventory | Unread:
    """Returns the devices that this node can offer with its configuration. Blocks.

    Raises ConfigError if the overlay cannot be used.
    """
    try:
        return build_inventory(discover(open_host(settings)), settings.config, settings.node_name)
    except (HostTreeError, InventoryError) as error:
        return Unread(str(error), "see docs/live-machine.md, or replace the file with sysfsOverlay")


async def gather(settings: Settings, kubelet_config: str = "", runtime_config: str = "") -> Facts:
    """Returns the facts. Takes a few seconds if a source does not respond. Raises ConfigError.

    ``kubelet_config`` is a file with the kubelet's configuration; if it is given, no other source of the configuration
    is read. ``runtime_config`` is a file with the configuration that the container runtime prints.
    """
    config, name = settings.config, settings.node_name
    given = await asyncio.to_thread(read_given_kubelet, kubelet_config, name) if kubelet_config else None
    machine = await asyncio.to_thread(read_machine, settings)
    node = await asyncio.to_thread(_read_node, settings, machine)
    if settings.host_root != "/" and not config.kubeconfig:
        cluster = dict(not_queried())
    else:
        records = _records(node["service"], node["claims"])
        load = kubeconfig(config.kubeconfig)
        cluster = dict(await read_cluster(load, settings.node_name, facts_or_none(machine), records, config))
    asked = settings.host_root, config.kubelet_root_dir, name, cluster.pop("configz")
    node["kubelet"] = given or await asyncio.to_thread(choose_kubelet, *asked)
    reported = reported_runtime(cluster["node"], node["backend"])
    if runtime_config:
        node["runtime"] = await asyncio.to_thread(read_given_runtime, runtime_config, reported)
    else:
        found = with_endpoint(node["runtime"], node["kubelet"])
        node["runtime"] = runtime_in_use(found, reported, HOST_ROOT_REMEDY)
    return Facts(config=config, node_name=name, machine=machine, **node, **cluster)


def _read_node(settings: Settings, machine: Inventory | Unread) -> dict[str, Any]:
    config = settings.config
    run, cgroups, root, cdi = (
        Path(host_path(settings.host_root, one))
        for one in (config.run_dir, config.cgroup_root, config.kubelet_root_dir, config.cdi_dir)
    )
    service, backend = read_service(find_service(run, settings.pod_uid))
    inventory, tree = facts_or_none(machine), open_host(settings)
    hardware = None if inventory is None else inventory.machine
    return {
        "kernel": read_kernel(tree),
        "cgroups": read_cgroups(HostTree(cgroups), config.cgroup_root, _mounts(tree), hardware),
        "runtime": read_runtimes(HostTree(settings.host_root)),
        "sockets": read_sockets(root),
        "pod": _read_pod(settings),
        "service": service,
        "backend": backend,
        "run_directory": read_run_directory(run),
        "claims": read_claims(cdi),
        "open_files": open_file_limits(),
    }


def _read_pod(settings: Settings) -> tuple[PodFault, ...]:
    return tuple(PodFault(one.problem, one.remedy, one.fatal) for one in visible_faults(settings))


def _mounts(tree: FileTree) -> str:
    try:
        return tree.read("/proc/self/mountinfo") or ""
    except HostTreeError:
        return ""


def _records(service: Service | Unread, claims: Claims | Unread) -> Sequence[AllocationRecord]:
    source = facts_or_none(claims) or facts_or_none(service)
    return source.records if source is not None else ()
