# SPDX-License-Identifier: Apache-2.0
"""Replacing the cluster's names with numbers in a bug report."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.cdi import dump_claim_file, parse_claim_file
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, cdi_file_name
from numa_contract.records import MemoryMount, PodReference, parse_record
from numa_tools.bundle.masking import KEPT_WORDS, Masks

from tests.rigs.builders import MI, cpu_record, files_of, memory_record, report

RECORD = cpu_record("11111111-2222-3333-4444-555555555555", "r=0-3", pods=("billing-7f9",))


def masks_of(*documents: Any) -> Masks:
    """Returns the masks for the names in the given documents."""
    masks = Masks()
    masks.add("node", "worker-1.example.com")
    masks.add_from_document(list(documents))
    return masks


def test_every_kind_of_name_is_replaced_by_a_number() -> None:
    """The same name gets the same mask everywhere: in fields, in sentences, and in a JSON record inside a string."""
    document = RECORD.model_dump(mode="json")
    seen = report("c", podName="billing-7f9", podNamespace="accounts", name="ledger").model_dump(mode="json")
    said = {
        "problem": "claim accounts/card: refused; pod accounts/billing-7f9 on worker-1.example.com.",
        "text": json.dumps(document),
    }
    masks = masks_of(document, seen, said)
    masked = masks.document([document, seen, said])
    assert not re.search("billing|accounts|ledger|card|claim-1111|worker", json.dumps(masked))
    assert masked[0]["claim"]["name"] == json.loads(masked[2]["text"])["claim"]["name"] == "claim-1"
    assert masked[0]["reservedFor"][0]["name"] == masked[1]["podName"] == "pod-1"
    assert re.fullmatch(
        r"claim namespace-\d/claim-2: refused; pod namespace-\d/pod-1 on node-1\.", masked[2]["problem"]
    )
    assert parse_record(masked[0]).cpus == RECORD.cpus


def test_a_driver_keyword_is_masked_only_where_it_is_a_name() -> None:
    """A pod may be named ``packed``, which is also a strategy. The masked output must stay readable."""
    document = RECORD.model_dump(mode="json") | {"reservedFor": [{"uid": "p1", "name": "packed"}]}
    document["parameters"] = {"r": {"strategy": "packed"}}
    masked = masks_of(document).document(document)
    assert (masked["reservedFor"][0]["name"], masked["parameters"]["r"]["strategy"]) == ("pod-1", "packed")


@pytest.mark.parametrize(
    "name", ["1-2", "cpu", "dra.cpu", "dra.k8s.io", "record", "dra-driver-numa", "d", "0.6.0", RECORD.claim.uid]
)
def test_a_name_cannot_damage_a_claim_file(name: str) -> None:
    """Any tenant can choose such a name. Only the name is replaced, so the masked file can still be read."""
    whole = RECORD.model_copy(
        update={
            "claim": RECORD.claim.model_copy(update={"namespace": name, "name": name}),
            "reserved_for": (PodReference(uid="u", name=name),),
            "results": (RECORD.results[0].model_copy(update={"consumed": {"dra.cpu/cpu": "1"}}),),
        }
    )
    document = json.loads(dump_claim_file(whole))
    masked = masks_of(document).document(document)
    file = parse_claim_file(cdi_file_name(CPU_DRIVER, whole.claim.uid), json.dumps(masked).encode())
    assert file.record is not None, file.problem
    assert (file.record.cpus, file.record.results) == (whole.cpus, whole.results)
    assert name not in (file.record.claim.namespace, file.record.claim.name, file.record.reserved_for[0].name)


@pytest.mark.parametrize("name", ["memory", "hugepages", "2", "a", "67108864"])
def test_a_name_cannot_damage_the_file_of_a_memory_claim(name: str) -> None:
    """As in the file of a CPU claim, only the pod's name is replaced. The names of the environment variables, which
    contain the kind of memory and the page size, stay unchanged.
    """
    whole = memory_record(
        "21111111-2222-3333-4444-555555555555",
        ("a", 0, 64 * MI, 2 * MI),
        ("b", 0, 64 * MI, 4096),
        pods=(name,),
        a={"mount": MemoryMount(path="/mnt/huge")},
        b={"protect": "low"},
    )
    results = tuple(one.model_copy(update={"consumed": {"size": "67108864"}}) for one in whole.results)
    whole = whole.model_copy(update={"results": results, "reserved_for": (PodReference(uid="u", name=name),)})
    document = json.loads(dump_claim_file(whole))
    masked = masks_of(document).document(document)
    file = parse_claim_file(cdi_file_name(MEMORY_DRIVER, whole.claim.uid), json.dumps(masked).encode())
    assert file.record is not None, file.problem
    assert (file.memory, file.record.memory, file.record.results) == (
        files_of(whole)[MEMORY_DRIVER, whole.claim.uid].memory,
        whole.memory,
        whole.results,
    )
    assert file.record.reserved_for[0].name == "pod-1"


def test_a_part_of_a_word_is_not_a_name() -> None:
    """The pod name "db" does not match "db-2", "mydb" or "db.example". A full stop at the end of a sentence ends a
    name.
    """
    masks = masks_of({"uid": "1", "name": "db"})
    assert masks.text('db db-2 mydb db.example db. db/db_db, "db"') == (
        'pod-1 db-2 mydb db.example pod-1. pod-1/pod-1_pod-1, "pod-1"'
    )


def test_masked_pool_names_begin_with_the_masked_node_name() -> None:
    """The pools can still be recognized as the node's."""
    masks = masks_of()
    masks.add_pools(["worker-1.example.com", "worker-1.example.com-memory", "other"])
    assert masks.text("worker-1.example.com-memory of worker-1.example.com") == "node-1-memory of node-1"


def test_pool_names_in_documents_and_slice_names_are_masked() -> None:
    """Pool names are masked even if the pool no longer exists. They are also masked inside the names of this driver's
    slices, which begin with a hexadecimal number. Similar strings are not masked.
    """
    former = {"pool": "worker-1.example.com-hugepages-1g", "device": "hugepages-1g-numa000"}
    masks = masks_of(former, {"pool": "0-7", "text": "slice 0001f-dra.memory-worker-1.example.com-hugepages-2m."})
    assert masks.text("worker-1.example.com-hugepages-1g worker-1.example.com-hugepages-2m 0-7") == (
        "node-1-hugepages-1g node-1-hugepages-2m 0-7"
    )
    assert masks.text('"00000-dra.cpu-worker-1.example.com", 0001f-dra.memory-worker-1.example.com-hugepages-2m.') == (
        '"00000-dra.cpu-node-1", 0001f-dra.memory-node-1-hugepages-2m.'
    )
    other = "x-dra.cpu-worker-1.example.com 00000-gpu-worker-1.example.com"
    assert masks.text(other) == other


_names = st.from_regex(r"[a-z][a-z0-9]{0,3}([-.][a-z0-9]{1,3})?", fullmatch=True)
_gaps = st.sampled_from([" ", "/", ", ", '"', "_", ": "])


@given(st.lists(_names, min_size=1, max_size=6, unique=True), st.lists(_gaps, min_size=12, max_size=12))
def test_no_name_remains(names: list[str], gaps: list[str]) -> None:
    """No name remains, whatever the names and the separators are."""
    masks = masks_of(*({"uid": "1", "name": name} for name in names))
    text = "".join(name + gap for name, gap in zip(names * 2, gaps, strict=False))
    words = re.split(r'[ /,"_:]+', masks.text(text))
    assert {word for word in words if word} <= {f"pod-{n + 1}" for n in range(6)} | KEPT_WORDS


def test_a_document_nested_in_an_embedded_document_is_masked_as_a_string() -> None:
    """A string inside an embedded document is not parsed again, so documents cannot be nested without limit."""
    inner: Any = {"podName": "billing-7f9"}
    for _ in range(12):
        inner = {"podName": "billing-7f9", "annotation": json.dumps(inner)}
    masked = masks_of(inner).document(inner)
    assert "billing" not in json.dumps(masked)
    assert json.loads(masked["annotation"])["podName"] == masked["podName"]
