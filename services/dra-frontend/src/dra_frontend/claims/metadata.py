# SPDX-License-Identifier: Apache-2.0
"""What containers are told of their devices, in the form of KEP-5304. Core.

One document for each request of a claim and driver. A record carries it, so that a lost file can be written again.
"""

import json
from typing import Any, Final

from numa_contract.names import (
    CPU_CAPACITY,
    MEMORY_CAPACITY,
    base_request,
    metadata_host_path,
    metadata_mount_path,
)
from numa_contract.records import AllocationRecord, MetadataFile

from dra_frontend.allocation.claim import ClaimView, Result
from dra_frontend.allocation.decide import own_results
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.slices import attribute_document

API_VERSION: Final = "metadata.resource.k8s.io/v1beta1"
# What was taken of a shared device; these are in no slice. The first name is the CPU peer's.
_ALLOCATED: Final = {
    CPU_CAPACITY: "dra.cpu/allocatedNumCPUs",
    MEMORY_CAPACITY: "dra.memory/allocatedBytes",
}


def with_metadata(record: AllocationRecord, claim: ClaimView, inventory: Inventory, plugins: str) -> AllocationRecord:
    """Returns the record with a metadata file for each request; what it has in the right place already stays.

    ``plugins`` is the kubelet's directory of plugins. Raises MalformedError when a name may not be part of a path.
    """
    reference, driver = record.claim, record.driver
    files: dict[str, MetadataFile] = {}
    for request in record.requests:
        host = metadata_host_path(plugins, driver, reference.namespace, reference.name, request)
        known = record.metadata.get(request)
        if known is not None and known.host_path == host:
            files[request] = known
            continue
        mounted = metadata_mount_path(driver, reference.name, claim.pod_claim_name, request)
        document = _document(claim, driver, request, inventory)
        content = json.dumps(document, separators=(",", ":"))
        files[request] = MetadataFile(host_path=host, mount_path=mounted, content=content)
    return record.model_copy(update={"metadata": files})


def _document(claim: ClaimView, driver: str, request: str, inventory: Inventory) -> dict[str, Any]:
    """Returns the document of one request (base name); inside, a request keeps its full name with the subrequest."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in own_results(claim, driver):
        if base_request(result.request) == request:
            by_name.setdefault(result.request, []).append(_device(result, inventory))
    pod_claim = {} if claim.pod_claim_name is None else {"podClaimName": claim.pod_claim_name}
    return {
        "apiVersion": API_VERSION,
        "kind": "DeviceMetadata",
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
        **pod_claim,
        "requests": [{"name": name, "devices": devices} for name, devices in by_name.items()],
    }


def _device(result: Result, inventory: Inventory) -> dict[str, Any]:
    device = inventory.device(result.driver, result.pool, result.device)
    attributes = {} if device is None else {n: attribute_document(v) for n, v in device.attributes.items()}
    for key, name in _ALLOCATED.items():
        if name.startswith(f"{result.driver}/") and (amount := result.consumption(key)) is not None:
            attributes[name] = attribute_document(int(amount))
    return {"driver": result.driver, "pool": result.pool, "name": result.device, "attributes": attributes}
