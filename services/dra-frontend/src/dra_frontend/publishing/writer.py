# SPDX-License-Identifier: Apache-2.0
"""The slices of one driver on one node as the API server holds them, and the writes that make them as wanted."""

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from dra_frontend.api_server.errors import KubeError, NotFoundError
from dra_frontend.publishing.compare import Document, canonical, differences
from dra_frontend.publishing.plan import Adoption, Delete, PoolPlan, plan_pools
from dra_frontend.publishing.status import GateOffError, gate_is_off

__all__ = ["SliceClient", "SliceMirror"]

_LOG = logging.getLogger(__name__)


class SliceClient(Protocol):
    """What publication needs of the API server; every call fails with a KubeError only."""

    async def get_node(self, name: str) -> Document | None:
        """The Node or None."""

    async def list_slices(self, driver: str, node_name: str) -> tuple[list[Document], str]:
        """The slices and the version to watch from."""

    def watch_slices(
        self, driver: str, node_name: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Changes since then."""

    async def create_slice(self, document: Document, *, dry_run: bool = False) -> Document:
        """What the server made of it."""

    async def replace_slice(self, document: Document) -> Document:
        """What the server made of it."""

    async def delete_slice(self, name: str, uid: str, resource_version: str) -> None:
        """Deletes exactly this version."""


class SliceMirror:
    """Own writes are entered from the server's answers, so that a watch which lags causes no second write."""

    def __init__(self, client: SliceClient, driver: str, node_name: str) -> None:
        self._client = client
        self._driver = driver
        self._node_name = node_name
        self._view: dict[str, Document] = {}
        self._adopted: dict[tuple[str, int], Adoption] = {}
        self._gate_is_on = False
        self.dropped: dict[str, None] = {}
        self.writes = 0

    def reset(self, items: Iterable[Document]) -> None:
        """Takes over a fresh list."""
        self._view = {}
        for item in items:
            self._keep(item)

    def see(self, kind: str, document: Document) -> bool:
        """Takes over an event of the watch; True if it says something new, that is, somebody else wrote."""
        name = document["metadata"]["name"]
        known = self._view.get(name)
        if kind == "DELETED":
            return self._view.pop(name, None) is not None
        if known is not None and _version(document) <= _version(known):
            return False
        self._keep(document)
        return True

    async def write(self, pools: Mapping[str, Sequence[Document]]) -> None:
        """Makes the server hold these pools and no others. One bad pool does not stop the rest.

        Raises GateOffError after taking everything back, else the KubeError of the first pool that failed.
        """
        plans = plan_pools(list(self._view.values()), pools, self._adopted)
        try:
            await self._prove_gate(plans)
            failures = []
            for plan in plans:
                try:
                    await self._carry_out(plan)
                except GateOffError:
                    raise
                except KubeError as error:
                    _LOG.info("pool not written driver=%s pool=%s error=%s", self._driver, plan.pool, error)
                    failures.append(error)
        except GateOffError:
            await self._withdraw()
            raise
        if failures:
            raise failures[0]

    async def _prove_gate(self, plans: Sequence[PoolPlan]) -> None:
        """Asks with a dry run before the first write, as a real one would offer whole devices for a moment."""
        if self._gate_is_on:
            return
        documents = [write.document for plan in plans for write in plan.writes]
        shared = next((document for document in documents if _is_shared(document)), None)
        if shared is not None:
            document = await self._owned(_as_new(shared))
            self._check_gate(document, await self._client.create_slice(document, dry_run=True))
            self._gate_is_on = True

    async def _carry_out(self, plan: PoolPlan) -> None:
        for delete in plan.deletes:
            await self._delete(delete)
        for update in plan.updates:
            self._enter(plan.pool, update.index, update.document, await self._client.replace_slice(update.document))
        for create in plan.creates:
            document = await self._owned(create.document)
            self._enter(plan.pool, create.index, document, await self._client.create_slice(document))
        _LOG.info(
            "pool written driver=%s pool=%s deleted=%d updated=%d created=%d",
            self._driver,
            plan.pool,
            len(plan.deletes),
            len(plan.updates),
            len(plan.creates),
        )

    async def _withdraw(self) -> None:
        self._gate_is_on = False
        for plan in plan_pools(list(self._view.values()), {}):
            for delete in plan.deletes:
                await self._delete(delete)

    async def _delete(self, delete: Delete) -> None:
        await self._client.delete_slice(delete.name, delete.uid, delete.resource_version)
        self.writes += 1
        self._view.pop(delete.name, None)

    async def _owned(self, document: Document) -> Document:
        # Read each time: a node object that was made anew has another uid, and slices of the old one are collected.
        node = await self._client.get_node(self._node_name)
        if node is None:
            raise NotFoundError(f"get nodes {self._node_name}", "no such node; the kubelet makes it")
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._node_name,
            "uid": node["metadata"]["uid"],
            "controller": True,
        }
        return {**document, "metadata": {**document["metadata"], "ownerReferences": [owner]}}

    def _enter(self, pool: str, index: int, sent: Document, answer: Document) -> None:
        self.writes += 1
        self._keep(answer)
        self._check_gate(sent, answer)
        wish, stored = canonical(sent["spec"]), canonical(answer["spec"])
        if wish == stored:
            self._adopted.pop((pool, index), None)
            return
        self._adopted[pool, index] = Adoption(wish, stored)
        self.dropped.update(dict.fromkeys(differences(sent["spec"], answer["spec"])))

    def _check_gate(self, sent: Document, answer: Document) -> None:
        if gate_is_off(differences(sent["spec"], answer["spec"])):
            raise GateOffError(self._driver)

    def _keep(self, document: Document) -> None:
        # managedFields are as large as the slice itself and nobody reads them.
        metadata = {key: value for key, value in document["metadata"].items() if key != "managedFields"}
        self._view[metadata["name"]] = {**document, "metadata": metadata}


def _as_new(document: Document) -> Document:
    return {**document, "metadata": {"generateName": "dry-run-"}}


def _is_shared(document: Document) -> bool:
    return any(device.get("allowMultipleAllocations") for device in document["spec"].get("devices") or ())


def _version(document: Document) -> Any:
    # Ordered integers in every released API server, by contract since KEP-5504.
    text = document["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0
