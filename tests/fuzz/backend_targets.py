# SPDX-License-Identifier: Apache-2.0
"""The parsers of nri-backend: for container environments, for messages from the runtime and the frontend, and for files
on the node.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from random import Random

from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from nri_backend._pb import nri_pb2 as pb
from nri_backend._pb import ttrpc_pb2
from nri_backend.claims.authorization import Claims, authorize, read_evidence
from nri_backend.frontend_link.http import TRANSIENT_ERRORS, connect
from nri_backend.node.heartbeat import Heartbeat
from nri_backend.node.preflight import PreflightError, check_controllers, check_mount
from nri_backend.nri.plugin import read_container, read_pod
from nri_backend.nri.wire import (
    PLUGIN_CONNECTION,
    RESPONSE,
    RUNTIME_CONNECTION,
    Call,
    ClientConnection,
    Demultiplexer,
    PeerError,
    ServerConnection,
    encode_call,
    encode_error,
    encode_frame,
    frame_message,
)
from nri_backend.probes import HEALTHY, answer
from numa_contract.records import Owner
from numa_contract.reports import RecordsAnswer, StateAnswer
from numa_node.mounts import parse_mounts

from tests.fuzz.contract_targets import text
from tests.fuzz.documents import spoilt, written
from tests.fuzz.target import Target
from tests.rigs.builders import cpu_record, env_of, files_of

_MIB = 1 << 20
_UID = "5f0d3a52-0000-4000-8000-00000000000a"
_RECORD = cpu_record(_UID, "a=0-3", "b=8", pods=["pod-1"])
_FILES = files_of(_RECORD)
_OURS = env_of(_RECORD)


def _evidence(data: bytes) -> None:
    evidence = read_evidence(text(data).split("\0"))
    held, _, rejection = authorize(evidence, Owner(pod_uid="pod-1", container="main"), Claims(_FILES))
    assert held.cpus <= _RECORD.cpus_of()
    assert rejection is None or len(rejection.text) < 4096


def _pieces(data: bytes) -> Iterable[bytes]:
    """Splits a stream as a socket may, at points that depend on its content."""
    random, start = Random(len(data)), 0
    while start < len(data):
        end = start + random.choice((1, 7, 8, 10, 4096, 256 << 10))
        yield data[start:end]
        start = end


def _server(data: bytes) -> None:
    connection = ServerConnection()
    for piece in _pieces(data):
        for call in connection.receive_data(piece):
            if isinstance(call, Call):
                assert connection.respond(call.stream_id, call.payload[:100])


def _client(data: bytes) -> None:
    connection = ClientConnection()
    connection.call(Call("s", "m", b""))
    answers = [answer for piece in _pieces(data) for answer in connection.receive_data(piece)]
    assert len(answers) <= 1


def _mux(data: bytes) -> None:
    demultiplexer = Demultiplexer()
    found = [item for piece in _pieces(data) for item in demultiplexer.receive_data(piece)]
    assert {connection for connection, _ in found} <= {PLUGIN_CONNECTION, RUNTIME_CONNECTION}


def _message(data: bytes) -> None:
    request = pb.CreateContainerRequest.FromString(data)
    pod, container = read_pod(request.pod), read_container(request.container)
    assert (pod.id, container.id) == (request.pod.id, request.container.id)


class _Frontend:
    """A frontend on a real socket that responds to every request with the same bytes and closes the connection."""

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="n", dir="/tmp")
        self._runner = asyncio.Runner()
        self._numbers = count()

    def ask(self, data: bytes) -> None:
        """Sends two requests on one connection, as the backend does."""
        path = Path(self._held.name, str(next(self._numbers)))
        try:
            self._runner.run(self._ask(path, data))
        finally:
            path.unlink()

    async def _ask(self, path: Path, data: bytes) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(data)
            writer.close()

        server = await asyncio.start_unix_server(serve, path)
        try:
            async with connect(str(path)) as http:
                await http.request_document(StateAnswer, "PUT", "/v1/backend", b"{}")
                await http.request_document(RecordsAnswer, "GET", "/v1/records?after=0")
        finally:
            server.close()


def _heartbeat(data: bytes) -> None:
    found = Heartbeat.decode(data)
    if found is not None:
        found.fresh(5.0)


def _mounts(data: bytes) -> None:
    mounts = parse_mounts(text(data))
    for controllers in (None, "", "cpuset memory hugetlb"):
        with contextlib.suppress(PreflightError):
            check_controllers("/sys/fs/cgroup", controllers, mounts)
    with contextlib.suppress(PreflightError):
        check_mount("/sys/fs/cgroup", mounts)


def _http(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return (head % len(body) + body) * 2


def _stream(calls: list[tuple[int, bytes]]) -> bytes:
    frames = [encode_frame(stream, 1, encode_call(Call("s", "m", payload))) for stream, payload in calls]
    return b"".join(frames)


def _answers(calls: list[tuple[int, bytes]]) -> bytes:
    return b"".join(
        encode_frame(stream, RESPONSE, ttrpc_pb2.Response(payload=payload).SerializeToString())
        if len(payload) % 2
        else encode_error(stream, len(payload), "no")
        for stream, payload in calls
    )


_calls = st.lists(st.tuples(st.sampled_from((0, 1, 1, 2, 3, 5, 7, 9, 39, (1 << 32) - 1)), st.binary(max_size=20)))
_variables = st.lists(
    st.one_of(
        st.sampled_from([*_OURS, f"DRA_CPUSET_{_UID}=0-3,8", "PATH=/bin", "DRAMEMORY_x_memory=numanode:0,size:1Gi"]),
        st.builds(
            lambda request, value: f"DRA_CPUSET_{_UID}_{request}={value}", st.text(max_size=3), st.text(max_size=9)
        ),
    )
)
_create = pb.CreateContainerRequest(
    pod=pb.PodSandbox(id="p", uid="u", namespace="ns", name="n"),
    container=pb.Container(id="c", pod_sandbox_id="p", name="n", env=_OURS, args=["x"]),
)
_create.container.linux.resources.cpu.quota.value = 5
_create.container.linux.resources.unified["memory.high"] = "max"
_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
_MOUNTS = (_MOUNT, "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpuset\n", "x y - z\n", "1 - - -\n")
_SENT = _http(b'{"instance":"i","generation":1}')
_FORGED = "\0".join(f"DRA_CPUSET_{_UID}_a{n}={n}" for n in range(30_000)).encode()
_OTHERS = "\0".join(f"DRA_CPUSET_u{n}=0-{n % 8000}" for n in range(30_000)).encode()
_ONE = b"DRA_CPUSET_%s_a=" % _UID.encode()

TARGETS = [
    Target(
        "evidence",
        _evidence,
        _variables.map(lambda entries: "\0".join(entries).encode(errors="surrogatepass")),
        milliseconds=150,
        # The API server accepts objects of 1.5 MiB.
        max_bytes=3 * _MIB // 2,
        bombs=(
            _FORGED,
            _OTHERS,
            _ONE + b"0-65535," * 190_000,
            _ONE * 20_000,
            b"DRA_CPUSET_" * 140_000,
            b"A=\0" * 500_000,
        ),
    ),
    Target(
        "ttrpc-server",
        _server,
        _calls.map(_stream),
        (PeerError,),
        # The limit allows for 100,000 empty frames. Only the runtime, which runs as root, can send them, and the pump
        # reads at most 256 KiB at a time.
        milliseconds=1000,
        max_bytes=_MIB,
        bombs=(b"\0\0\0\0\0\0\0\1\1\0" * 4000, b"\0\xff\xff\xff\0\0\0\1\1\0" + b"x" * (_MIB - 10)),
    ),
    Target(
        "ttrpc-client",
        _client,
        _calls.map(_answers),
        (PeerError,),
        milliseconds=1000,
        max_bytes=_MIB,
        bombs=(b"\0\0\0\0\0\0\0\1\2\0" * 4000,),
    ),
    Target(
        "mux",
        _mux,
        st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=50))).map(
            lambda parts: b"".join(frame_message(number, data) for number, data in parts)
        ),
        (PeerError,),
        milliseconds=1000,
        max_bytes=_MIB,
        bombs=(b"\0\0\0\1\0\0\0\1x" * 4000, b"\0\0\0\1\0\0\0\0" * 8000),
    ),
    Target("nri-message", _message, st.just(_create.SerializeToString()), (DecodeError,), bombs=(b"\x12" * 60_000,)),
    Target(
        "frontend-answer",
        _Frontend().ask,
        st.one_of(st.just(_SENT), spoilt(st.just({"instance": "i", "generation": 1})).map(written).map(_http)),
        TRANSIENT_ERRORS,
        milliseconds=500,
        max_bytes=3 << 16,
        bombs=(
            b"HTTP/1.1 200 OK\r\n" * 10_000,
            b"HTTP/1.1 200 OK\r\na: " + b"b" * 190_000,
            b"HTTP/1.1 100 x\r\n\r\n" * 9000,
        ),
    ),
    Target(
        "probe-line",
        lambda data: answer(data, {"/healthz": lambda: HEALTHY}),
        st.sampled_from((b"GET /healthz HTTP/1.1", b"HEAD /readyz?x=1 HTTP/1.0")),
        milliseconds=10,
        max_bytes=4096,
        bombs=(b"GET " + b" " * 4000, b"?" * 4096),
    ),
    Target(
        "heartbeat",
        _heartbeat,
        spoilt(st.just({"instance": "i", "at": 4.5, "serving": True})).map(written),
        milliseconds=10,
        bombs=(b"[" * 60_000,),
    ),
    Target(
        "mountinfo",
        _mounts,
        st.lists(st.sampled_from(_MOUNTS)).map(lambda lines: "".join(lines).encode()),
        # The limit is generous: a node with 500 pods has about 5,000 mounts, and the file is read only once.
        milliseconds=500,
        max_bytes=_MIB,
        bombs=(_MOUNT.encode() * 10_000, b" - " * 300_000, b"\n" * _MIB),
    ),
]
