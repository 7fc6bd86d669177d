# SPDX-License-Identifier: Apache-2.0
"""When two ResourceSlice specs mean the same, and what was lost between them. Foreign documents may hold anything."""

from collections.abc import Iterator
from typing import Any, Final

from numa_contract.errors import MalformedError

from dra_frontend.devices.quantity import parse_quantity
from dra_frontend.devices.slices import ALLOCATABLE

_QUANTITIES: Final = frozenset({"capacity", ALLOCATABLE})
"""Below these every text that is a quantity is compared by value."""


def canonical(value: Any, *, quantities: bool = False) -> Any:
    """Returns a spec, without its pool, in a form in which ``==`` means "the same for every consumer".

    Nil equals empty, quantities are compared by value, devices in order. When a taint was added is the server's to say.
    """
    if isinstance(value, dict):
        inner = {
            key: canonical(one, quantities=quantities or key in _QUANTITIES)
            for key, one in value.items()
            if key not in ("pool", "timeAdded")
        }
        return {key: one for key, one in inner.items() if one not in (None, [], {})}
    if isinstance(value, list):
        return [canonical(one, quantities=quantities) for one in value]
    if quantities and isinstance(value, str | int):
        try:
            return parse_quantity(value)
        except MalformedError:
            pass  # a key of the mapping, or a foreign hand's: it differs from what is desired, and is replaced
    return value


def differences(sent: Any, received: Any) -> tuple[str, ...]:
    """Paths of what was sent and did not come back, or came back changed; list positions are folded to ``[*]``."""
    return tuple(dict.fromkeys(_lost(canonical(sent), canonical(received), "")))


def _lost(sent: Any, received: Any, path: str) -> Iterator[str]:
    if isinstance(sent, dict) and isinstance(received, dict):
        for key, value in sent.items():
            yield from _lost(value, received.get(key), f"{path}.{key}" if path else key)
    elif isinstance(sent, list) and isinstance(received, list) and len(sent) == len(received):
        for one, other in zip(sent, received, strict=True):
            yield from _lost(one, other, f"{path}[*]")
    elif sent != received:
        yield path
