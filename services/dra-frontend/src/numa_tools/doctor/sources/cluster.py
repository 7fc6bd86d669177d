# SPDX-License-Identifier: Apache-2.0
"""Reads facts from the API server: its version, the driver's rights, and this node's Node object, slices and claims.

Stores nothing: a slice is created only in a dry run.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, TypeVar

from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.connection import CALL_SECONDS, Connection
from dra_frontend.api_server.credentials import ConfigurationLoader
from dra_frontend.api_server.errors import ForbiddenError, InvalidError, KubeError, UnreadableError
from dra_frontend.devices import gates
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.publishing.plan import LISTS_REFUSED, MAPPING_REFUSED, canonical, differences, variants
from numa_contract.config import Config
from numa_contract.names import DRIVERS, OVERCLAIMED_TAINTS
from numa_contract.records import AllocationRecord

from numa_tools.doctor.facts import Document, Trial
from numa_tools.doctor.model import Unread
from numa_tools.doctor.sources.inquiry import RIGHTS, RIGHTS_ON_DEMAND, Inquiry

_MAX_CLAIMS: Final = 100
"""Maximum number of prepared claims to look up."""
_KEYS: Final = ("configz", "server", "classes", "node", "rights", "trial", "slices", "api_claims")
_NOT_QUERIED: Final = Unread(
    "with --host-root and without a kubeconfig, the API server is not queried, because this command would not have "
    "the driver's permissions",
    "run the command in the driver's pod for these checks",
    intentional=True,
)
_NO_CONFIGZ: Final = (
    "run kubectl numa doctor NODE, which reads the kubelet's configuration with your own permissions and passes it to "
    "the doctor; or pass the output of kubectl get --raw /api/v1/nodes/NODE/proxy/configz with --kubelet-config; or "
    "set doctor.kubeletProxy: true in the chart's values, which grants the driver get on nodes/proxy (docs/doctor.md)"
)
_GATE_OF: Final[Mapping[str, str]] = {LISTS_REFUSED: gates.LISTS_GATE, MAPPING_REFUSED: gates.COUNTING_GATE}
"""The feature gate for each reason why a field was omitted."""
_Answer = TypeVar("_Answer")


def not_queried() -> Mapping[str, Any]:
    """Returns an Unread for each fact from the API server, for a command that runs outside the driver's pod and
    therefore does not have the driver's rights.
    """
    return dict.fromkeys(_KEYS, _NOT_QUERIED)


class Cluster:
    """The queries to the API server in one run."""

    def __init__(self, connection: Connection, node_name: str) -> None:
        self._client, self._inquiry = KubeClient(connection), Inquiry(connection)
        self._node_name = node_name

    async def rights(self, config: Config) -> dict[tuple[str, str, str, str], bool]:
        """Returns whether each right that the driver needs is granted."""
        needed = RIGHTS + (RIGHTS_ON_DEMAND if config.hugepages_on_demand else ())
        answers = await asyncio.gather(*(self._inquiry.has_right(*right) for right in needed))
        return dict(zip(needed, answers, strict=True))

    async def slices(self) -> tuple[Document, ...]:
        """Returns the slices of both drivers on this node."""
        found = [await self._client.list_slices(driver, self._node_name) for driver in DRIVERS]
        return tuple(item for items, _ in found for item in items)

    async def claims(self, records: Sequence[AllocationRecord]) -> dict[str, Document | None]:
        """Returns the claims that have records, by UID; the value is None if a claim has been deleted or replaced."""
        found: dict[str, Document | None] = {}
        for record in records[:_MAX_CLAIMS]:
            wanted = record.claim
            if wanted.uid in found:
                continue
            # One unreadable claim must not hide the other claims.
            with suppress(UnreadableError):
                claim = await self._client.get_claim(wanted.namespace, wanted.name, patience=1.0)
                found[wanted.uid] = claim if claim and claim["metadata"]["uid"] == wanted.uid else None
        return found

    async def trial(self, inventory: Inventory, *, counted: bool) -> Trial:
        """Creates a slice that has every possible field, in a dry run, and returns the server's changes to it."""
        pools = [pool for pool in inventory.pools if pool.devices]
        if not pools:
            raise KubeError("try a slice", "this node has no devices to offer; see the checks config.*")
        wanted = slice_documents(pools[0], self._node_name, counted=counted)[0]
        taint = {"key": OVERCLAIMED_TAINTS[pools[0].driver], "value": "true", "effect": "NoSchedule"}
        wanted["spec"]["devices"] = [wanted["spec"]["devices"][0] | {"taints": [taint]}]
        refusal: KubeError
        for (document,), left_out in variants([wanted]):
            sent = {**document, "metadata": {"generateName": "dry-run-"}}
            try:
                answer = await self._client.create_slice(sent, dry_run=True)
            except InvalidError as error:
                refusal = error
                continue
            except ForbiddenError as error:
                # Kubernetes 1.37 forbids the mapping until the node's kubelet declares the feature (KEP-5517).
                if gates.COUNTING_GATE not in str(error) or MAPPING_REFUSED in left_out:
                    raise
                refusal = error
                continue
            ahead = _server_time(answer) - time.time()
            dropped = differences(canonical(sent["spec"]), canonical(answer["spec"]))
            # The reason is "" for the list of NUMA nodes, which is not controlled by any setting.
            refused = tuple(_GATE_OF[reason] for reason in left_out if reason)
            return Trial(tuple(sorted(set(dropped))), refused, ahead)
        raise refusal

    async def node(self) -> Document:
        """Returns the Node object."""
        return await self._client.get_node(self._node_name)

    async def server(self) -> str:
        """Returns the server's version."""
        return await self._inquiry.server_version()

    async def configz(self) -> Document | Unread:
        """Returns the kubelet's configuration, or an Unread if the request fails.

        The driver does not require the permission for this request.
        """
        try:
            return await self._inquiry.kubelet_config(self._node_name)
        except ForbiddenError:
            return Unread(
                "the driver is not allowed to query the kubelet through the API server (get nodes/proxy)", _NO_CONFIGZ
            )
        except KubeError as error:
            return Unread(f"the kubelet does not respond through the API server: {error.detail}", _NO_CONFIGZ)

    async def classes(self) -> frozenset[str]:
        """Returns the names of all DeviceClasses."""
        return await self._inquiry.list_classes()


def _server_time(answer: Document) -> float:
    try:
        return datetime.fromisoformat(str(answer["metadata"]["creationTimestamp"])).timestamp()
    except (ValueError, KeyError):
        return time.time()


async def read_cluster(
    load: ConfigurationLoader,
    node_name: str,
    inventory: Inventory | None,
    records: Sequence[AllocationRecord],
    config: Config,
) -> Mapping[str, Any]:
    """Returns the facts by name. Queries fail independently of each other, unless the server is unreachable."""
    connection = Connection(load, CALL_SECONDS)
    try:
        await connection.open()
        cluster = Cluster(connection, node_name)
        server = await _or_unread(cluster.server())
        if isinstance(server, Unread):
            return dict.fromkeys(_KEYS, server)
        found: dict[str, Any] = {"server": server}
        counted = config.publish_node_allocatable_resource_mapping
        machine = Unread("the machine cannot be read", "see config.machine")
        trial = machine if inventory is None else await _or_unread(cluster.trial(inventory, counted=counted))
        found |= {
            "trial": trial,
            "classes": await _or_unread(cluster.classes()),
            "node": await _or_unread(cluster.node()),
        }
        found |= {"configz": await cluster.configz()}
        found |= {"rights": await _or_unread(cluster.rights(config)), "slices": await _or_unread(cluster.slices())}
        return found | {"api_claims": await _or_unread(cluster.claims(records))}
    except (KubeError, OSError, ValueError) as error:
        return dict.fromkeys(_KEYS, Unread(f"the API server cannot be queried: {error}", "see api.reachable"))
    finally:
        await connection.close()


async def _or_unread(call: Awaitable[_Answer]) -> _Answer | Unread:
    try:
        return await call
    except ForbiddenError as error:
        return Unread(str(error), "see api.rights; if it is good, let the API server's policies allow this request")
    except KubeError as error:
        return Unread(str(error), "see api.reachable")
