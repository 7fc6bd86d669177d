# SPDX-License-Identifier: Apache-2.0
"""What the head of an HTTP message may be like before h11 sees it.

h11 looks at its own limit only while a head is not whole. Over a run of blanks its pattern of a header's value
takes the square of its length: 7 s for 60 KB.
"""

import re
from typing import Final

MAX_HEAD_BYTES: Final = 8 << 10
_BLANKS: Final = re.compile(rb"[ \t]{64}")


def is_costly(head: bytes) -> bool:
    """Tells whether h11 must not see this, the whole or the beginning of a head."""
    return len(head) > MAX_HEAD_BYTES or _BLANKS.search(head) is not None
