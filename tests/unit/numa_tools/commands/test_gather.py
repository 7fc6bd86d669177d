# SPDX-License-Identifier: Apache-2.0
"""With an archive as their host root, commands show the same output as on the node."""

import asyncio
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.devices.model import Pool
from dra_frontend.devices.slices import slice_documents
from numa_tools import cli
from numa_tools.commands.gather import gather

from tests.rigs.builders import NODE, cpu_record, report, write_claim
from tests.rigs.faulty_node import FaultyNode
from tests.rigs.trees import NAMES, captured, small_machine, write_tree

UID = "11111111-2222-3333-4444-555555555555"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Runs a command and returns its exit status and standard output."""
    status = cli.main(list(arguments))
    return status, capsys.readouterr().out


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Returns the small machine with a claim and without a running service."""
    root = write_tree(small_machine(), tmp_path / "host")
    (root / "var/run/cdi").mkdir(parents=True)
    record = cpu_record(UID, "cpus=1-2", pods=("billing-7f9",))
    of = {"device": "cpudevnuma000"}
    results = [
        part.model_copy(update={**of, "pool": "worker-1-former", "consumed": {"dra.cpu/cpu": "2"}})
        for part in record.results
    ]
    parts = [part.model_copy(update=of) for part in record.cpus]
    claim = record.claim.model_copy(update={"namespace": "accounts", "name": "card"})
    write_claim(
        root / "var/run/cdi",
        record.model_copy(update={"results": tuple(results), "cpus": tuple(parts), "claim": claim}),
    )
    return root


def contents(archive: Path) -> dict[str, str]:
    """Returns the contents of the files in an archive, keyed by path."""
    with tarfile.open(archive) as tar:
        files = {one.name: tar.extractfile(one) for one in tar if one.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file}


def unpack(tar: tarfile.TarFile, into: Path) -> None:
    """Unpacks one of this project's archives as ``tar`` would. Does not call extractall(), because the tarfile module's
    extraction filters require Python 3.11.4.
    """
    for one in tar:
        content = tar.extractfile(one)
        (into / one.name if content is None else (into / one.name).parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            (into / one.name).write_bytes(content.read())


@pytest.mark.parametrize("name", [*NAMES, "/"])
def test_inspecting_an_archive_shows_the_same_as_inspecting_its_machine(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output from the archive equals the output from the directory, both for captured machines and for the machine
    that runs this test.
    """
    root = name if name == "/" else str(write_tree(captured(name), tmp_path / "host"))
    archive, unpacked = tmp_path / "a.tar.gz", tmp_path / "unpacked"
    before = run(capsys, "inspect", "--host-root", root, "-o", "json")
    assert run(capsys, "gather", "--host-root", root, "-o", str(archive))[0] == 0
    with tarfile.open(archive) as tar:
        unpack(tar, unpacked)
        # The doctor can check only the running machine.
        assert ("node/doctor.json" in tar.getnames()) == (name == "/")
    for source in (["--from", str(archive)], ["--from", str(unpacked)], ["--host-root", str(unpacked / "node")]):
        assert run(capsys, "inspect", *source, "-o", "json") == before


def test_claims_and_configuration_are_in_the_archive(
    host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Explaining or simulating a claim from the archive gives the same result as on the node."""
    config, archive, wanted = tmp_path / "config.yaml", tmp_path / "a.tar.gz", tmp_path / "c.yaml"
    config.write_text('reservedCPUs: "0"\n')
    wanted.write_text(yaml.safe_dump(_claim()))
    there = ["--host-root", str(host), "--config", str(config)]
    assert run(capsys, "gather", *there, "-o", str(archive))[0] == 0
    assert archive.stat().st_mode & 0o777 == 0o600
    for command in (["explain", "accounts/card", "-o", "json"], ["explain", "1"], ["simulate", "--claim", str(wanted)]):
        live = run(capsys, *command, *there)
        assert live[0] in (0, 1)
        kept = run(capsys, *command, "--from", str(archive))
        assert (kept[0], _same(kept[1])) == (live[0], _same(live[1]))
    assert run(capsys, "explain", "--from", str(archive), "cpu0")[1].startswith("CPU 0: reserved")
    assert run(capsys, "explain", "--from", str(archive), "accounts/other")[0] == 2


def _claim() -> dict[str, Any]:
    request = {"name": "r", "exactly": {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": 2}}}}
    return {"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}}


def _same(text: str) -> str:
    """Removes the lines that contain the socket's path."""
    return "\n".join(line for line in text.split("\n") if "state.sock" not in line)


def test_a_masked_archive_contains_no_name(host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The claim, with its CPUs, can be found by its mask. Without masking, all names are present."""
    names = ("billing-7f9", "accounts", "card", "worker-1")
    archive = tmp_path / "a.tar.gz"
    there = ["--host-root", str(host), "--node", "worker-1", "--hostname-override", "worker-1"]
    assert run(capsys, *there, "gather", "-o", str(archive))[0] == 0
    whole = "".join(contents(archive).values())
    assert all(name in whole for name in names)
    assert run(capsys, *there, "gather", "--mask", "-o", str(archive))[0] == 0
    masked = contents(archive)
    assert [(name, path) for path, text in masked.items() for name in names if name in text + path] == []
    assert json.loads(masked["node/manifest.json"])["masked"] is True
    found = json.loads(run(capsys, "explain", "--from", str(archive), UID, "-o", "json")[1])
    assert (found["claim"], found["has"][0]["cpus"]) == ("namespace-1/claim-1", "1-2")


@pytest.mark.parametrize("name", ["var", "0", "1-2", "cdi", "v1alpha1", UID])
def test_a_masked_archive_can_be_read_whatever_the_names(
    host: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any tenant can give a pod a name that also occurs in paths or settings, or that is a CPU list."""
    [file] = (host / "var/run/cdi").iterdir()
    file.write_text(file.read_text().replace("billing-7f9", name))
    config, archive = tmp_path / "config.yaml", tmp_path / "a.tar.gz"
    config.write_text('reservedCPUs: "0"\n')
    there = ["--host-root", str(host), "--config", str(config)]
    assert run(capsys, "gather", *there, "--mask", "-o", str(archive))[0] == 0
    found = json.loads(run(capsys, "explain", "--from", str(archive), UID, "-o", "json")[1])
    assert (found["claim"], found["has"][0]["cpus"]) == ("namespace-1/claim-1", "1-2")
    assert json.loads(contents(archive)["node/etc/dra-driver-numa/config.yaml"])["reservedCPUs"] == "0"


@pytest.fixture
def node() -> Iterator[FaultyNode]:
    """Returns a node with a service and an API server."""
    made = FaultyNode()
    yield made
    made.close()


async def test_the_archive_contains_the_memory_reserve_that_the_node_used(
    node: FaultyNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file on the node contains the reserve. It comes from the kubelet's Node object, which the service has read."""
    node.reserve = 1 << 30
    archive = str(tmp_path / "a.tar.gz")
    async with node.up() as settings:
        await asyncio.to_thread(gather, settings, archive, masked=False)
    shown = json.loads(run(capsys, "inspect", "--from", archive, "-o", "json")[1])
    assert shown["reserved"]["memory"]["source"] == "kubelet"
    assert sum(shown["reserved"]["memory"]["bytes"].values()) == 1 << 30
    node.reserve = None
    async with node.up() as settings:
        await asyncio.to_thread(gather, settings, archive, masked=False)
    assert (
        json.loads(run(capsys, "inspect", "--from", archive, "-o", "json")[1])["reserved"]["memory"]["source"]
        == "default"
    )


@pytest.mark.parametrize("serving", [True, False])
@pytest.mark.parametrize("name", [NODE, "n" * 240])
async def test_masked_pools_and_slices_do_not_contain_the_nodes_name(
    name: str, serving: bool, node: FaultyNode, tmp_path: Path
) -> None:
    """Messages contain the names of pools and slices, even while the service is down, and a slice's name may be too
    long to contain the node's full name.
    """
    node.serving = serving
    node.settings_of["reservedMemory"] = [{"numaNode": number, "limits": {"memory": "900Gi"}} for number in (0, 1)]
    (published,) = slice_documents(Pool("dra.cpu", name, ()), name)
    node.problems.append(f'"{published["metadata"]["name"]}" is forbidden')
    node.problems.append(f"pool {name}-memory is not written")
    node.change_slices(lambda document: document["metadata"]["ownerReferences"][0].update(uid="former"))
    async with node.up() as settings:
        settings = replace(settings, node_name=name)
        for masked in (False, True):
            await asyncio.to_thread(gather, settings, str(tmp_path / str(masked)), masked=masked)
    whole, masked_text = ("".join(contents(tmp_path / str(masked)).values()) for masked in (False, True))
    assert ("00000-dra.cpu-n" in whole) == (serving or name == NODE)
    assert (f"pool {name}-memory is not written" in whole) == serving
    assert ("pool node-1-memory is not written" in masked_text) == serving
    assert name[:200] not in masked_text


async def test_problem_subjects_are_masked(node: FaultyNode, tmp_path: Path) -> None:
    """The status contains the container and the claim that a problem is about."""
    names = {"podNamespace": "secret-namespace", "podName": "secret-pod", "name": "secret-container"}
    node.containers.append(report("r", "unknown", refused="no CPU is free", **names).model_dump(mode="json"))
    async with node.up() as settings:
        for masked in (False, True):
            await asyncio.to_thread(gather, settings, str(tmp_path / str(masked)), masked=masked)
    subject = "secret-namespace/secret-pod/secret-container"
    whole, masked_text = ("".join(contents(tmp_path / str(masked)).values()) for masked in (False, True))
    assert (subject in whole, "secret-" in masked_text) == (True, False)


def test_only_its_owner_can_read_the_archive(host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the archive replaces a longer, world-readable file, it is still readable only by its owner. A path that is not
    a regular file is left as it is.
    """
    archive, fifo = tmp_path / "a.tar.gz", tmp_path / "fifo"
    archive.write_bytes(b"x" * (4 << 20))
    archive.chmod(0o644)
    assert run(capsys, "gather", "--host-root", str(host), "-o", str(archive))[0] == 0
    assert archive.stat().st_mode & 0o777 == 0o600
    assert "node/manifest.json" in contents(archive)
    assert archive.stat().st_size < 1 << 20
    os.mkfifo(fifo)
    fifo.chmod(0o644)
    # Opening a FIFO for reading and writing does not block. The command does not block either, because the FIFO has a
    # reader and the archive fits into its buffer.
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    assert run(capsys, "gather", "--host-root", str(host), "-o", str(fifo))[0] == 0
    os.close(reader)
    assert fifo.stat().st_mode & 0o777 == 0o644


def test_the_archive_contains_no_secrets(
    host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive contains no environment variables, credentials, link targets or other drivers' CDI files."""
    monkeypatch.setenv("API_TOKEN", "s3cret")
    (tmp_path / "token").write_text("s3cret")
    (host / "var/run/cdi" / f"dra.k8s.io-memory_claim-{UID}.json").symlink_to(tmp_path / "token")
    (host / "var/run/cdi" / "vendor.json").write_text("s3cret")
    archive = tmp_path / "a.tar.gz"
    there = ["--host-root", str(host), "--kubeconfig", str(tmp_path / "s3cret.kubeconfig")]
    assert run(capsys, *there, "gather", "-o", str(archive))[0] == 0
    files = contents(archive)
    assert [path for path, text in files.items() if "s3cret" in path + text] == []
    assert "is not a regular file" in files["node/manifest.json"]


def test_an_archive_is_written_to_stdout(short_root: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A container may have neither a writable path nor tar. Errors are reported on standard error."""
    host = write_tree(small_machine(), short_root / "host")
    assert cli.main(["gather", "--host-root", str(host), "-o", "-"]) == 0
    printed = capfdbinary.readouterr()
    archive = short_root / "a.tar.gz"
    archive.write_bytes(printed.out)
    assert "node/manifest.json" in contents(archive)
    assert printed.err.count(b"not read: ") == 1
    assert b"no such socket; the service is not running here" in printed.err


def deep(path: Path) -> None:
    """Creates an archive with directories nested so deeply that the extracted tree could not be removed."""
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo("node" + "/a" * 300)
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.write_text("x"), "is not an archive"),
        (lambda _: None, "cannot be read"),
        (deep, "a path with more than 64 components"),
    ],
)
def test_the_exit_status_for_an_invalid_archive_is_2(
    make: Any,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single line names the file, and no extracted file remains."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make(tmp_path / "a")
    assert cli.main(["inspect", "--from", str(tmp_path / "a")]) == 2
    assert text in capsys.readouterr().err
    assert {one.name for one in tmp_path.iterdir()} <= {"a"}
    assert cli.main(["gather", "-o", str(tmp_path / "none" / "a")]) == 2
    assert "cannot be written" in capsys.readouterr().err
