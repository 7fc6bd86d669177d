# SPDX-License-Identifier: Apache-2.0
"""What an audit spares itself where nothing has changed."""

from collections import Counter
from pathlib import Path

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.enforcement import Node
from tests.rigs.kernel_tree import KernelTree


class CountingTree(KernelTree):
    """Counts what is read to be understood, not only compared."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = Counter[str]()

    def read(self, path: str, name: str) -> str:
        """Counts by file."""
        self.reads[name] += 1
        return super().read(path, name)


async def test_what_has_not_changed_is_compared_alone(memory: Path) -> None:
    """The kernel's files are understood once; so are limits of pods, of which a node has hundreds."""
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
