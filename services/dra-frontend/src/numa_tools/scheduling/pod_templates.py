# SPDX-License-Identifier: Apache-2.0
"""Finds the pods that an object creates, by one rule for all kinds.

A pod template is a map that contains a list ``spec.containers`` or ``spec.resourceClaims``, under a key that is
``template`` or ends with ``Template``. The rule does not depend on the object's kind, so it covers JobSet,
LeaderWorkerSet, MPIJob, RayCluster, Kueue's Workload and others. A complete Pod inside another object is also treated
as a template. The number of pods created from a template is known if the enclosing maps contain the usual replica
fields.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from numa_tools.scheduling.reading import ManifestError

MAX_TEMPLATES: Final = 256
"""Maximum number of pod templates in one object."""
_MAX_LEVELS: Final = 64
_MAX_VALUES: Final = 100_000
_MAX_PODS: Final = 1_000_000
_UNNAMED: Final = ("spec", "template", "items")
"""Keys that do not help to tell an object's templates apart."""


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A pod specification inside an object."""

    part: str
    """Name that distinguishes this template from the object's other templates, such as the name of a replica group."""
    spec: Mapping[str, Any]
    pods: int
    """Number of pods that run at the same time, or 1 if the object does not specify it."""


@dataclass(frozen=True, slots=True)
class _Place:
    value: Any
    key: str
    part: str
    pods: int
    level: int


def pod_templates(document: Mapping[str, Any]) -> list[PodTemplate]:
    """Returns an object's pod templates in order.

    Raises ManifestError if the object is too large or nested too deeply.
    """
    found: list[PodTemplate] = []
    waiting = [_Place(document, "", "", 1, 0)]
    for _ in range(_MAX_VALUES):
        if not waiting:
            return found
        place = waiting.pop()
        spec = _pod_spec(place)
        if spec is None:
            waiting += reversed(list(_below(place)))
            continue
        found.append(PodTemplate(place.part, spec, place.pods))
        if len(found) > MAX_TEMPLATES:
            raise ManifestError(f"has more than {MAX_TEMPLATES} pod templates")
    raise ManifestError(f"has more than {_MAX_VALUES} values")


def _pod_spec(place: _Place) -> Mapping[str, Any] | None:
    if not isinstance(place.value, dict) or not (place.key.endswith(("template", "Template")) or _is_pod(place)):
        return None
    spec = place.value.get("spec")
    if not isinstance(spec, dict):
        return None
    return spec if any(isinstance(spec.get(key), list) for key in ("containers", "resourceClaims")) else None


def _is_pod(place: _Place) -> bool:
    return place.level > 0 and place.value.get("kind") == "Pod"


def _below(place: _Place) -> Iterator[_Place]:
    """Yields the maps and lists directly inside a map or list. Raises ManifestError if they are nested too deeply."""
    inner: list[tuple[str, str, Any]] = []
    if isinstance(place.value, dict):
        inner = [(str(key), "" if str(key) in _UNNAMED else str(key), one) for key, one in place.value.items()]
    elif isinstance(place.value, list):
        inner = [(place.key, _name(one), one) for one in place.value]
    for key, part, one in inner:
        if not isinstance(one, dict | list):
            continue
        if place.level == _MAX_LEVELS:
            raise ManifestError(f"is nested more than {_MAX_LEVELS} levels deep")
        pods = min(place.pods * _replicas(place.value, key), _MAX_PODS)
        yield _Place(one, key if isinstance(place.value, dict) else "", part or place.part, pods, place.level + 1)


def _name(entry: Any) -> str:
    if not isinstance(entry, dict):
        return ""
    metadata = entry.get("metadata")
    inner = metadata.get("name") if isinstance(metadata, dict) else None
    names = (entry.get("name"), entry.get("groupName"), inner)
    return next((name for name in names if isinstance(name, str)), "")


def _replicas(place: Any, key: str) -> int:
    """Returns the number of replicas that a map requests for the pod template under one of its keys."""
    if not isinstance(place, dict):
        return 1
    # The replica counts of a Job or replica group apply only to the template that it contains.
    if "template" in key.lower():
        times = _count(place, "replicas") * _count(place, "count")
        together = _count(place, "parallelism")
        if isinstance(place.get("completions"), int):
            together = min(together, _count(place, "completions"))
        return times * together * _of_group(place, key)
    return 1


def _of_group(place: Mapping[str, Any], key: str) -> int:
    """Returns the number of pods that a template contributes to each LeaderWorkerSet group: one pod is the leader, and
    the rest are workers.
    """
    if key != "workerTemplate" or "size" not in place:
        return 1
    return max(1, _count(place, "size") - ("leaderTemplate" in place))


def _count(place: Mapping[str, Any], key: str) -> int:
    found = place.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= _MAX_PODS else 1
