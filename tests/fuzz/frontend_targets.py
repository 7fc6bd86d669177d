# SPDX-License-Identifier: Apache-2.0
"""The parsers of dra-frontend: for claims, responses from the API server, reports from the backend, and its own
journal.
"""

import gzip
import io
import json
import tarfile
import tempfile
import zlib
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from dra_frontend.allocation.alignment import NO_OTHER_DEVICES, joins, needed_devices, read_attributes
from dra_frontend.allocation.allocate import parse_driver_claim
from dra_frontend.allocation.claim import RefusedError, count_of, parse_claim
from dra_frontend.api_server import responses
from dra_frontend.api_server.errors import KubeError
from dra_frontend.api_server.requests import Call
from dra_frontend.claims.backend import BackendView, Changes, read_state
from dra_frontend.claims.journal import SLOT_BYTES, Journal
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.events.event import COUNTED_ANNOTATION, read_recorded
from hypothesis import strategies as st
from numa_contract.config import Config, ConfigError
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from numa_contract.quantity import format_quantity, parse_quantity
from numa_contract.reports import MAX_STATE_BYTES, BackendStatus
from numa_node.runtimes.containerd import RuntimeConfigError
from numa_node.toml_text import parse_toml
from numa_tools.bundle.archive import ArchiveError, extract
from numa_tools.commands.classes import known_classes
from numa_tools.commands.manifest_files import add_manifests
from numa_tools.doctor.kubelet_command import FlagError, parse_command
from numa_tools.doctor.kubelet_config import kubelet_config
from numa_tools.doctor.runtime_settings import (
    CriDisabledError,
    containerd_settings,
    crio_settings,
    printed_settings,
)
from numa_tools.doctor.unit_files import UnitError, arguments_of, parse_environment, parse_service
from numa_tools.scheduling.allocate import Search, UndecidedError, UnschedulableError
from numa_tools.scheduling.manifests import Manifests
from numa_tools.scheduling.published import read_slices, slices_of_node
from numa_tools.scheduling.reading import ManifestError
from numa_tools.scheduling.simulation import own_devices

from tests.fakes.containerd_dump import dump
from tests.fuzz.contract_targets import text
from tests.fuzz.documents import odd, spoilt, written
from tests.fuzz.http_port import Port
from tests.fuzz.target import Target
from tests.rigs import builders as claims
from tests.rigs.containerd_files import toml_text
from tests.strategies import contract
from tests.strategies.machines import machine

_MIB = 1 << 20
_kubelet_config = {
    "cpuManagerPolicy": "static",
    "memoryManagerPolicy": "Static",
    "topologyManagerPolicy": "restricted",
    "featureGates": {"DRAConsumableCapacity": False},
    "reservedSystemCPUs": "0-1",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}],
}
_unit = (
    b'[Service]\nEnvironment="A=--config=/a b"\nEnvironmentFile=-/etc/default/kubelet\nExecStart=\n'
    b"ExecStart=@/usr/bin/kubelet kubelet $A ${B} \\\n --v=2 'x y' $$ %i\n"
)
_flags = (
    b"--feature-gates=A=true,B=false --reserved-memory 0:memory=1Gi,hugepages-2Mi=2Gi;1:memory=1Gi "
    b"--reserved_cpus 0-1 --config=/a --config-dir /b --cpu-manager-policy=static -v 2 -- --root-dir=/c"
)
_INVENTORY = build_inventory(machine(), Config(group_by="machine"), claims.NODE)
_CLASSES = known_classes(machine())
_SLICES = Call("list", "resource.k8s.io", "resourceslices")
_EVENT = Call("patch", "events.k8s.io", "events", "e", "ns")
_recorded = {
    "kind": "Event",
    "apiVersion": "events.k8s.io/v1",
    "metadata": {
        "name": "e",
        "namespace": "ns",
        "resourceVersion": "7",
        "annotations": {COUNTED_ANNOTATION: "source=3"},
    },
    "series": {"count": 3, "lastObservedTime": "2026-01-01T00:00:00.000000Z"},
    "note": "note",
}
_CLAIM = Call("get", "resource.k8s.io", "resourceclaims", "claim-u", "ns")


def _runtime_files(data: bytes) -> None:
    try:
        document = parse_toml(text(data))
    except ValueError:
        return
    for release in (None, (1, 7, 27), (2, 0, 1), (2, 1, 4), (2, 3, 0)):
        with suppress(CriDisabledError):
            containerd_settings([("/a", document), ("/b", document)], release)
    crio_settings([("/a", document), ("/b", document)], None)


def _unit_arguments(data: bytes) -> None:
    service, environment = parse_service([text(data), text(data)], "kubelet.service"), parse_environment(text(data))
    arguments_of(service, environment, "kubelet")


def _quantity(data: bytes) -> None:
    value = parse_quantity(text(data))
    assert parse_quantity(format_quantity(value)) == value


def _judged(document: Any) -> list[str]:
    """Parses and allocates a claim as Prepare does; returns the message if the claim is refused."""
    view = parse_claim(document)
    view.is_for(claims.NODE, "u")
    parsed = [
        parse_driver_claim(view, driver, _INVENTORY, Config()) for driver, results in view.results.items() if results
    ]
    for driver, result in ((driver, result) for driver, results in view.results.items() for result in results):
        count_of(driver, result)
    view.check_usable(view.claim.uid)
    needed_devices(view, _INVENTORY)
    with suppress(RefusedError):
        joins(view, _INVENTORY, NO_OTHER_DEVICES)
    return [str(one.refusal) for one in parsed]


def _claim(data: bytes) -> None:
    _judged(responses.read_object(_CLAIM, data, "ResourceClaim"))


def _parameters(data: bytes) -> None:
    parameters = parse_json(data, responses.MAX_BYTES, "parameters", "fuzzed")
    for driver, result in ((CPU_DRIVER, claims.cpus(1)), (MEMORY_DRIVER, claims.memory("1Mi"))):
        config = [claims.opaque({}, driver=driver), claims.opaque({}, driver=driver, from_class=True)]
        for entry in config:
            entry["opaque"]["parameters"] = parameters
        assert all(len(refusal) < 1024 for refusal in _judged(claims.claim("u", result, config=config)))


def _manifests(data: bytes) -> None:
    """Reads manifests and schedules their claims twice."""
    found = Manifests()
    add_manifests(found, data, "fuzzed")
    workloads = found.claim_workloads() + found.pod_workloads(found, _CLASSES)
    published = read_slices(slices_of_node(found.slices, claims.NODE))
    search = Search([*own_devices(_INVENTORY, claims.NODE), *published], _CLASSES | found.classes)
    for workload in 2 * workloads[:4]:
        with suppress(UnschedulableError, UndecidedError):
            search.allocate([claim.spec for claim in workload.claims])


def _archive(data: bytes) -> None:
    """Unpacks an archive such as one attached to a bug report."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as held:
        root = Path(held, "into")
        with suppress(OSError):
            extract(io.BytesIO(data), root)
        assert {one.name for one in Path(held).iterdir()} <= {"into"}


def _watch(data: bytes) -> None:
    for line in data.split(b"\n"):
        if line.strip():
            responses.read_event(_SLICES, line, "ResourceSlice")


def _slices(data: bytes) -> None:
    """Reads slices, and their devices' attributes as Prepare does for a claim with constraints on them."""
    found, _ = responses.read_list(_SLICES, data, "ResourceSlice")
    pools = [(str(one["spec"].get("driver")), one["spec"]["pool"]["name"]) for one in found]
    read_attributes(found, frozenset((driver, pool, "gpu-0") for driver, pool in pools))


def _event(data: bytes) -> None:
    recorded = read_recorded(responses.read_object(_EVENT, data, "Event"))
    assert recorded.occurrences > 0
    assert recorded.total >= 0


def _failure(data: bytes) -> None:
    status = responses.read_status(data)
    for code in (400, 401, 404, 409, 410, 422, 429, 500, 599):
        error = responses.response_error(_CLAIM, code, status, {"Retry-After": text(data[:30])})
        assert len(str(error)) < 4096


def _state(data: bytes) -> None:
    status, reports = read_state(data)
    view = BackendView(count().__next__)
    # An input that contains changes is based on this report's generation, unless a fault has altered the number.
    view.renew(BackendStatus(instance=status.instance, generation=1), [_report])
    before = view.containers
    for _ in range(2):
        view.renew(status, reports)
    assert view.problem.encode(errors="replace")
    if isinstance(reports, Changes):
        assert view.complete == (view.generation == status.generation > 0)
        assert view.containers is before or view.generation == status.generation > reports.since
        assert len(view.containers) <= max(reports.total, 1)


class _Journal:
    """A journal with one slot, which may contain anything. Reading it never raises an error."""

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="fuzz")
        self._path = Path(self._held.name, "journal")

    def read(self, data: bytes) -> None:
        """Reads the journal and writes its content again."""
        self._path.write_bytes(data)
        journal = Journal(self._path)
        entries = journal.read()
        journal.write(entries)
        assert not journal.problem
        assert Journal(self._path).read() == entries


def _pieces(data: bytes) -> list[bytes]:
    """Splits a stream as a socket may, at points that depend on its length."""
    size = (97, 1000, 4096, 256 << 10)[len(data) % 4]
    return [data[start : start + size] for start in range(0, len(data), size)]


def _slot(entries: list[Any]) -> bytes:
    body = b"".join(written(entry) + b"\n" for entry in entries)
    head = b"dra-driver-numa journal 1 %d %d %d" % (len(body), len(body), zlib.crc32(body, len(body)))
    return head.ljust(64) + body


def _listed(items: list[Any]) -> Any:
    return {"kind": "ResourceSliceList", "metadata": {"resourceVersion": "5"}, "items": items}


_texts = st.sampled_from(["0-3", "0-8191", "packed", "spread", "required", "claim", "strict", "/mnt/x", "0770", "pod"])
_values = st.one_of(_texts, st.booleans(), st.floats(), odd)
_FREE_FIELDS = ("quota", "irqs", "isolation", "sharing")
_CPU_FIELDS = (
    "cpuset",
    "strategy",
    "fullPhysicalCores",
    "l3",
    "numa",
    "isolcpus",
    "isolated",
    "coreType",
    *_FREE_FIELDS,
)
_MEMORY_FIELDS = ("binding", "limit", "protect", "high", "mount", "sharing")


def _opaque_configs(key: str, names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from(names), _values)
    return fields.map(lambda said: {"apiVersion": "v1alpha1", key: said})


_parameter_inputs = st.one_of(
    _opaque_configs("cpuConfig", _CPU_FIELDS), _opaque_configs("memoryConfig", _MEMORY_FIELDS)
)
_ATTRIBUTES = [
    "resource.kubernetes.io/numaNode",
    "resource.kubernetes.io/pcieRoot",
    "dra.cpu/socketID",
    "dra.cpu/nearestNumaNode",
    "x" * 9000,
]
_REQUESTS = ["cpus", "memory", "pages", "gpu", "cpus/small"]


def _constraint(attribute: str, requests: list[str]) -> dict[str, Any]:
    return {"matchAttribute": attribute, "requests": requests}


_claim_inputs = st.builds(
    lambda config, amount, constraints: (
        claims.claim(
            "u",
            claims.cpus(amount, device="cpudevmachine"),
            claims.memory(amount),
            claims.memory(amount, "pages", kind="hugepages-2m"),
            claims.result("gpu", "gpu.example.com", "gpu-0"),
            config=config,
        )
        | {"spec": {"devices": {"constraints": constraints}}}
    ),
    st.lists(st.builds(claims.opaque, st.dictionaries(st.sampled_from(_CPU_FIELDS), _values), st.just("cpus"))),
    st.sampled_from(["1", "4", "1Ki", "1.5", "1e3", "-1", "0", "9" * 400, "1e400", "1e-400", "m"]),
    st.lists(st.builds(_constraint, st.sampled_from(_ATTRIBUTES), st.lists(st.sampled_from(_REQUESTS), max_size=3))),
)
_CONFIGS: list[dict[str, Any]] = [
    *(
        {"cpuConfig": fields}
        for fields in (
            {"cpuset": "0-8191," * 1400},
            {"cpuset": ",".join(map(str, range(0, 4000, 2)))},
            {f"field{n}": n for n in range(700)},
            {"k" * 10_000: 1},
            {"strategy": json.loads("[" * 900 + "]" * 900)},
            {"l3": 10**19},
            {"quota": "keep", "strategy": "packed", "l3": "ignore"},
        )
    ),
    {f"k{n}": n for n in range(1000)},
    {"cpuConfig": {}, "k" * 10_000: 1},
]


def _full(parameters: dict[str, Any], *requests: str) -> bytes:
    """Returns a claim with as many results and configurations as the API allows, each of the maximum size."""
    entry = claims.opaque({}, *requests)
    entry["opaque"]["parameters"] |= parameters
    results = [claims.cpus(1, f"r{number}", "cpudevmachine") for number in range(32)]
    return json.dumps(claims.claim("u", *results, config=[entry] * 32)).encode()


def _manifest(kind: str, **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": "n"}, "spec": spec}


_NAMES = ("device.driver", "device", ".attributes", '["dra.cpu"]', ".numCPUs", "==", "&&", "||", "!", "(", ")", "has(")
_WORDS = ('"x"', "1", "in", "[", "]", "?", ":", "cel.bind(a, ", "quantity(", ".compareTo(", "<", "-", "/", "%", "0")
_CALLS = (".exists(a, ", ".?x", ".orValue(", "odd(", ".odd()", ".matches(", ".includes(", "{", "}", "true", "a", ",")
_CEL = st.lists(st.sampled_from([*_NAMES, *_WORDS, *_CALLS]), max_size=12).map(" ".join)
_exactly = st.fixed_dictionaries(
    {"deviceClassName": st.sampled_from(["dra.cpu", "dra.memory", "n"])},
    optional={
        "count": st.integers(-1, 40),
        "allocationMode": st.sampled_from(["All", "ExactCount"]),
        "capacity": st.sampled_from([{"requests": {"dra.cpu/cpu": "2"}}, {"requests": {"size": 1}}]),
        "selectors": st.lists(_CEL.map(lambda text: {"cel": {"expression": text}}), max_size=2),
        "tolerations": st.just([{"operator": "Exists"}]),
    },
)
_devices_spec = st.builds(
    lambda exact_requests, attribute, kind: {
        "devices": {
            "requests": [{"name": f"r{n}", "exactly": exact_request} for n, exact_request in enumerate(exact_requests)],
            "constraints": [{kind: attribute}],
        }
    },
    st.lists(_exactly, max_size=4),
    st.sampled_from(["resource.kubernetes.io/numaNode", "dra.cpu/numCPUs", "x/y"]),
    st.sampled_from(["matchAttribute", "distinctAttribute"]),
)
_NIC = {"name": "d", "nodeName": "other", "attributes": {"n": {"ints": [1, 2]}}}
_POD: dict[str, Any] = {
    "resourceClaims": [{"name": "c", "resourceClaimTemplateName": "n"}],
    "containers": [{"name": "w", "resources": {"claims": [{"name": "c"}], "limits": {"cpu": 1, "x/y": "2"}}}],
}
_manifest_inputs = st.one_of(
    _devices_spec.map(lambda spec: _manifest("ResourceClaim", **spec)),
    _devices_spec.map(lambda spec: _manifest("ResourceClaimTemplate", spec=spec)),
    _CEL.map(lambda text: _manifest("DeviceClass", selectors=[{"cel": {"expression": text}}])),
    st.just(_manifest("Pod", **_POD)),
    st.just(_manifest("Deployment", template={"spec": _POD})),
    st.just(_manifest("Odd", groups=[{"name": "a", "size": 3, "replicas": 2, "workerTemplate": {"spec": _POD}}])),
    st.just(_manifest("ResourceSlice", driver="n", pool={"name": "p"}, devices=[{"name": "d"}])),
    st.just(_manifest("ResourceSlice", driver="n", pool={"name": "q"}, nodeName=claims.NODE, devices=[_NIC])),
    st.just(_manifest("ResourceSlice", driver="n", pool={"name": "r"}, perDeviceNodeSelection=True, devices=[_NIC])),
)
_ALIASES = b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%s: &%s [%s]\n" % (bytes([c + 1]), bytes([c + 1]), b",".join([b"*" + bytes([c])] * 8)) for c in range(97, 115)
)


def _bound(step: str, steps: int, body: str) -> str:
    """Returns an expression that builds lists, each from the previous one, and evaluates ``body`` with the last one."""
    for number in range(steps, 0, -1):
        body = f"cel.bind(b{number}, {step.replace('b', f'b{number - 1}')}, {body})"
    return f"cel.bind(b0, [1, 1], {body})"


def _selecting(expression: str) -> bytes:
    exact_request = {"deviceClassName": "dra.cpu", "selectors": [{"cel": {"expression": expression}}] * 4}
    requests = [{"name": f"r{n}", "exactly": exact_request} for n in range(8)]
    return json.dumps(_manifest("ResourceClaim", devices={"requests": requests})).encode()


_KINDS = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_SPARSE)


def _tarred(name: str, kind: bytes, data: bytes, packed: bool, **pax: str) -> bytes:
    made = io.BytesIO()
    with tarfile.TarFile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.size, entry.linkname = kind, len(data), "/etc"
        entry.pax_headers = {f"GNU.sparse.{key}": value for key, value in pax.items()}
        tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(made.getvalue()) if packed else made.getvalue()


_slice = {
    "kind": "ResourceSlice",
    "metadata": {"name": "s", "uid": "u", "resourceVersion": "3"},
    "spec": {"driver": "dra.cpu", "pool": {"name": "p", "generation": 1}, "devices": []},
}
_status = {"kind": "Status", "code": 410, "reason": "Gone", "message": "too old", "details": {"name": "claim-u"}}
_report = {"id": "c", "name": "n", "podUid": "p", "podNamespace": "ns", "podName": "n", "cpus": "0-3"}
_report["claims"] = [{"uid": "u", "driver": "dra.cpu", "requests": ["r"]}]  # type: ignore[assignment]
_lease = {"instance": "i", "generation": 1, "pool": "0-7", "counters": {"a": 1}, "containers": [_report]}
_lease_with_changes = {
    "instance": "i",
    "generation": 2,
    "changes": {"since": 1, "total": 1, "removed": ["c"], "containers": [{**_report, "id": "d"}]},
}
_journalled = st.one_of(
    spoilt(st.just(["dra.cpu", "u", "ns", "claim"])),
    spoilt(contract.records().map(lambda record: {"record": record.model_dump(mode="json")})),
    spoilt(st.just({"driver": "dra.memory", "uid": "u", "cpus": "0-3", "memory": {"memory-numa000": 5}})),
)
_DEEP = b"[" * 4 * _MIB
_WIDE = b'{"kind":"ResourceSliceList","metadata":{},"items":[' + b"{}," * 100_000 + b"{}]}"
_DENSE = b'{"kind":"ResourceSliceList","metadata":{},"items":[{"a":[' + b"[]," * _MIB + b"1]}]}"
_EVENTS = b'{"type":"ADDED","object":{}}\n' * 2000
_crio_printed = {"crio": {"nri": {"enable_nri": True, "default_validator": {}}, "runtime": {"cdi_spec_dirs": ["/a"]}}}
_runtimes = spoilt(st.sampled_from([dump("1.7"), dump("2.2"), _crio_printed])).map(
    lambda document: toml_text(document).encode(errors="replace") if isinstance(document, dict) else b"x"
)

_port = Port()
_GET = b"GET / HTTP/1.1\r\nHost: localhost:1\r\n"

TARGETS = [
    Target(
        "port",
        lambda data: _port.receive(_pieces(data)),
        st.sampled_from((_GET + b"\r\n", _GET + b"A: b\r\nContent-Length: 3\r\n\r\nabc", _GET + b"host: x\r\n\r\n")),
        milliseconds=25,
        max_bytes=3 * (8 << 10),
        bombs=(
            _GET + b"A: " + b" " * 7900 + b"\0\r\n\r\n",
            _GET + b"A: " + (b"a" + b" " * 15) * 490 + b"\r\n\r\n",
            _GET + b"A: " + b"a " * 3900 + b"\r\n\r\n",
            _GET + b"a:b\r\n" * 1300 + b"\r\n",
            _GET + b"a: b\r\n" + b" c\r\n" * 1600 + b"\r\n",
            (_GET + b"\r\n") * 600,
            b"\r\n" * 8000,
        ),
    ),
    Target(
        "quantity",
        _quantity,
        st.from_regex(
            r"[+-]?[0-9]{1,20}(\.[0-9]{0,12})?([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?", fullmatch=True
        ).map(str.encode),
        (MalformedError,),
        milliseconds=30,
        bombs=(b"9" * _MIB, b"1e400", b"1e-400", b"." * _MIB, b"1" * 399 + b"x", b"0." + b"9" * 398),
    ),
    Target(
        "kubelet-configz",
        lambda data: kubelet_config(parse_json(data, responses.MAX_BYTES, "answer", "configz"), "configz"),
        spoilt(st.just(_kubelet_config)).map(written),
        (ConfigError, MalformedError),
        bombs=[json.dumps({"reservedSystemCPUs": "0," * 30_000}).encode()],
    ),
    Target(
        "runtime-output",
        lambda data: printed_settings(text(data)),
        _runtimes,
        (RuntimeConfigError,),
        milliseconds=200,
        bombs=[b"[a." * 5000, b"a = " + b"[" * 60_000],
    ),
    Target("runtime-files", _runtime_files, _runtimes, milliseconds=200, bombs=[b"[a]\nb.c = 1\n" * 5000]),
    Target(
        "kubelet-flags",
        lambda data: parse_command(text(data).split(" ")),
        st.just(_flags),
        (FlagError,),
        bombs=[b"--feature-gates=" + b"a=1," * 16_000, b"--reserved-memory=" + b"0:a=1;" * 10_000],
    ),
    Target(
        "systemd-unit",
        _unit_arguments,
        st.just(_unit),
        (UnitError,),
        milliseconds=500,
        bombs=[
            b"[Service]\nExecStart=" + b"kubelet " * 8_000,
            b"[Service]\nExecStart=kubelet " + b"$A " * 1000 + b"\nEnvironment=A=" + b"x" * 10_000,
            b"[Service]\n" + b"Environment=A=1\n" * 4_000,
        ],
    ),
    Target(
        "opaque-parameters",
        _parameters,
        st.one_of(_parameter_inputs, spoilt(_parameter_inputs)).map(written),
        (RefusedError, MalformedError),
        bombs=[json.dumps({"apiVersion": "v1alpha1", "cpuConfig": {"x" * 9000: 1, "cpuset": "0," * 5000}}).encode()],
    ),
    Target(
        "claim",
        _claim,
        spoilt(_claim_inputs).map(written),
        (RefusedError, KubeError, MalformedError),
        milliseconds=100,
        max_bytes=3 * _MIB // 2,
        bombs=[*map(_full, _CONFIGS), _full(_CONFIGS[2], *(f"r{number}" for number in range(100, 132)))],
    ),
    Target(
        "manifests",
        _manifests,
        st.lists(spoilt(_manifest_inputs), max_size=3).map(lambda found: b"\n---\n".join(map(written, found))),
        (ConfigError, ManifestError),
        # The limit is generous, because only the person who runs the command passes files to it. PyYAML reads 64 KiB of
        # the smallest tokens in this time. Hundreds of inputs of that length would take minutes, so only the bombs are
        # that long.
        milliseconds=3000,
        max_bytes=8 << 10,
        bombs=(
            _ALIASES,
            b"&a [*a]",
            b"[" * 60_000,
            b"---\n" * 15_000,
            b"- {a: b}\n" * 7000,
            b"kind: Odd\nmetadata: {name: n}\nx: " + b"{template: " * 40 + b"{spec: {containers: []}}" + b"}" * 40,
            b"kind: Odd\nmetadata: {name: n}\nx:\n" + b"- {template: {spec: {containers: []}}}\n" * 300,
            _selecting("true || " * 200 + "true"),
            _selecting("-" * 900 + "1 == 1"),
            _selecting("(" * 300 + "1" + ")" * 300),
            _selecting("[" + "1," * 400 + "1] == [2]"),
            _selecting(_bound("b + b", 30, "true")),
            _selecting(_bound("[b, b]", 30, "b30 == b30")),
            _selecting(_bound("[b, b]", 11, "b11 == b11")),
        ),
    ),
    Target(
        "archive",
        _archive,
        st.builds(
            _tarred,
            st.sampled_from(["node/manifest.json", "node/../x", "/x", "node/a", "node/a/b", "x", "node/\0"]),
            st.sampled_from(
                [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_SPARSE]
            ),
            st.binary(max_size=40),
            st.booleans(),
        ),
        (ArchiveError,),
        # The limit allows for 64 KiB of data that expand to 64 MiB of zeros.
        milliseconds=1500,
        bombs=(
            gzip.compress(b"\0" * (60 << 20)),
            _tarred("node/manifest.json", tarfile.REGTYPE, b"\0" * (40 << 20), True),
            _tarred("node/" + "x" * 60_000, tarfile.REGTYPE, b"", True),
            _tarred("node/a", tarfile.REGTYPE, b"x", True, map=f"0,1,{1 << 36},0", size=f"{1 << 36}"),
            _tarred("node/a", tarfile.REGTYPE, b"", True, map="0," * (8 << 20) + "0"),
            _tarred("node/a", tarfile.REGTYPE, b"999999999\n" + b"0\n" * (8 << 20), True, major="1", minor="0"),
        ),
    ),
    Target(
        "api-list",
        _slices,
        spoilt(st.lists(st.just(_slice), max_size=3).map(_listed)).map(written),
        (KubeError,),
        # The limit allows for a page of 4 MiB that consists of the smallest tokens. The parts that claim authors
        # control make up at most a tenth of a page.
        milliseconds=5000,
        max_bytes=responses.MAX_BYTES,
        bombs=(_DEEP, _WIDE, _DENSE, b'"' + b'\\"' * 2 * _MIB, b"{}" * 2 * _MIB),
    ),
    Target(
        "api-watch",
        _watch,
        spoilt(st.just({"type": "MODIFIED", "object": _slice})).map(written).map(lambda line: line + b"\n" + line),
        (KubeError,),
        # The limit allows for a whole stream of the maximum length. The events in a single chunk take a sixtieth of
        # this time.
        milliseconds=2500,
        max_bytes=responses.MAX_BYTES + 1,
        bombs=(_DEEP, _EVENTS, b"\n" * _MIB),
    ),
    Target(
        "api-failure",
        _failure,
        spoilt(st.just(_status)).map(written),
        max_bytes=responses.MAX_BYTES,
        bombs=(_DEEP, json.dumps({**_status, "message": "ü" * 600_000}).encode()),
    ),
    Target(
        "api-event",
        _event,
        spoilt(st.just(_recorded)).map(written),
        (KubeError,),
        max_bytes=responses.MAX_BYTES,
        milliseconds=2500,
        bombs=(_DEEP, json.dumps({**_recorded, "note": "ü" * 600_000}).encode()),
    ),
    Target(
        "backend-state",
        _state,
        spoilt(st.sampled_from((_lease, _lease_with_changes))).map(written),
        (MalformedError,),
        # Only root writes this document; 500 containers need a twentieth of the limit.
        milliseconds=2000,
        max_bytes=MAX_STATE_BYTES,
        bombs=(
            _DEEP,
            json.dumps({**_lease, "containers": [{}] * 800_000}).encode(),
            json.dumps({**_lease, "containers": [{}] * 20_000}).encode(),
            json.dumps({**_lease, "changes": {"since": 1, "total": 1, "containers": [{}] * 800_000}}).encode(),
            json.dumps({**_lease_with_changes, "changes": {"since": 1, "total": 1, "removed": [""] * 20_000}}).encode(),
        ),
    ),
    Target(
        "journal",
        _Journal().read,
        st.lists(_journalled, max_size=4).map(_slot),
        milliseconds=500,
        max_bytes=2 * SLOT_BYTES,
        bombs=(
            b"\0" * 2 * SLOT_BYTES,
            _slot([["dra.cpu", str(n), "", ""] for n in range(4000)]),
            _DEEP[: 2 * SLOT_BYTES],
        ),
    ),
]
