# SPDX-License-Identifier: Apache-2.0
"""JSON merge patch (RFC 7386) and strategic merge patch, which kubectl and Helm send for built-in kinds."""

from typing import Any, Final

MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"

_MERGE_KEYS: Final = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets", "resourceClaims"), "name"),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
"""The patchMergeKey of each list of objects that is merged item by item (types.go in k8s.io/api). Other lists are
replaced.
"""


def merge(old: Any, patch: Any) -> Any:
    """Returns the value with a JSON merge patch applied."""
    if not isinstance(patch, dict):
        return patch
    base = old if isinstance(old, dict) else {}
    merged = {**base, **{key: merge(base.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if patch.get(key, value) is not None}


def strategic_merge(old: Any, patch: Any) -> Any:
    """Returns the value with a strategic merge patch applied.

    The directive ``$patch: delete`` removes an item, and ``$patch: replace`` replaces an object's previous content. The
    directives for ordering and ``$retainKeys`` are ignored.
    """
    if not isinstance(patch, dict):
        return patch
    base = old if isinstance(old, dict) and patch.get("$patch") != "replace" else {}
    merged = dict(base)
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            merged[key] = _merge_items(base.get(key) or [], value, _MERGE_KEYS[key])
        else:
            merged[key] = strategic_merge(base.get(key), value)
    return merged


def _merge_items(old: list[Any], patch: list[Any], key: str) -> list[Any]:
    items = {item[key]: item for item in old}
    for change in patch:
        if change.get("$patch") == "delete":
            items.pop(change[key], None)
        else:
            items[change[key]] = strategic_merge(items.get(change[key]), change)
    return list(items.values())
