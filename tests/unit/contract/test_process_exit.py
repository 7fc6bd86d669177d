# SPDX-License-Identifier: Apache-2.0
"""Library code never terminates the process."""

import re
from pathlib import Path
from typing import Final

_TESTS: Final = Path(__file__).parents[2]


def test_no_library_code_ends_the_process() -> None:
    """Only a program's entry point may exit the process. All other code returns or raises an exception."""
    ends = re.compile(r"(?<![\w.])(sys\.exit|os\._exit|os\.abort|exit|quit)\(")
    sources = [file for folder in ("services", "shared") for file in (_TESTS.parent / folder).rglob("*.py")]
    assert sources
    assert not [file for file in sources if file.name != "__main__.py" and ends.search(file.read_text())]
