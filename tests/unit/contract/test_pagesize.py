# SPDX-License-Identifier: Apache-2.0
"""The different spellings of page sizes."""

import pytest
from numa_contract import pagesize
from numa_contract.errors import MalformedError


@pytest.mark.parametrize(
    ("size", "short", "kubernetes", "oci", "sysfs", "mount"),
    [
        (4096, "4k", "4Ki", "4KB", "hugepages-4kB", "4K"),
        (65536, "64k", "64Ki", "64KB", "hugepages-64kB", "64K"),
        (2 << 20, "2m", "2Mi", "2MB", "hugepages-2048kB", "2M"),
        (32 << 20, "32m", "32Mi", "32MB", "hugepages-32768kB", "32M"),
        (512 << 20, "512m", "512Mi", "512MB", "hugepages-524288kB", "512M"),
        (1 << 30, "1g", "1Gi", "1GB", "hugepages-1048576kB", "1G"),
        (16 << 30, "16g", "16Gi", "16GB", "hugepages-16777216kB", "16G"),
    ],
)
def test_every_spelling_is_parsed(size: int, short: str, kubernetes: str, oci: str, sysfs: str, mount: str) -> None:
    """The driver, Kubernetes, OCI, sysfs and the mount options each spell page sizes differently."""
    assert pagesize.short_page_size(size) == short
    assert pagesize.kubernetes_page_size(size) == kubernetes
    assert pagesize.oci_page_size(size) == oci
    assert pagesize.sysfs_page_size(size) == sysfs
    assert pagesize.mount_page_size(size) == mount
    assert {pagesize.parse_page_size(text) for text in (short, kubernetes, oci, sysfs, mount)} == {size}


@pytest.mark.parametrize("text", ["", "2", "0m", "m", "2Q", "hugepages-", "-2m", "2MiB", "2 m"])
def test_invalid_page_sizes_are_rejected(text: str) -> None:
    """A size without a unit, or any other string, raises an error that quotes the string."""
    with pytest.raises(MalformedError):
        pagesize.parse_page_size(text)
