# SPDX-License-Identifier: Apache-2.0
"""The file system that is visible at a path, according to the list of mounts."""

from numa_node.mounts import mounts_over, parse_mounts

OVER = """\
24 1 0:5 / / rw - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,memory_hugetlb_accounting
31 30 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate
32 24 0:27 / /sys/fs/cg rw - cgroup2 other rw,favordynmods
"""


def test_the_last_mount_at_the_longest_mount_point_is_visible() -> None:
    """A mount point that is only a string prefix of the path does not contain the path, and a later mount hides an
    earlier one at the same point.
    """
    above = mounts_over("/sys/fs/cgroup", parse_mounts(OVER))
    assert [mount.point for mount in above] == ["/", "/sys/fs/cgroup", "/sys/fs/cgroup"]
    assert above[-1].options == {"rw", "nsdelegate"}
    assert mounts_over("/sys/fs/cgroup/a", parse_mounts("")) == []
