# SPDX-License-Identifier: Apache-2.0
"""Names that other programs read: drivers, classes, devices, CDI IDs, environment variables, paths.

Each of these names is built and parsed only here. The end of the module lists the former names of parameters and
settings, which are still accepted (ADR 34). ``replace_former_names`` replaces them before a document is validated, so
no other module needs to know them. The chart repeats the former names in ``templates/tenantpolicy.yaml`` and
``templates/_checks.tpl``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from numa_contract.errors import MalformedError, described
from numa_contract.pagesize import parse_page_size, short_page_size

CPU_DRIVER: Final = "dra.cpu"
MEMORY_DRIVER: Final = "dra.memory"
DRIVERS: Final = (CPU_DRIVER, MEMORY_DRIVER)
ClaimKey = tuple[str, str]
"""Driver and claim UID, which identify a claim file."""

CPU_CAPACITY: Final = "dra.cpu/cpu"
MEMORY_CAPACITY: Final = "size"

OVERCLAIMED_TAINTS: Final = {driver: f"{driver}/overclaimed" for driver in DRIVERS}
"""For each driver, the key of the taint on an overcommitted device; the taint's value is ``true``. A device is
overcommitted if its claims exceed the capacity that the machine still provides.
"""
ON_DEMAND_LABEL: Final = "dra-numa/hugepages-on-demand"
"""Label on claims for hugepages that may be allocated on demand; its value is ``true``."""
PROVISIONED: Final = f"{MEMORY_DRIVER}/provisioned"
NOT_PROVISIONED: Final = f"{MEMORY_DRIVER}/not-provisioned"
"""Binding condition and binding failure condition of devices with hugepages on demand (KEP-5007)."""
SHORTAGE_TAINT: Final = f"{MEMORY_DRIVER}/hugepages-unavailable"
"""Key of the taint on a device whose pages cannot be allocated; its value is ``growth-failed`` or
``helper-unavailable``.
"""
OBSERVE_ATTRIBUTES: Final = {driver: f"{driver}/observe" for driver in DRIVERS}
"""For each driver, the name of the attribute and the key of the taint that every device has on a node with
``enforcement: observe``. Both have the value true.
"""
FAULT_TAINTS: Final = {driver: f"{driver}/hardware-errors" for driver in DRIVERS}
"""For each driver, the key of the taint on a device with failing hardware; the taint's value is ``uncorrected`` or
``corrected``.
"""

NRI_PLUGIN_NAME: Final = "dra-driver-numa"
NRI_PLUGIN_INDEX: Final = "00"
TOLERATE_MISSING_ANNOTATION: Final = "dra-driver-numa/tolerate-missing"
"""Annotation on pods that may start without the plugin even if the runtime requires it."""

RUN_DIRECTORY: Final = "/run/dra-driver-numa"
CDI_DIRECTORY: Final = "/var/run/cdi"
STATE_SOCKET: Final = "state.sock"
BACKEND_DIRECTORY: Final = "backend"
"""Subdirectory of the run directory that only the backend writes to. The frontend writes everything else in the run
directory.
"""
ACTIVE_LOCK: Final = "active.lock"
CLAIMS_LOCK: Final = "claims.lock"
CLAIMS_JOURNAL: Final = "claims.journal"

METADATA_DIRECTORY: Final = "dra-device-metadata"
"""Subdirectory of a driver's plugin directory. The kubelet's helper library for drivers uses the same name."""
METADATA_MOUNTS: Final = "/var/run/kubernetes.io/dra-device-attributes"
"""Directory of metadata files in containers (KEP-5304)."""

CDI_VENDOR: Final = "dra.k8s.io"
CDI_CLASSES: Final = {CPU_DRIVER: "cpu", MEMORY_DRIVER: "memory"}
CDI_KINDS: Final = {driver: f"{CDI_VENDOR}/{name}" for driver, name in CDI_CLASSES.items()}

# Maximum length of a variable's name in characters. The prefix has at most 15, the UID 128, the request 63, and the
# item about 20.
_MAX_KEY: Final = 256
CPU_ENV_PREFIX: Final = "DRA_CPUSET_"
MEMORY_ENV_PREFIX: Final = "DRAMEMORY_"
SHARED_CPU_ENV_PREFIX: Final = "DRA_SHARED_CPUSET_"
"""Prefix of informational variables. The driver ignores them when it determines which claims a container uses."""

# A UID becomes part of a file name and of a CDI device name, which may contain letters, digits and "_-.:" (CDI
# SPEC.md).
_UID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,126}[A-Za-z0-9])?", re.ASCII)
_REQUEST = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MEMORY_ITEM = re.compile(r"(?:(.+)_)?(NUMANodes|memory|hugepages_\d{1,9}[KMGT]i)", re.ASCII)
_OBJECT = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


def check_uid(uid: str) -> str:
    """Returns the claim or pod UID if it is safe to use in a file name. Raises MalformedError otherwise."""
    if not _UID.fullmatch(uid):
        raise MalformedError("UID", uid, "must consist of at most 128 letters, digits, '-' and '.'")
    return uid


def cdi_device_name(uid: str, request: str | None) -> str:
    """Returns the name of the claim's CDI device; ``request`` is None for the claim's only request to the driver."""
    return f"claim-{check_uid(uid)}" + (f"-{request}" if request else "")


def cdi_file_name(driver: str, uid: str) -> str:
    """Returns the name of the CDI file that a driver writes for a claim."""
    return f"{CDI_VENDOR}-{CDI_CLASSES[driver]}_claim-{check_uid(uid)}.json"


_CDI_FILE = re.compile(rf"{re.escape(CDI_VENDOR)}-(cpu|memory)_claim-({_UID.pattern})\.json", re.ASCII)


def parse_cdi_file_name(name: str) -> tuple[str, str] | None:
    """Returns (driver, claim UID) for this driver's CDI files, or None for any other file."""
    match = _CDI_FILE.fullmatch(name)
    return (f"dra.{match[1]}", match[2]) if match else None


def _path_component(kind: str, text: str, form: re.Pattern[str]) -> str:
    if not form.fullmatch(text):
        raise MalformedError(kind, text, "is not a DNS name, so it cannot be part of a path")
    return text


def metadata_claim_directory(namespace: str, claim: str) -> str:
    """Returns the directory of a claim's metadata files, under METADATA_DIRECTORY. Raises MalformedError."""
    return f"{_path_component('namespace', namespace, _REQUEST)}_{_path_component('claim', claim, _OBJECT)}"


def metadata_host_path(plugins: str, driver: str, namespace: str, claim: str, request: str) -> str:
    """Returns the path of a request's metadata file on the host.

    ``plugins`` is the kubelet's plugin directory, and ``request`` the base name of the request. The kubelet's helper
    library for drivers uses the same names. Raises MalformedError for invalid object names.
    """
    directory = f"{plugins}/{driver}/{METADATA_DIRECTORY}/{metadata_claim_directory(namespace, claim)}"
    return f"{directory}/{_path_component('request', request, _REQUEST)}/metadata.json"


def metadata_mount_path(driver: str, claim: str, pod_claim_name: str | None, request: str) -> str:
    """Returns the path of a request's metadata file in a container. ``request`` is the base name.

    For a claim created from a template, the path contains the claim's name in the pod, since a pod's manifest cannot
    contain the generated name.
    """
    place = f"resourceclaims/{_path_component('claim', claim, _OBJECT)}"
    if pod_claim_name is not None:
        place = f"resourceclaimtemplates/{_path_component('claim name in the pod', pod_claim_name, _REQUEST)}"
    return f"{METADATA_MOUNTS}/{place}/{_path_component('request', request, _REQUEST)}/{driver}-metadata.json"


def memory_device_name(hugepage_bytes: int | None, numa_node: int) -> str:
    """Returns the name of the device for a NUMA node's plain memory, or for its hugepages of one size, such as
    ``hugepages-2m-numa000``.
    """
    kind = "memory" if hugepage_bytes is None else f"hugepages-{short_page_size(hugepage_bytes)}"
    return f"{kind}-numa{numa_node:03d}"


_MEMORY_DEVICE = re.compile(r"(?:memory|hugepages-(\d{1,9}[kmg]))-numa(\d{3,4})", re.ASCII)


def parse_memory_device_name(name: str) -> tuple[int | None, int]:
    """Returns the hugepage size in bytes (None for plain memory) and the NUMA node. Raises MalformedError."""
    match = _MEMORY_DEVICE.fullmatch(name)
    if match is None:
        raise MalformedError("memory device", name, "is neither memory-numa<node> nor hugepages-<size>-numa<node>")
    return parse_page_size(match[1]) if match[1] else None, int(match[2])


def memory_class_name(hugepage_bytes: int | None, *, far: bool = False) -> str:
    """Returns the name of the DeviceClass for plain memory, or for hugepages of one size, such as
    ``dra.hugepages-2m``.

    ``far`` memory, which belongs to NUMA nodes without CPUs, has its own class.
    """
    kind = "memory" if hugepage_bytes is None else f"hugepages-{short_page_size(hugepage_bytes)}"
    return f"dra.{kind}" + ("-far" if far else "")


class EnvKey(NamedTuple):
    """Claim and request, as parsed from the name of one of the driver's environment variables. The request is None if
    the claim has only one request for the driver.
    """

    driver: str
    uid: str
    request: str | None
    item: str = ""
    """Kind of value in a memory variable: ``NUMANodes``, ``memory`` or ``hugepages_2Mi``. Empty for CPUs."""


def cpu_env_key(uid: str, request: str | None) -> str:
    """Returns the name of the variable that contains the CPU list of a claim or of one of its requests."""
    return CPU_ENV_PREFIX + uid + (f"_{request}" if request else "")


def shared_cpu_env_key(uid: str, request: str | None) -> str:
    """Returns the name of the variable that contains all CPUs except the claim's own, for threads that need no
    exclusive CPU.
    """
    return SHARED_CPU_ENV_PREFIX + uid + (f"_{request}" if request else "")


def memory_env_key(uid: str, request: str | None, item: str) -> str:
    """Returns the name of the variable that contains ``item`` for a claim or for one of its requests."""
    return MEMORY_ENV_PREFIX + uid + (f"_{request}" if request else "") + f"_{item}"


def parse_env_key(key: str) -> EnvKey | None:
    """Parses the name of a variable. Returns None if it has none of the driver's prefixes.

    Raises MalformedError if the rest of the name is invalid.
    """
    if len(key) > _MAX_KEY and key.startswith((CPU_ENV_PREFIX, MEMORY_ENV_PREFIX)):
        raise MalformedError("environment variable", key, f"has more than {_MAX_KEY} characters")
    if key.startswith(CPU_ENV_PREFIX):
        uid, _, request = key.removeprefix(CPU_ENV_PREFIX).partition("_")
        parsed = EnvKey(CPU_DRIVER, uid, request or None)
    elif key.startswith(MEMORY_ENV_PREFIX):
        uid, _, tail = key.removeprefix(MEMORY_ENV_PREFIX).partition("_")
        match = _MEMORY_ITEM.fullmatch(tail)
        if not match:
            raise MalformedError(
                "environment variable", key, "does not end in _NUMANodes, _memory or _hugepages_<size>"
            )
        parsed = EnvKey(MEMORY_DRIVER, uid, match[1], match[2])
    else:
        return None
    if not _UID.fullmatch(parsed.uid) or (parsed.request is not None and not _REQUEST.fullmatch(parsed.request)):
        raise MalformedError("environment variable", key, "does not contain a valid claim UID and request name")
    return parsed


def state_socket_path(run_directory: str, pod_uid: str) -> str:
    """Returns the path of an instance's state socket. ``<run directory>/state.sock`` is a symbolic link to the active
    instance's socket.
    """
    return f"{run_directory}/{pod_uid}/{STATE_SOCKET}"


def pool_socket_path(run_directory: str) -> str:
    """Returns the path of the socket of the helper that resizes hugepage pools.

    The socket is not in the run directory, which all containers in a pod share, but in a directory next to it.
    """
    return f"{run_directory}-hugepages/pools.sock"


@dataclass(frozen=True, slots=True)
class FormerName:
    """A renamed key, a key with renamed values, or both."""

    old: str
    """The former key, or the current one if only values were renamed."""
    new: str
    """The current key."""
    words: Mapping[str | bool, str] = field(default_factory=dict)
    """Current values, keyed by former value."""
    inside: str = ""
    """If the former value is a map, the key in it whose value becomes the value of the current key; the map may
    contain no other key. Empty if the former value is not a map.
    """

    @property
    def path(self) -> str:
        """The former key as users write it, such as ``sharedPool.grow``."""
        return f"{self.old}.{self.inside}" if self.inside else self.old


FORMER_PARAMETERS: Final = (
    FormerName("isolated", "isolcpus"),
    FormerName("shared", "poolCPUs", {"pool": "all"}),
    # YAML 1.1 reads "off" as the boolean false unless it is quoted.
    FormerName("quota", "quota", {"off": "lift", False: "lift"}),
)
"""Former names of fields in ``cpuConfig``."""
FORMER_SETTINGS: Final = (
    FormerName("sharedPool", "poolGrowth", inside="grow"),
    FormerName("minSharedCPUs", "withheldCPUs"),
    FormerName("irqs", "irqs", {"leave": "keep"}),
)
"""Former names of keys in ``driverConfig``."""


@dataclass(slots=True)
class RenamedDocument:
    """A document with its former names replaced."""

    document: dict[Any, Any]
    former: dict[str, str] = field(default_factory=dict)
    """The former keys that the document contains, keyed by their current names."""
    words: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The former and current value of each key whose value was replaced, keyed by the key's current name."""
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Key and reason for each former key that cannot be replaced. Such a key is omitted from the document."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, one for each former name that was replaced."""
        keys = [f"{old}: is the former name of {new}" for new, old in self.former.items()]
        return (*keys, *(f"{key}: {old} is the former name of {new}" for key, (old, new) in self.words.items()))


def replace_former_names(document: Mapping[Any, Any], names: Iterable[FormerName]) -> RenamedDocument:
    """Returns a copy of a document in which former keys and values are replaced. A key with the value null is treated
    as absent.
    """
    present = RenamedDocument(dict(document))
    for name in names:
        value = present.document.pop(name.old, None)
        if name.inside:
            value = _inner(name, value, present)
        if value is None:
            continue
        if name.old != name.new:
            if present.document.get(name.new) is not None:
                reason = f"is the former name of {name.new}, and both are given; remove {name.path}"
                present.faults.append((name.path, reason))
                continue
            present.former[name.new] = name.path
        word = name.words.get(value) if isinstance(value, str | bool) else None
        if word is not None:
            present.words[name.new] = ("off" if value is False else str(value), word)
        present.document[name.new] = value if word is None else word
    return present


def _inner(name: FormerName, value: object, present: RenamedDocument) -> object:
    """Returns the value of the key ``name.inside`` in a former map, or None if there is no such value.

    Adds a fault to ``present`` if the former value is not a map, and for each other key in the map.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        present.faults.append((name.old, f"got {described(value)}; input should be a map"))
        return None
    present.faults += [(f"{name.old}.{key}", "unknown key") for key in value if key != name.inside]
    return value.get(name.inside)
