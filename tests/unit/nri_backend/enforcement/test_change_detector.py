# SPDX-License-Identifier: Apache-2.0
"""An audit skips cgroups whose files and desired contents have not changed."""

from collections import Counter
from pathlib import Path

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.enforcement import Node
from tests.rigs.kernel_tree import KernelTree


class CountingTree(KernelTree):
    """Counts the files that are read and parsed. Files that are only compared do not count."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = Counter[str]()

    def read(self, path: str, name: str) -> str:
        """Counts the read under the name of the file."""
        self.reads[name] += 1
        return super().read(path, name)


async def test_files_that_have_not_changed_are_compared_but_not_parsed_again(memory: Path) -> None:
    """This includes the limits of pods, of which a node has hundreds. A changed file is repaired."""
    node = Node(memory, tree=CountingTree)
    tree = node.kernel
    assert isinstance(tree, CountingTree)
    await node.enforcer.activate()
    env = node.claim(cpu_record("c1", "cpus=2-3")) + node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    claim = await node.run("claim", *env)
    above = claim.rpartition("/")[0]
    await node.enforcer._auditor.audit(full=True)
    tree.reads.clear()
    await node.enforcer._auditor.audit(full=True)
    assert set(tree.reads) <= {"memory.events"}
    for path in (claim, above):
        node.kernel.set(path, "hugetlb.2MB.max", "0")
    await node.enforcer._auditor.audit(full=True)
    assert [node.kernel.get(path, "hugetlb.2MB.max") for path in (claim, above)] == [str(64 * MI)] * 2
