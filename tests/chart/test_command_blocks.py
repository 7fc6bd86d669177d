# SPDX-License-Identifier: Apache-2.0
"""Each command block on the installation pages is run by a test, or is marked with the reason why it is not run."""

import pytest

from tests.rigs import command_blocks as documented

NODE_PAGES = ("runtime",)
"""Pages with blocks to run on a node; tests/node/test_documented_commands.py runs them."""


@pytest.mark.parametrize("page", documented.PAGES)
def test_every_block_is_run_or_states_why_it_is_not(page: str) -> None:
    """A block in an unknown language would be skipped silently, so its language must be listed."""
    assert documented.fence_kinds(page) <= {*documented.COMMANDS, *documented.DATA}
    for block in documented.blocks(page):
        assert block.place != documented.NODE or page in NODE_PAGES, f"{block} is run by no test"


def test_a_mark_with_a_typo_is_rejected() -> None:
    """If a typo were accepted, the block would run in the wrong place, or would be skipped without a reason."""
    source = "<!-- not run -->\n```sh\nkind create cluster\n```\n"
    with pytest.raises(documented.MarkError, match=r"docs/install\.md:2"):
        documented.blocks_of("install", source)
    [block] = documented.blocks_of("install", source.replace("not run", "not run: needs docker"))
    assert (block.place, block.reason, block.text) == (documented.NOWHERE, "needs docker", "kind create cluster\n")


def test_blocks_in_lists_are_found() -> None:
    """An indented fence also begins a block. A placeholder is replaced only where it is a whole word."""
    [block] = documented.blocks_of("install", "1. So:\n\n   ```sh\n   cat NODE NODES\n   ```\n")
    assert block.script({"NODE": "node-1"}) == "cat node-1 NODES\n"
