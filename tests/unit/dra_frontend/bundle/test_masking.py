# SPDX-License-Identifier: Apache-2.0
"""Names of the cluster in a bug report, replaced by numbers."""

import json
import re
from typing import Any

from dra_frontend.bundle.masking import KEPT, Masks
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.records import parse_record

from tests.rigs.builders import cpu_record, report

RECORD = cpu_record("11111111-2222-3333-4444-555555555555", "r=0-3", pods=("billing-7f9",))


def masks_of(*documents: Any) -> Masks:
    """The masks of what is in documents."""
    masks = Masks()
    masks.add("node", "worker-1.example.com")
    masks.learn(list(documents))
    return masks


def test_every_kind_of_name_by_a_number() -> None:
    """The same name is the same mask everywhere, in fields, in sentences, and in a record inside of a text."""
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


def test_a_name_that_is_a_word_of_the_driver() -> None:
    """It is replaced where it is a name; elsewhere it is no name, and the record must be readable afterwards."""
    document = RECORD.model_dump(mode="json") | {"reservedFor": [{"uid": "p1", "name": "packed"}]}
    document["parameters"] = {"r": {"strategy": "packed"}}
    masked = masks_of(document).document(document)
    assert (masked["reservedFor"][0]["name"], masked["parameters"]["r"]["strategy"]) == ("pod-1", "packed")


def test_a_part_of_a_word_is_no_name() -> None:
    """The pod "db" is not in "db-2", "mydb" or "db.example"; a full stop ends a name."""
    masks = masks_of({"uid": "1", "name": "db"})
    assert masks.text('db db-2 mydb db.example db. db/db_db, "db"') == (
        'pod-1 db-2 mydb db.example pod-1. pod-1/pod-1_pod-1, "pod-1"'
    )


def test_pools_begin_with_the_node() -> None:
    """They stay the pools of that node."""
    masks = masks_of()
    masks.learn_pools(["worker-1.example.com", "worker-1.example.com-memory", "other"])
    assert masks.text("worker-1.example.com-memory of worker-1.example.com") == "node-1-memory of node-1"


_names = st.from_regex(r"[a-z][a-z0-9]{0,3}([-.][a-z0-9]{1,3})?", fullmatch=True)
_gaps = st.sampled_from([" ", "/", ", ", '"', "_", ": "])


@given(st.lists(_names, min_size=1, max_size=6, unique=True), st.lists(_gaps, min_size=12, max_size=12))
def test_no_name_is_left(names: list[str], gaps: list[str]) -> None:
    """Whatever the names and what stands between them."""
    masks = masks_of(*({"uid": "1", "name": name} for name in names))
    text = "".join(name + gap for name, gap in zip(names * 2, gaps, strict=False))
    words = re.split(r'[ /,"_:]+', masks.text(text))
    assert {word for word in words if word} <= {f"pod-{n + 1}" for n in range(6)} | KEPT
