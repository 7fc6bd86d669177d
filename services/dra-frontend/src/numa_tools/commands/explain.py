# SPDX-License-Identifier: Apache-2.0
"""Reads the sources for ``dra-frontend explain``: the node's files, the running service, and the API server."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import KubeError
from dra_frontend.api_server.other_devices import OtherDeviceReader
from dra_frontend.claims.journal import Journal
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import Device, MemoryDevice
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree, host_path
from dra_frontend.settings import Settings
from numa_contract.cdi import ClaimFile
from numa_contract.names import CLAIMS_JOURNAL, FAULT_TAINTS, OVERCLAIMED_TAINTS, SHORTAGE_TAINT, ClaimKey
from numa_contract.reports import ContainerReport

from numa_tools.bundle.archive import JOURNAL, STATE
from numa_tools.commands.classes import known_classes
from numa_tools.commands.node_files import NodeFiles, read_archived, read_node
from numa_tools.doctor.model import Unread
from numa_tools.doctor.sources.endpoint import read_service
from numa_tools.explain.enforced import KERNEL_FILES, Problem
from numa_tools.explain.pending import explain_pending, joined_devices
from numa_tools.explain.snapshot import (
    STATE_PATHS,
    NodeSnapshot,
    PublishedDevice,
    read_backend,
    read_containers,
    read_devices,
    read_records,
)
from numa_tools.explain.subjects import UnknownSubjectError, explain_subject, split_kind
from numa_tools.scheduling.claim_spec import DeviceClass, read_claim_spec, read_class
from numa_tools.scheduling.reading import ManifestError, mapping
from numa_tools.state_client import NoServiceError, StateClient

_TIMEOUT_SECONDS: Final = 5.0
_MAX_CLAIMS: Final = 5000
"""Maximum number of claims to read from a namespace to find a pod's claims."""


def explain(settings: Settings, subject: str, *, is_archive: bool = False) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the explanation and the problems. Raises UnknownSubjectError.

    ``is_archive`` is True if the node's files come from an archive. In that case, no API server is queried.
    """
    snapshot = read_snapshot(settings)
    if (found := explain_subject(snapshot, subject)) is not None:
        return found
    kind, name = split_kind(subject)
    if kind not in ("", "claim", "pod"):
        raise UnknownSubjectError(f"this machine has no {kind} {name}")
    if is_archive:
        raise UnknownSubjectError(f"the archive contains nothing called {name}")
    snapshot = replace(snapshot, refusal_reasons=_refusal_reasons(settings))
    try:
        return asyncio.run(_explain_pending(settings, snapshot, kind, name))
    except KubeError as error:
        nothing = f"nothing called {name} was found on this node" + (
            f" ({snapshot.no_response})" if snapshot.no_response else ""
        )
        raise UnknownSubjectError(f"{nothing}; looking it up in the API server failed: {error}") from error


def read_snapshot(settings: Settings) -> NodeSnapshot:
    """Reads the node's files and the running service's documents. Raises InventoryError or HostTreeError."""
    node = read_node(settings, settings.node_name)
    documents, no_response = read_state(settings)
    containers = read_containers(documents.get("containers"))
    devices = read_devices(documents.get("devices"))
    return NodeSnapshot(
        inventory=_with_published_taints(node, devices),
        config=settings.config,
        # If a claim's record cannot be read, the claim is known only from its file. Its CPUs stay allocated.
        files={**node.claims.files, **read_records(documents.get("claims"))},
        containers=containers,
        backend=read_backend(documents.get("backend")),
        published=devices,
        no_response=no_response,
        kernel=_kernel_files(settings, containers),
        releasing=_releasing(settings),
    )


def _refusal_reasons(settings: Settings) -> tuple[str, ...]:
    service, _ = read_service(StateClient(host_path(settings.host_root, settings.config.run_dir)))
    return (f"the service is down: {service.why}",) if isinstance(service, Unread) else service.refusal_reasons


def read_state(settings: Settings) -> tuple[dict[str, Any], str]:
    """Returns the service's documents by name, from the archive if there is one. Also returns the reason why they could
    not be read, or "" if they could.
    """
    archived = Path(settings.host_root, STATE)
    with suppress(OSError, ValueError):
        return {name: read_archived(archived / f"{name}.json") for name in STATE_PATHS}, ""
    client = StateClient(host_path(settings.host_root, settings.config.run_dir))
    try:
        return {name: client.document(f"/v1/{name}") for name in STATE_PATHS}, ""
    except NoServiceError as error:
        return {}, str(error)


def _releasing(settings: Settings) -> dict[ClaimKey, ClaimFile]:
    """Returns released claims whose containers may still be running, from the archive if there is one."""
    with suppress(OSError, ValueError):
        archived = read_archived(Path(settings.host_root, JOURNAL))
        return read_records(archived.get("releasing") if isinstance(archived, dict) else None)
    path = Path(host_path(settings.host_root, settings.config.run_dir), CLAIMS_JOURNAL)
    return dict(Journal(path).read().releasing) if path.exists() else {}


def _with_published_taints(node: NodeFiles, devices: Iterable[PublishedDevice]) -> Inventory:
    """Returns the inventory with the taints that the service has published."""
    taints = {(one.driver, one.name): one.taints for one in devices}

    def tainted(driver: str, device: Device) -> Device:
        keys = taints.get((driver, device.name), ())
        failing = "true" if FAULT_TAINTS[driver] in keys else ""
        device = replace(device, overclaimed=OVERCLAIMED_TAINTS[driver] in keys, failing=failing)
        if isinstance(device, MemoryDevice):
            return replace(device, shortage="true" if SHORTAGE_TAINT in keys else "")
        return device

    pools = [replace(p, devices=tuple(tainted(p.driver, one) for one in p.devices)) for p in node.inventory.pools]
    return replace(node.inventory, pools=tuple(pools))


def _kernel_files(settings: Settings, containers: tuple[ContainerReport, ...]) -> dict[str, dict[str, str]]:
    """Returns the containers' cgroup files by container id and file name, or an empty dict if the cgroup tree is not
    mounted.
    """
    cgroups = HostTree(host_path(settings.host_root, settings.config.cgroup_root))
    found: dict[str, dict[str, str]] = {}
    for report in containers:
        for name in KERNEL_FILES if report.cgroup and report.claims and report.alive else ():
            with suppress(HostTreeError):
                text = cgroups.read(f"/{report.cgroup.strip('/')}/{name}")
                if text is not None:
                    found.setdefault(report.id, {})[name] = text.strip()
    return found


async def _explain_pending(
    settings: Settings, snapshot: NodeSnapshot, kind: str, subject: str
) -> tuple[dict[str, Any], list[Problem]]:
    namespace, slash, name = subject.partition("/")
    if not slash:
        namespace, name = "default", subject
    async with connect(kubeconfig(settings.config.kubeconfig)) as client:
        documents = await _claims(client, kind, namespace, name)
        if not documents:
            raise UnknownSubjectError(
                f"neither this node nor namespace {namespace} has a claim named {name} or a pod named {name} that uses "
                "a claim; use NAMESPACE/NAME for another namespace"
            )
        class_names = {cls for document in documents for cls in _class_names(document)}
        try:
            classes = await _classes(client, class_names, known_classes(snapshot.inventory.machine))
        except ManifestError as error:
            raise UnknownSubjectError(f"a DeviceClass cannot be read: {error}") from error
        wanted_devices = frozenset(key for one in documents for key in joined_devices(snapshot, one))
        others = await OtherDeviceReader(client, settings.node_name).read(wanted_devices)
    try:
        found = [explain_pending(snapshot, one, classes, settings.node_name, others) for one in documents]
    except ManifestError as error:
        raise UnknownSubjectError(f"the claim cannot be read from the API server: {error}") from error
    problems = [each for _, several in found for each in several]
    return (found[0][0] if len(found) == 1 else {"claims": [one for one, _ in found]}), problems


async def _claims(client: KubeClient, kind: str, namespace: str, name: str) -> list[dict[str, Any]]:
    """Returns the claim with this name, or else the claims that are owned by, or reserved for, a pod with this name."""
    if kind != "pod":
        document = await client.get_claim(namespace, name, patience=_TIMEOUT_SECONDS)
        if document is not None:
            return [document]
    found, seen = [], 0
    if kind != "claim":
        async for document in client.list_claims(namespace):
            found += [document] if _belongs(document, name) else []
            seen += 1
            if seen >= _MAX_CLAIMS:
                break
    return found


def _belongs(document: Mapping[str, Any], pod: str) -> bool:
    owners = (document.get("metadata") or {}).get("ownerReferences") or []
    users = (document.get("status") or {}).get("reservedFor") or []
    return any(one.get("name") == pod for one in (*owners, *users) if isinstance(one, dict))


def _class_names(document: Mapping[str, Any]) -> set[str]:
    """Returns the classes that a claim names, or none if the claim's spec cannot be read; explain_pending reports that
    error.
    """
    with suppress(ManifestError):
        spec = read_claim_spec(mapping(document, "spec"))
        return {subrequest.device_class for request in spec.requests for subrequest in request.subrequests}
    return set()


async def _classes(
    client: KubeClient, names: set[str], local_classes: dict[str, DeviceClass]
) -> dict[str, DeviceClass]:
    """Returns the cluster's classes. A class that cannot be read is taken from ``local_classes``.

    Raises KubeError if a class cannot be read and is not in ``local_classes``, this machine's classes.
    """
    found = {name: one for name, one in local_classes.items() if name in names}
    for name in sorted(names):
        try:
            document = await client.get_device_class(name)
        except KubeError:
            if name not in local_classes:
                raise
            continue
        found.pop(name, None)
        if document is not None:
            found[name] = read_class(document)
    return found
