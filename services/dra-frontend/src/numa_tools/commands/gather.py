# SPDX-License-Identifier: Apache-2.0
"""Packs the files for a bug report into one archive. Other commands can use the unpacked archive as a host root."""

import asyncio
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

from dra_frontend.claims.journal import Journal
from dra_frontend.devices.inventory import InventoryError
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.host_hugepages import read_pod_pages
from dra_frontend.node.host_tree import HostTree, host_path, is_this_machine
from dra_frontend.settings import Settings, open_host
from numa_contract import __version__
from numa_contract.cdi import MAX_CLAIM_FILE
from numa_contract.config import ConfigError
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, printable
from numa_contract.names import CLAIMS_JOURNAL, cdi_file_name
from numa_node.files import read_regular

from numa_tools.bundle.archive import (
    JOURNAL,
    KUBELET,
    MANIFEST,
    MAX_BYTES,
    STATE,
    ArchiveError,
    ArchiveWriter,
    extract,
)
from numa_tools.bundle.masking import Masks
from numa_tools.bundle.recording import RecordingTree
from numa_tools.commands.node_files import claim_files, read_archived, read_node
from numa_tools.doctor.facts import Facts, KubeletConfig
from numa_tools.doctor.gather import gather as read_facts
from numa_tools.doctor.kubelet_config import archived
from numa_tools.doctor.model import Unread
from numa_tools.doctor.runtime_settings import settings_report
from numa_tools.doctor.sources.kubelet import read_archived_kubelet, read_kubelet
from numa_tools.doctor.table import examine, report
from numa_tools.explain.enforced import KERNEL_FILES
from numa_tools.explain.snapshot import read_containers
from numa_tools.state_client import NoServiceError, StateClient

CONFIG: Final = "etc/dra-driver-numa/config.yaml"
_DOCUMENTS: Final = (
    "version",
    "status",
    "machine",
    "devices",
    "claims",
    "cpus",
    "memory",
    "containers",
    "backend",
    "quarantine",
)
_PAGES: Final = ("readyz", "metrics")
_RUNTIME: Final = "runtime.json"
_SETTINGS: Final = (CONFIG, KUBELET, _RUNTIME)
"""Files with settings of the node, which contain no names of pods, claims or namespaces."""


class Bundle:
    """Contents of the archive, by path on the node."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.files: dict[str, str] = {}
        self.directories: list[str] = []
        self.missing: dict[str, str] = {}
        """Files and documents that could not be read, with the reason."""

    def collect(self) -> None:
        """Reads all files and documents. Any that cannot be read are listed as missing."""
        config = self._settings.config
        # The overlay is omitted because its contents are already in the copied files. The path of the kubeconfig is
        # omitted to keep it private.
        shown = config.model_copy(update={"sysfs_overlay": "", "kubeconfig": ""})
        self.files[CONFIG] = json.dumps(shown.model_dump(mode="json", by_alias=True), indent=1)
        self._service()
        self._machine()
        self._claims()
        if is_this_machine(self._settings.host_root):
            facts = asyncio.run(read_facts(self._settings))
            self._doctor(facts)
            self._kubelet(facts.kubelet)
        else:
            self._kubelet(self._kubelet_from_files())

    def _doctor(self, facts: Facts) -> None:
        self.files["doctor.json"] = json.dumps(report(examine(facts), self._settings.node_name), indent=1)
        # Only the settings that matter to the driver are added: the runtime's files may contain registry passwords.
        if isinstance(facts.runtime, Unread):
            self.missing["runtime"] = facts.runtime.why
        else:
            self.files[_RUNTIME] = json.dumps(settings_report(facts.runtime), indent=1)

    def _kubelet(self, kubelet: KubeletConfig | Unread | None) -> None:
        """Adds the kubelet's settings, but not its files, which on k3s contain the cluster's token."""
        if isinstance(kubelet, KubeletConfig):
            self.files[KUBELET] = json.dumps(archived(kubelet), indent=1)

    def _kubelet_from_files(self) -> KubeletConfig | None:
        root, config = self._settings.host_root, self._settings.config
        return read_archived_kubelet(root) or read_kubelet(root, config.kubelet_root_dir, self._settings.node_name)

    def _service(self) -> None:
        client = StateClient(host_path(self._settings.host_root, self._settings.config.run_dir))
        for name in _DOCUMENTS:
            try:
                self.files[f"{STATE}/{name}.json"] = json.dumps(client.document(f"/v1/{name}"), indent=1)
            except NoServiceError as error:
                self.missing[f"/v1/{name}"] = str(error)
                if name == _DOCUMENTS[0]:
                    return  # reading any other document would fail after the same wait
        for name in _PAGES:
            try:
                self.files[f"{STATE}/{name}.txt"] = client.text(f"/{name}", accepted_status=503)
            except NoServiceError as error:
                self.missing[f"/{name}"] = str(error)

    def _machine(self) -> None:
        host, at = RecordingTree(open_host(self._settings)), self._settings.config.cgroup_root
        cgroups = RecordingTree(HostTree(host_path(self._settings.host_root, at)), at)
        try:
            machine = discover(host)
            read_pod_pages(cgroups, machine.page_sizes)
        except HostTreeError as error:
            self.missing["machine"] = str(error)
        for container in read_containers(json.loads(self.files.get(f"{STATE}/containers.json", "[]"))):
            for name in KERNEL_FILES if container.cgroup and container.claims else ():
                with suppress(HostTreeError):
                    cgroups.read(f"/{container.cgroup.strip('/')}/{name}")
        for tree in (host, cgroups):
            self.files.update(tree.files())
            self.directories += tree.directories()

    def _claims(self) -> None:
        config, root = self._settings.config, self._settings.host_root
        directory, view = Path(host_path(root, config.cdi_dir)), claim_files(self._settings)
        self.directories.append(config.cdi_dir)
        self.missing.update({f"{config.cdi_dir}/{name}": problem for name, problem in view.problems.items()})
        for key in view.files:
            name = cdi_file_name(*key)
            try:
                data = read_regular(str(directory / name), MAX_CLAIM_FILE)
                self.files[f"{config.cdi_dir}/{name}"] = data.decode(errors="replace")
            except OSError as error:
                self.missing[name] = str(error)
        journal = Journal(Path(host_path(root, config.run_dir), CLAIMS_JOURNAL))
        entries = journal.read()
        present = [
            {"driver": driver, "uid": uid, "namespace": namespace, "name": name}
            for (driver, uid), (namespace, name) in entries.expected.items()
        ]
        releasing = [file.record.model_dump(mode="json") for file in entries.releasing.values() if file.record]
        document = {
            "present": present,
            "releasing": releasing,
            "unlisted": entries.needs_listing,
            "problem": journal.problem,
        }
        self.files[JOURNAL] = json.dumps(document, indent=1)

    def mask(self) -> None:
        """Replaces the names in all files except the kernel's, which contain none."""
        masks = Masks()
        masks.add("node", self._settings.node_name)
        texts = {path: text for path, text in self.files.items() if not path.startswith(("/sys/", "/proc/"))}
        documents = {path: found for path, text in texts.items() if (found := _json(text)) is not None}
        masks.add_from_document(list(documents.values()))
        for text in (*texts.values(), *self.missing.values()):
            masks.add_from_text(text)
        self._add_published_names(masks)
        node_masks = Masks()
        node_masks.add("node", self._settings.node_name)
        for path, text in texts.items():
            used = node_masks if path in _SETTINGS else masks
            known = path in documents
            self.files[path] = json.dumps(used.document(documents[path]), indent=1) if known else used.text(text)
        self.missing = {masks.text(path): masks.text(why) for path, why in self.missing.items()}

    def _add_published_names(self, masks: Masks) -> None:
        """Adds the names of this node's pools and slices if the machine can be read. Messages may mention them."""
        node = self._settings.node_name
        with suppress(HostTreeError, InventoryError):
            for pool in read_node(self._settings, node, empty=True).inventory.pools:
                masks.add_pools([pool.name])
                for name in (one["metadata"]["name"] for one in slice_documents(pool, node)):
                    if pool.name not in name:  # an overlong pool name is shortened in the slice's name
                        masks.add("slice", name)

    def write(self, file: BinaryIO, *, masked: bool) -> dict[str, Any]:
        """Writes the archive, with the driver's files first, and returns its manifest. Raises OSError."""
        archive = ArchiveWriter(file)
        ordered = sorted(self.files, key=lambda path: (path.startswith("/"), path))
        left_out = [path for path in ordered if not archive.add(path, self.files[path])]
        left_out += [path for path in self.directories if not archive.add_directory(path)]
        manifest = {
            "version": __version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "masked": masked,
            "files": len(self.files),
            "missing": self.missing,
            "leftOut": left_out[:100],
        }
        archive.add(MANIFEST, json.dumps(manifest, indent=1))
        archive.close()
        return manifest


def _json(text: str) -> Any:
    """Parses a string as JSON. Returns None if that fails, as it does for a damaged claim file."""
    try:
        return parse_json(text.encode(errors="replace"), MAX_BYTES, "file", "")
    except MalformedError:
        return None


def gather(settings: Settings, output: str, *, masked: bool) -> str:
    """Writes the archive to a file with mode 0600, or to standard output (``-``), and returns a summary.

    Raises ConfigError if the file cannot be created, and OSError if writing fails.
    """
    bundle = Bundle(settings)
    bundle.collect()
    if masked:
        bundle.mask()
    if output == "-":
        manifest = bundle.write(sys.stdout.buffer, masked=masked)
        sys.stdout.buffer.flush()
    else:
        with _open_output(output) as file:
            manifest = bundle.write(file, masked=masked)
    where = "standard output" if output == "-" else output
    lines = [f"{where}: {manifest['files']} files" + (", names masked" if masked else ", with names (see --mask)")]
    lines += [f"not read: {path}: {why}" for path, why in manifest["missing"].items()]
    return "\n".join(map(printable, lines))


def _open_output(path: str) -> BinaryIO:
    """Opens a file for writing. Creates or truncates a regular file and sets its mode to 0600; leaves a device's mode
    unchanged. Raises ConfigError.
    """
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, 0)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigError(path, [f"cannot be written: {error.strerror}"]) from error
    return os.fdopen(descriptor, "wb")


@contextmanager
def unpacked(path: str) -> Iterator[Path]:
    """Unpacks an archive, unless it is already unpacked, and yields its host root. Raises ConfigError."""
    for root in (Path(path), Path(path, "node")):
        if (root / MANIFEST).is_file():
            yield root
            return
    with TemporaryDirectory(prefix="dra-driver-numa-") as into:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - errors contain the name as typed
                root = extract(file, Path(into))
        except OSError as error:
            raise ConfigError(path, [f"cannot be read: {error.strerror or error}"]) from error
        except ArchiveError as error:
            raise ConfigError(path, [str(error)]) from error
        yield root


def node_of(root: Path) -> str | None:
    """Returns the name of the node in an archive, or None if the node's service did not respond."""
    try:
        name = read_archived(root / STATE / "version.json")["node"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
