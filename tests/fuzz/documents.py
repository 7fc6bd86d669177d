# SPDX-License-Identifier: Apache-2.0
"""Nearly correct JSON documents with some unexpected values."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

# JSON that the driver would never write, keyed by the placeholder that represents it.
_RAW = {
    "@nan": "NaN",
    "@infinite": "1e999",
    "@digits": "9" * 5000,
    "@exponent": "1e-400",
    "@surrogate": r'"\ud800"',
    "@lists": "[" * 3000 + "]" * 3000,
    "@maps": '{"a":' * 3000 + "1" + "}" * 3000,
    "@twice": '{"uid": "a", "uid": "b"}',
}
_ODD: list[Any] = [
    *_RAW,
    *(None, True, False, 0, 1, -1, 1 << 31, 1 << 63, (1 << 64) - 1, 0.5, -0.0, 1e308),
    *("", " ", "0", "-1", "0-8191", "8191-0", "a" * 300, "../../etc/passwd", "ü\u2028", "\0", "\n", "1e9", "NaN"),
    *([], {}, [[]], {"": {}}, [None] * 100, [{}], "x" * 20_000, list(range(3000))),
]
odd = st.sampled_from(_ODD)
_Place = tuple[Any, Any]


def _places(document: Any) -> list[_Place]:
    found: list[_Place] = []
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        found.append((document, key))
        found += _places(document[key])
    return found


@st.composite
def spoilt(draw: st.DrawFn, documents: st.SearchStrategy[Any]) -> Any:
    """Draws a document with up to three faults: unexpected values, missing fields, renamed fields, copies."""
    whole = {"": copy.deepcopy(draw(documents))}
    for _ in range(draw(st.integers(0, 3))):
        holder, key = draw(st.sampled_from(_places(whole)))
        fault = draw(st.sampled_from(("odd", "odd", "lack", "rename", "copy")))
        if fault == "odd" or holder is whole:
            holder[key] = copy.deepcopy(draw(odd))
        elif fault == "lack":
            del holder[key]
        elif isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(holder[key])] * draw(st.sampled_from((1, 40, 300)))
        elif fault == "rename":
            holder[draw(st.sampled_from(("", "x" * 9000, "\ud800", "apiVersion", "uid")))] = holder.pop(key)
        else:
            holder |= {f"{key}{number}": holder[key] for number in range(draw(st.sampled_from((1, 40, 300))))}
    return whole[""]


def written(document: Any) -> bytes:
    """Writes a document as JSON, with placeholders replaced by the values they stand for."""
    text = json.dumps(document)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def written_inside(document: Any) -> str:
    """Writes a document as JSON that becomes a string in another document."""
    return written(document).decode()
