# SPDX-License-Identifier: Apache-2.0
"""Writes the slices of one driver on one node to the API server, and tracks what the server has stored."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.errors import ForbiddenError, InvalidError, KubeError
from dra_frontend.api_server.requests import Document
from dra_frontend.devices.gates import ALLOCATABLE_FIELD, COUNTING_GATE, SHARING_FIELDS, SHARING_GATE
from dra_frontend.publishing.plan import (
    MAPPING_REFUSED,
    canonical,
    differences,
    notes,
    only_conditional_devices,
    plan_pool,
    variants,
    without_conditional_devices,
)

_log = logging.getLogger(__name__)

Pools = Mapping[str, Sequence[Document]]
"""Desired slices by pool."""
_GATE_OFF: Final = (
    f"the API server drops {' and '.join(SHARING_FIELDS)}, without which a claim would get a whole device; enable "
    f"the feature gate {SHARING_GATE} in the API server and the scheduler (on by default from Kubernetes 1.36)"
)


class GateOffError(KubeError):
    """Raised if the server drops the fields that make devices shareable, because each claim would then get a whole
    device.
    """


class SliceWriter:
    """Tracks the server's slices, based on a list, on watch events and on the responses to its own writes."""

    def __init__(self, client: KubeClient, driver: str, node_name: str) -> None:
        self._client = client
        self._driver = driver
        self._node_name = node_name
        self._held: dict[str, Document] = {}
        self._accepted: dict[str, tuple[Document, Document]] = {}
        self._left_out: dict[str, tuple[str, ...]] = {}
        """Reasons for omitted fields by pool: the server rejected the pool's slices with these fields."""
        self._gate_is_on = False
        self._keeps_conditions: bool | None = None
        """True if the server stores devices' binding conditions; None until that is known."""

    @property
    def counted(self) -> bool:
        """True if claims for the driver's devices count against the node's resources, as far as this process knows."""
        devices = [device for one in self._held.values() for device in one["spec"].get("devices") or ()]
        return not devices or any(ALLOCATABLE_FIELD in device for device in devices)

    def notes(self) -> dict[str, str]:
        """Returns notes, by Event reason, about fields that are absent from the published slices."""
        accepted = [self._accepted[name] for name in self._held if name in self._accepted]
        dropped = sorted({path for sent, answer in accepted for path in differences(sent, answer)})
        left_out = {reason for reasons in self._left_out.values() for reason in reasons}
        return notes(left_out, dropped, conditions=self._keeps_conditions is not False)

    def reset(self, items: Iterable[Document]) -> None:
        """Replaces the known slices with a fresh list. Rejected fields are retried, since a gate may have been
        enabled.
        """
        self._held = {item["metadata"]["name"]: item for item in items}
        self._left_out = {}
        self._keeps_conditions = None

    def apply_event(self, kind: str, document: Document) -> bool:
        """Applies a watch event. Returns False if the event reports our own write or a state that is already known."""
        name = document["metadata"]["name"]
        held = self._held.get(name)
        # Names are reused, so even a deletion may concern an earlier object.
        if kind == "DELETED" if held is None else _version(document) <= _version(held):
            return False
        if kind == "DELETED":
            del self._held[name]
        else:
            self._held[name] = document
        return True

    async def write(self, pools: Pools) -> None:
        """Writes the given pools and deletes all others. An error in one pool does not prevent the others from being
        written.

        If the feature gate is off, deletes all slices and raises GateOffError. Otherwise raises the KubeError
        from the first pool that failed, if any.
        """
        failures = []
        for pool in dict.fromkeys([*pools, *(one["spec"]["pool"]["name"] for one in self._held.values())]):
            try:
                await self._write_pool(pool, pools.get(pool, ()))
            except GateOffError:
                self._gate_is_on = False
                for document in list(self._held.values()):
                    await self._delete(document)
                raise
            except KubeError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _write_pool(self, pool: str, documents: Sequence[Document]) -> None:
        """Writes a pool without the optional fields that the server rejects.

        A server rejects a whole slice because of one field that it does not accept. So the variants of the slices are
        tried in order, from the complete slices to those without any optional field, until the server accepts one.
        Variants with a field that is known to be rejected are skipped: a field that was omitted when the pool was last
        written (until :meth:`reset`), or the mapping, whose rejection is recognized by a distinct error. If the server
        accepts no variant, the error for the first one that was tried is raised.
        """
        choices = variants(documents)
        refused = set(self._left_out.get(pool, ())) & {reason for _, reasons in choices for reason in reasons}
        refusals: list[KubeError] = []
        for variant, left_out in choices:
            if not refused <= {*left_out}:
                continue
            try:
                await self._write_variant(pool, variant)
            except InvalidError as error:
                refusals.append(error)
            except ForbiddenError as error:
                # Kubernetes 1.37 forbids the mapping until the node's kubelet declares the feature (KEP-5517).
                if COUNTING_GATE not in str(error) or MAPPING_REFUSED in left_out:
                    raise
                refused.add(MAPPING_REFUSED)
                refusals.append(error)
            else:
                self._left_out[pool] = left_out
                return
        raise refusals[0]

    async def _write_variant(self, pool: str, documents: Sequence[Document]) -> None:
        documents = await self._bindable(documents)
        desired = {document["metadata"]["name"]: document for document in documents}
        held = {name: one for name, one in self._held.items() if one["spec"]["pool"]["name"] == pool}
        writes, deletes = plan_pool(pool, desired, held, self._accepted)
        for document in writes:
            await self._write_slice(document)
        for document in deletes:
            await self._delete(document)
        if writes or deletes:
            _log.info("pool written", extra={"pool": pool, "written": len(writes), "deleted": len(deletes)})

    async def _bindable(self, documents: Sequence[Document]) -> list[Document]:
        """Returns the slices without devices whose binding conditions the server drops.

        Without binding conditions, a pod would be bound immediately and wait on the node for pages that may never
        exist. A dry run before the first write determines whether the server drops them, because a real write would
        briefly offer the pages.
        """
        trials = [one for document in documents if (one := only_conditional_devices(document)) is not None]
        if trials and self._keeps_conditions is None:
            answer = await self._client.create_slice(await self._with_owner(trials[0]), dry_run=True)
            dropped = differences(canonical(trials[0]["spec"]), canonical(answer["spec"]))
            self._keeps_conditions = not any(path.startswith("devices[*].binding") for path in dropped)
        if not trials or self._keeps_conditions:
            return list(documents)
        return [without_conditional_devices(document) for document in documents]

    async def _write_slice(self, document: Document) -> None:
        shared = any(device.get("allowMultipleAllocations") for device in document["spec"]["devices"])
        if shared and not self._gate_is_on:
            # A dry run precedes the first write, because a real write would briefly offer whole devices.
            trial = await self._with_owner({**document, "metadata": {"generateName": "dry-run-"}})
            self._check_gate(document, await self._client.create_slice(trial, dry_run=True))
            self._gate_is_on = True
        if "resourceVersion" in document["metadata"]:
            answer = await self._client.replace_slice(document)
        else:
            answer = await self._client.create_slice(await self._with_owner(document))
        self._held[answer["metadata"]["name"]] = answer
        self._accepted[answer["metadata"]["name"]] = self._check_gate(document, answer)

    def _check_gate(self, sent: Document, answer: Document) -> tuple[Document, Document]:
        """Returns the sent and the stored spec in canonical form. Raises GateOffError if the sharing fields are absent
        from the response.
        """
        both = canonical(sent["spec"]), canonical(answer["spec"])
        if any(path.rpartition(".")[2] in SHARING_FIELDS for path in differences(*both)):
            raise GateOffError(f"publish the devices of {self._driver}", _GATE_OFF)
        return both

    async def _delete(self, document: Document) -> None:
        metadata = document["metadata"]
        await self._client.delete_slice(metadata["name"], metadata["uid"], metadata.get("resourceVersion", ""))
        self._held.pop(metadata["name"], None)

    async def _with_owner(self, document: Document) -> Document:
        """Returns the document with the Node as its owner, so that it is deleted with the Node."""
        # The Node is read each time: a recreated Node has a new UID, and slices owned by the old Node are
        # garbage-collected.
        node = await self._client.get_node(self._node_name)
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node_name, "uid": node["metadata"]["uid"]}
        return {**document, "metadata": {**document["metadata"], "ownerReferences": [{**owner, "controller": True}]}}


def _version(document: Document) -> int:
    # Resource versions are ordered integers in every released API server. KEP-5504 guarantees this.
    text = str(document["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() and len(text) < 20 else 0
