# SPDX-License-Identifier: Apache-2.0
"""Event documents: which observations count as one condition, and what the condition's Event contains."""

from typing import Any

import pytest
from dra_frontend.events.event import (
    COUNTED_ANNOTATION,
    ObjectReference,
    Observation,
    RecordedEvent,
    count_patch,
    event_name,
    new_event,
    read_recorded,
    without_identifiers,
)

POD = ObjectReference("Pod", "ns", "p", "u-1")
ID = "0a1b2c3d4e5f" * 5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"note": f"cri-containerd-{ID}.scope: no"}, {"note": f"cri-containerd-{ID[::-1]}.scope: no"}, True),
        (
            {"note": "kubepods-pod01234567_89ab_cdef_0123_456789abcdef.slice"},
            {"note": "kubepods-podfedcba98_7654_3210_fedc_ba9876543210.slice"},
            True,
        ),
        ({"note": "CPU 2"}, {"note": "CPU 3"}, False),
        ({"note": "a", "subject": "dra.cpu"}, {"note": "b", "subject": "dra.cpu"}, True),
        ({"note": "a", "subject": "dra.cpu"}, {"note": "a", "subject": "dra.memory"}, False),
        ({"note": "a"}, {"note": "a", "reason": "Other"}, False),
        ({"note": "a"}, {"note": "a", "regarding": POD._replace(uid="u-2")}, False),
    ],
)
def test_observations_that_differ_only_in_identifiers_are_one_condition(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    """A retry with a different container ID counts as the same condition. An observation with a different pod, reason,
    subject or cause counts as a different condition.
    """
    first, second = (Observation(**{"regarding": POD, "reason": "Reason"} | fields) for fields in (one, other))
    assert (first.condition == second.condition) is same
    assert (event_name(first) == event_name(second)) is same


def test_a_note_of_any_length_is_cut_before_it_is_searched() -> None:
    """An Event's note is at most 1 KiB long."""
    assert len(without_identifiers("0a1b2c3d4e5f " * 1_000_000)) <= 1024


def test_a_new_event_has_the_fields_that_the_api_requires() -> None:
    """Long messages and names are truncated to the API's limits, and truncated names are still valid."""
    long = POD._replace(name=f"{'a' * 199}.{'b' * 50}")
    document = new_event(Observation(long, "R" * 200, "ä" * 2000, source="c"), "n" * 200, 1, 1)
    assert document["metadata"]["name"].startswith(f"{'a' * 199}.")
    assert ".." not in document["metadata"]["name"]
    assert [len(document[field]) for field in ("reason", "action", "reportingInstance")] == [128] * 3
    assert 1000 < len(document["note"].encode()) <= 1024
    assert document["metadata"]["annotations"] == {COUNTED_ANNOTATION: "c=1"}
    assert "series" not in document


def test_an_event_about_a_node_is_in_the_default_namespace() -> None:
    """Nodes have no namespace, but every Event must have one."""
    node = Observation(ObjectReference("Node", "", "node-a", "node-a"), "Reason", "note")
    assert new_event(node, "node-a", 2, 2)["metadata"]["namespace"] == "default"
    assert new_event(node, "node-a", 2, 2)["series"]["count"] == 2
    assert "namespace" not in new_event(node, "node-a", 2, 2)["regarding"]


@pytest.mark.parametrize(
    ("document", "recorded"),
    [
        ({"metadata": {"resourceVersion": "7"}}, RecordedEvent("7", 1, "", 0)),
        (
            {
                "metadata": {"resourceVersion": "7", "annotations": {COUNTED_ANNOTATION: "a=b=12"}},
                "series": {"count": 40},
            },
            RecordedEvent("7", 40, "a=b", 12),
        ),
        (
            {"metadata": {"annotations": {COUNTED_ANNOTATION: "a=²"}}, "series": {"count": -4}},
            RecordedEvent("", 1, "a", 0),
        ),
        (
            {"metadata": {"annotations": {COUNTED_ANNOTATION: "a=" + "9" * 5000}}, "series": []},
            RecordedEvent("", 1, "a", 0),
        ),
        ({"metadata": {"annotations": ["x"]}, "series": 7}, RecordedEvent("", 1, "", 0)),
        (
            {"metadata": {"annotations": {COUNTED_ANNOTATION: "none"}}, "series": {"count": 1 << 40}},
            RecordedEvent("", 1, "", 0),
        ),
    ],
)
def test_a_damaged_event_is_read_as_far_as_possible(document: dict[str, Any], recorded: RecordedEvent) -> None:
    """Another client may have written arbitrary values into the annotation and the series."""
    assert read_recorded(document) == recorded


def test_a_patch_changes_only_series_and_annotation_of_the_version_that_was_read() -> None:
    """The API server rejects the patch if another instance has patched the Event first, and it rejects changes to any
    other field.
    """
    patch = count_patch(Observation(POD, "Reason", "note", source="c"), "7", 3, 5)
    assert patch["metadata"] == {"resourceVersion": "7", "annotations": {COUNTED_ANNOTATION: "c=5"}}
    assert patch.keys() == {"metadata", "series"}
    assert patch["series"]["count"] == 3
