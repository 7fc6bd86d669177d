# SPDX-License-Identifier: Apache-2.0
"""The analysis of an archive's documents in dra-frontend explain; an archive may come from anywhere."""

import json
from typing import Any

from dra_frontend.devices.inventory import build_inventory
from hypothesis import strategies as st
from numa_contract.config import Config
from numa_tools.explain.snapshot import NodeSnapshot, read_backend, read_containers, read_devices, read_records
from numa_tools.explain.subjects import UnknownSubjectError, explain_subject
from numa_tools.explain.text import explanation_text

from tests.fuzz.documents import spoilt, written
from tests.fuzz.target import Target
from tests.rigs import builders
from tests.strategies import contract
from tests.strategies.machines import machine

_INVENTORY = build_inventory(machine(), Config(), builders.NODE)
_MAX_SUBJECTS = 6


def _explained(data: bytes) -> None:
    """Explains the documents' contents; every line must be safe to print on a terminal."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(said, dict):
        return
    snapshot = NodeSnapshot(
        _INVENTORY,
        Config(),
        read_records(said.get("claims")),
        read_containers(said.get("containers")),
        read_backend(said.get("backend")),
        read_devices(said.get("devices")),
        releasing=read_records(said.get("releasing")),
    )
    named = [uid for _, uid in snapshot.files][:_MAX_SUBJECTS] + [one.pod_uid for one in snapshot.containers][
        :_MAX_SUBJECTS
    ]
    for subject in (*named, "1", "cpudevnuma000", "memory-numa000", "device/hugepages-2m-numa000"):
        try:
            found = explain_subject(snapshot, subject)
        except UnknownSubjectError:
            continue
        if found is not None:
            assert all(line.isprintable() for line in explanation_text(*found).split("\n"))


def _documents(records: list[Any], cpus: str, word: str) -> dict[str, Any]:
    own = builders.cpu_record("u1", "a=1-2", "b=5").model_dump(mode="json")
    for part in own["cpus"]:
        part["device"] = "cpudevnuma000"
    claims = [own, *(one.model_dump(mode="json") for one in records)]
    uses = [{"uid": one["claim"]["uid"], "driver": one["driver"], "requests": ["a"]} for one in claims]
    container = builders.report("c", claims=uses[:1], unknownClaims=uses[1:], cpus=cpus, limits={"memory.max": word})
    device = {"driver": "dra.cpu", "name": "cpudevnuma000", "health": word, "message": word, "taints": [word]}
    backend = {"live": False, "problem": word, "age": 1.0, "status": None}
    listed = {"claims": claims, "containers": [container.model_dump(mode="json")], "devices": [device]}
    return {**listed, "backend": backend, "releasing": claims[1:]}


_many = _documents([builders.cpu_record(f"u{number}", f"r={number}") for number in range(2, 60)], "0-4000", "x" * 5000)

TARGETS = [
    Target(
        "explain",
        _explained,
        spoilt(
            st.builds(
                _documents,
                st.lists(contract.records(), max_size=3),
                st.sampled_from(["", "1-2", "0-8191"]),
                st.sampled_from(["healthy", "unhealthy", "\x1b[2J\x07", "a\nPROBLEM  b", "\u202e", "\ud800"]),
            )
        ).map(written),
        # The limit is generous, because only the person who runs the command has to wait.
        milliseconds=1000,
        bombs=(json.dumps(_many).encode(), b'{"claims":' + b"[" * 60_000, b'{"devices":[' + b"{}," * 20_000 + b"{}]}"),
    ),
]
