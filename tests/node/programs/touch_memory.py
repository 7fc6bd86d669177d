# SPDX-License-Identifier: Apache-2.0
"""Runs inside a container: maps and touches memory, then prints the NUMA nodes of the pages.

touch_memory.py [--hold] SIZE:PAGES... with SIZE 4K, 2M or 1G. Prints a JSON list, one entry per mapping in order:
{"size", "pages", "error" (errno name of mmap, or null), "nodes" {node: pages}, "page_kib"}. All mappings are held at
the same time. If a page cannot be allocated when it is first touched, the kernel kills the process with SIGBUS. --hold:
keep the memory until killed.
"""

import ctypes
import errno
import json
import mmap
import re
import signal
import sys
from pathlib import Path

BYTES = {"4K": 4096, "2M": 2 << 20, "1G": 1 << 30}
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAP_HUGETLB = 0x40000
# The requested page size is encoded as its base-2 logarithm from bit 26 on (mmap(2)); without it the kernel's default
# size is used. Small pages are shared memory, since the kernel would merge a private mapping with its neighbours in
# numa_maps.
FLAGS = {
    "4K": mmap.MAP_SHARED | mmap.MAP_ANONYMOUS,
    "2M": PRIVATE | MAP_HUGETLB | 21 << 26,
    "1G": PRIVATE | MAP_HUGETLB | 30 << 26,
}


def placed(area: mmap.mmap) -> tuple[dict[str, int], int]:
    """Returns the pages by node and the page size in KiB, from the numa_maps lines that begin inside the area."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    nodes: dict[str, int] = {}
    page_kib = 0
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if not start <= int(line.split()[0], 16) < start + len(area):
            continue
        page_kib = int(line.rsplit("kernelpagesize_kB=", 1)[1].split()[0]) if "kernelpagesize_kB=" in line else page_kib
        for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
            nodes[node] = nodes.get(node, 0) + int(count)
    return nodes, page_kib


def main() -> None:
    held = []
    answers: list[dict[str, object]] = []
    hold, arguments = sys.argv[1] == "--hold", sys.argv[1:]
    for argument in arguments[hold:]:
        size, count = argument.split(":")
        answer: dict[str, object] = {"size": size, "pages": int(count), "error": None, "nodes": {}, "page_kib": 0}
        answers.append(answer)
        try:
            area = mmap.mmap(-1, int(count) * BYTES[size], flags=FLAGS[size])
        except OSError as error:
            answer["error"] = errno.errorcode.get(error.errno or 0, str(error))
            continue
        held.append(area)
        for offset in range(0, len(area), BYTES[size]):
            area[offset] = 1
        answer["nodes"], answer["page_kib"] = placed(area)
    print(json.dumps(answers), flush=True)
    if hold:
        signal.pause()


if __name__ == "__main__":
    main()
