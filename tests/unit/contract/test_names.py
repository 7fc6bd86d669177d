# SPDX-License-Identifier: Apache-2.0
"""Names that must never change because other programs read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract import names
from numa_contract.errors import MalformedError

from tests.strategies.contract import requests, uids

UID = "6f1b0c5e-0000-4000-8000-000000000001"
METADATA = "/var/run/kubernetes.io/dra-device-attributes"


@pytest.mark.parametrize(
    ("built", "name"),
    [
        (names.cdi_device_name(UID, None), f"claim-{UID}"),
        (names.cdi_device_name(UID, "big"), f"claim-{UID}-big"),
        (names.CDI_KINDS["dra.memory"], "dra.k8s.io/memory"),
        (names.cdi_file_name("dra.cpu", UID), f"dra.k8s.io-cpu_claim-{UID}.json"),
        (names.cpu_env_key(UID, None), f"DRA_CPUSET_{UID}"),
        (names.cpu_env_key(UID, "a"), f"DRA_CPUSET_{UID}_a"),
        (names.memory_env_key(UID, None, "NUMANodes"), f"DRAMEMORY_{UID}_NUMANodes"),
        (names.memory_env_key(UID, "r", "hugepages_2Mi"), f"DRAMEMORY_{UID}_r_hugepages_2Mi"),
        (names.memory_class_name(None), "dra.memory"),
        (names.memory_class_name(2 << 20), "dra.hugepages-2m"),
        (names.memory_class_name(512 << 20, far=True), "dra.hugepages-512m-far"),
        (names.state_socket_path("/run/dra-driver-numa", UID), f"/run/dra-driver-numa/{UID}/state.sock"),
        (
            names.metadata_host_path("/var/lib/kubelet/plugins", "dra.cpu", "ns", "my.claim", "cpus"),
            "/var/lib/kubelet/plugins/dra.cpu/dra-device-metadata/ns_my.claim/cpus/metadata.json",
        ),
        (
            names.metadata_mount_path("dra.cpu", "my.claim", None, "cpus"),
            f"{METADATA}/resourceclaims/my.claim/cpus/dra.cpu-metadata.json",
        ),
        (
            names.metadata_mount_path("dra.cpu", "pod-cpu-x7k2p", "cpu", "cpus"),
            f"{METADATA}/resourceclaimtemplates/cpu/cpus/dra.cpu-metadata.json",
        ),
    ],
)
def test_names_are_those_of_the_contract(built: str, name: str) -> None:
    """Manifests, launchers, workloads (KEP-5304) and the kubelet's checkpoint depend on these exact strings."""
    assert built == name


@given(st.none() | st.sampled_from([64 << 10, 2 << 20, 32 << 20, 1 << 30, 16 << 30]), st.integers(0, 4095))
def test_a_memory_devices_name_contains_its_properties(hugepage_bytes: int | None, node: int) -> None:
    """The driver must be able to determine a device's properties even after the device has disappeared."""
    name = names.memory_device_name(hugepage_bytes, node)
    assert names.parse_memory_device_name(name) == (hugepage_bytes, node)
    for other in (f"{name}x", f"x{name}", name.replace("numa", "node"), name.replace("-numa", "-2q-numa")):
        with pytest.raises(MalformedError):
            names.parse_memory_device_name(other)


@given(
    st.lists(st.text(max_size=8) | st.sampled_from(["..", ".", "a/b", "", "-", "A"]) | requests, min_size=3, max_size=3)
)
def test_metadata_paths_never_escape(parts: list[str]) -> None:
    """Whatever the names, the result is either a path with exactly the expected components or no path at all."""
    try:
        host = names.metadata_host_path("/p", "dra.cpu", *parts)
        mounted = names.metadata_mount_path("dra.cpu", *parts)
    except MalformedError:
        return
    assert [len(path.split("/")) for path in (host, mounted)] == [7, 9]
    assert not {"", ".", ".."} & {*host.split("/")[1:], *mounted.split("/")[1:]}


@given(st.sampled_from(names.DRIVERS), uids)
def test_claim_file_names_can_be_parsed(driver: str, uid: str) -> None:
    """The driver recognizes its own files by name, and ignores temporary files and other vendors' files."""
    assert names.parse_cdi_file_name(names.cdi_file_name(driver, uid)) == (driver, uid)
    for other in ("dra.memory.json", "dra.k8s.io-cpu_claim-x.json.tmp", "nvidia.json", "x", ""):
        assert names.parse_cdi_file_name(other) is None


@given(
    uids,
    st.none() | requests | st.sampled_from(["memory", "hugepages", "numanodes"]),
    st.sampled_from(["NUMANodes", "memory", "hugepages_2Mi", "hugepages_16Gi"]),
)
def test_variable_names_can_be_parsed(uid: str, request: str | None, item: str) -> None:
    """The driver, claim, request and item survive the conversion to a variable name and back, whatever the request is
    called.
    """
    assert names.parse_env_key(names.cpu_env_key(uid, request)) == names.EnvKey("dra.cpu", uid, request)
    expected = names.EnvKey("dra.memory", uid, request, item)
    assert names.parse_env_key(names.memory_env_key(uid, request, item)) == expected


@pytest.mark.parametrize(
    "key", ["DRA_CPUSET_", f"DRA_CPUSET_{UID}_A/B", f"DRAMEMORY_{UID}", "DRA_CPUSET_../x", f"DRA_CPUSET_{'x' * 300}"]
)
def test_a_malformed_variable_is_an_error(key: str) -> None:
    """A variable with the driver's prefix and invalid content is rejected, not ignored; other variables are not
    examined.
    """
    with pytest.raises(MalformedError, match="environment variable"):
        names.parse_env_key(key)
    for other in ("PATH", "DRA_CPU", "MY_DRA_CPUSET_x", ""):
        assert names.parse_env_key(other) is None


@pytest.mark.parametrize("uid", ["", "../x", "a/b", "a b", "-a", "x" * 129])
def test_a_uid_cannot_leave_the_directory(uid: str) -> None:
    """A UID becomes part of a path, so a UID that contains path elements is rejected."""
    with pytest.raises(MalformedError):
        names.cdi_file_name("dra.cpu", uid)


@pytest.mark.parametrize("name", [f"memory-numa{'1' * 5000}", f"hugepages-{'1' * 5000}m-numa000", "memory-numa00001"])
def test_device_names_with_too_many_digits_are_rejected(name: str) -> None:
    """Any client that may write a claim's status controls the device name, and Python raises an unrelated error for
    numbers with more than 4,300 digits.
    """
    with pytest.raises(MalformedError):
        names.parse_memory_device_name(name)
