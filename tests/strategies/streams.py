# SPDX-License-Identifier: Apache-2.0
"""Byte streams in pieces, as a socket returns them."""

from hypothesis import strategies as st


def cut(data: st.DataObject, stream: bytes) -> list[bytes]:
    """Returns the stream in pieces."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
