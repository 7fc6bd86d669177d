# SPDX-License-Identifier: Apache-2.0
"""The writes by which the API server comes to hold the desired slices of a pool; nothing is written in vain.

Slices have deterministic names. Each is equal, replaced or created; others of the pool are deleted. While one object
changes, the pool is whole before and after it. If more do, the generation is raised: consumers see the new slices once
all of them are there, and never a mixture; so what is superseded (slices of an earlier release, under generated names)
is deleted last.
"""

from collections.abc import Mapping

from dra_frontend.api_server.requests import Document
from dra_frontend.publishing.compare import canonical

Accepted = Mapping[str, tuple[Document, Document]]
"""By slice name, what was sent and what the server made of it: the same is not sent again, else it never ends."""


def plan_pool(
    pool: str, desired: Mapping[str, Document], held: Mapping[str, Document], accepted: Accepted
) -> tuple[list[Document], list[Document]]:
    """Returns what to write and what to delete, in this order; ``desired`` and ``held`` are by slice name.

    A document with a resourceVersion replaces that version, one without is new. ``held`` is what the server has.
    """
    highest = max((document["spec"]["pool"].get("generation") or 0 for document in held.values()), default=0)
    header = {"name": pool, "generation": highest or 1, "resourceSliceCount": len(desired)}
    deletes = [document for name, document in held.items() if name not in desired]
    changed = [
        name
        for name, document in desired.items()
        if name not in held
        or held[name]["spec"]["pool"] != header
        or not _same(canonical(document["spec"]), canonical(held[name]["spec"]), accepted.get(name))
    ]
    if held and len(changed) + len(deletes) > 1:
        header["generation"] = highest + 1
        changed = list(desired)
    writes = [{**desired[name], "spec": {**desired[name]["spec"], "pool": header}} for name in changed]
    for document in writes:
        document["metadata"] = held.get(document["metadata"]["name"], document)["metadata"]
    return writes, deletes


def _same(desired: Document, stored: Document, accepted: tuple[Document, Document] | None) -> bool:
    return desired == stored or accepted == (desired, stored)
