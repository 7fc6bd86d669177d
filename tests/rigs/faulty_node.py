# SPDX-License-Identifier: Apache-2.0
"""A healthy node on which a test can cause a fault in the files, the sockets, the API server or the service."""

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.journal import Journal, JournalEntries
from dra_frontend.claims.store import ChangeFeed, ClaimStore
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.machine.discovery import discover
from dra_frontend.node.host_tree import BOOT_ID, HostTree
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.node.sockets import listen_unix
from dra_frontend.publishing.offer import Offer, Snapshot, snapshot
from dra_frontend.settings import Settings
from dra_frontend.state_endpoint.application import state_application
from dra_frontend.state_endpoint.server import STATE_SOCKET, HttpServer
from numa_contract import __version__
from numa_contract.config import Config, parse_config
from numa_contract.names import CLAIMS_JOURNAL, CPU_DRIVER, DRIVERS
from numa_contract.records import AllocationRecord, ClaimReference
from numa_contract.reports import BackendStatus
from numa_contract.state.status import Notice, StatusCode
from numa_tools.doctor.facts import Facts

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import CLAIMS, CLASSES, NODES, SLICES
from tests.rigs.builders import NODE, cpu_record, files_of, report, write_claim
from tests.rigs.trees import small_machine, write_tree

POD = "pod-uid"
_ALL = "cpuset cpu memory hugetlb\n"
_USED = f"total={112 << 21} N0={56 << 21} N1={56 << 21}\n"
_HOST = {
    "/proc/sys/kernel/osrelease": "6.12.9-amd64\n",
    "/proc/sys/fs/file-nr": "3000\t0\t1000000\n",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro quiet\n",
    "/proc/self/mountinfo": "30 23 0:26 / CGROUP rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
    "/proc/irq/24/smp_affinity_list": "0-7\n",
    "/proc/irq/24/effective_affinity_list": "0\n",
    "/proc/irq/24/eth0/none": "",
    "/sys/devices/system/cpu/possible": "0-7\n",
    "/sys/devices/system/cpu/nohz_full": "(null)\n",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "/sys/devices/virtual/workqueue/cpumask": "f3\n",
    "/etc/containerd/config.toml": 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n',
}
_CGROUPS = {
    "cgroup.controllers": _ALL,
    "cgroup.subtree_control": _ALL,
    "kubepods.slice/cgroup.subtree_control": _ALL,
    "kubepods.slice/cgroup.kill": "",
    "kubepods.slice/cpuset.cpus.exclusive": "\n",
    "kubepods.slice/hugetlb.2MB.numa_stat": _USED,
    "kubepods.slice/hugetlb.1GB.numa_stat": "total=0 N0=0 N1=0\n",
    "system.slice/cgroup.events": "populated 1\nfrozen 0\n",
    "system.slice/cpuset.cpus.effective": "0-1,4-7\n",
}
_VALIDATOR: dict[str, Any] = {
    "enable": True,
    "required_plugins": ["dra-driver-numa"],
    "tolerate_missing_plugins_annotation": "dra-driver-numa/tolerate-missing",
}


class FaultyNode:
    """The node. A test changes it and then runs the checks with the settings that :meth:`up` yields. CPU 0 is reserved;
    a container runs on the claimed CPUs 2-3.
    """

    def __init__(self) -> None:
        # Socket paths must be short, so this directory is not inside pytest's. Like /run on a node, it is in memory if
        # possible.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"
        self.base = Path(tempfile.mkdtemp(prefix="dn-", dir=memory))
        self.root, self.kubelet_root = self.base / "host", self.base / "kubelet"
        write_tree(small_machine(), self.root)
        for path, text in _HOST.items():
            self.host(path, text.replace("CGROUP", str(self.base / "cgroup")))
        # The boot id tells the driver that the host root belongs to the running machine. If a directory does not exist
        # under the host root, the driver then uses the path without the host root, as it does in its pod.
        self.host(BOOT_ID, Path(BOOT_ID).read_text())
        for path, text in _CGROUPS.items():
            self.cgroup(path, text)
        self.run, self.cdi = self.base / "run", self.base / "cdi"
        (self.run / POD).mkdir(parents=True)
        self.run.chmod(0o700)
        self.cdi.mkdir()
        (self.run / "state.sock").symlink_to(f"{POD}/state.sock")
        self.settings_of: dict[str, Any] = {"reservedCPUs": "0"}
        self.kubelet_of: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "reservedSystemCPUs": "0",
        }
        command = f"/usr/bin/kubelet --config={self.kubelet_root}/config.yaml"
        self.host("/usr/lib/systemd/system/kubelet.service", f"[Service]\nExecStart={command}\n")
        self.nri: dict[str, Any] = {"default_validator": dict(_VALIDATOR)}
        self.cri: dict[str, Any] = {"cdi_spec_dirs": [str(self.cdi)]}
        self.status: dict[str, Any] = {
            "instance": "b",
            "software": __version__,
            "active": True,
            "synchronized": True,
            "generation": 1,
            "requestTimeout": 2.0,
            "registrationTimeout": 5.0,
        }
        self.reserve: int | None = None
        """Bytes of memory that the service has read from the Node as the kubelet's reserve."""
        self.problems: list[str] = []
        self.warned: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.sockets: list[socket.socket] = []
        self.serving = True
        self.edit: Callable[[Facts], Facts] = lambda facts: facts
        self.server = ApiServer()
        self._fill_server()
        self.listen(self.kubelet_root / "plugins_registry/dra.cpu/reg.sock")
        self.listen(self.kubelet_root / "plugins_registry/dra.memory/reg.sock")
        self.records = [self.claimed("work", "2-3")]
        self.containers = [self.container("work")]

    def host(self, path: str, text: str) -> None:
        """Writes a file on the host."""
        _write(self.root / path[1:], text)

    def cgroup(self, path: str, text: str) -> None:
        """Writes a file in the cgroup tree."""
        _write(self.base / "cgroup" / path, text)

    def listen(self, path: Path) -> None:
        """Starts listening on a socket."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sockets.append(socket.socket(socket.AF_UNIX))
        self.sockets[-1].bind(os.fspath(path))
        self.sockets[-1].listen()

    def claimed(self, name: str, cpus: str) -> AllocationRecord:
        """Creates a claim in the API server and returns a record in which the claim has these CPUs."""
        uid = self.server.store.create(CLAIMS, "ns", {"metadata": {"name": name}, "spec": {}})["metadata"]["uid"]
        reference = ClaimReference(uid=uid, namespace="ns", name=name)
        record, device = cpu_record(uid, f"r={cpus}"), {"device": "cpudevnuma000"}
        parts = tuple(one.model_copy(update=device) for one in record.cpus)
        results = tuple(one.model_copy(update={**device, "pool": NODE}) for one in record.results)
        return record.model_copy(update={"claim": reference, "cpus": parts, "results": results})

    def container(self, name: str, **more: Any) -> dict[str, Any]:
        """Returns the backend's report about a container that uses the named claim, which must have a record."""
        uid = next(one.claim.uid for one in self.records if one.claim.name == name)
        uses = [{"uid": uid, "driver": CPU_DRIVER, "requests": ["r"]}]
        known = {"claims": uses, "cpus": "2-3", "exclusivity": "partition", "cgroup": "kubepods.slice/x"}
        return report(name, **(known | more)).model_dump(mode="json", by_alias=True)

    def note_in_journal(self, name: str) -> None:
        """Writes a journal that contains a prepared claim without a claim file."""
        entry = (CPU_DRIVER, f"uid-{name}"), ("ns", name)
        Journal(self.run / CLAIMS_JOURNAL).write(JournalEntries(expected=dict([entry])))

    def close(self) -> None:
        """Closes the sockets and removes the node's directory."""
        for one in self.sockets:
            one.close()
        shutil.rmtree(self.base)

    def _fill_server(self) -> None:
        store = self.server.store
        info = {"kubeletVersion": "v1.36.1", "containerRuntimeVersion": "containerd://2.1.4"}
        sizes = {"memory": "8Gi", "hugepages-2Mi": "1Gi", "hugepages-1Gi": "1Gi"}
        self.node: dict[str, Any] = {"nodeInfo": info, "conditions": [{"type": "Ready", "status": "True"}]}
        self.node |= {"capacity": {"cpu": "8", **sizes}, "allocatable": {"cpu": "7", "memory": "6Gi"}}
        self.node_uid = store.create(NODES, "", {"metadata": {"name": NODE}})["metadata"]["uid"]
        for name in ("dra.cpu", "dra.memory", "dra.hugepages-2m", "dra.hugepages-1g"):
            store.create(CLASSES, "", {"metadata": {"name": name}, "spec": {}})
        inventory = build_inventory(discover(HostTree(self.root)), Config(reserved_cpus=frozenset({0})), NODE)
        for pool in inventory.pools:
            for document in slice_documents(pool, NODE):
                document["metadata"]["ownerReferences"] = [{"kind": "Node", "name": NODE, "uid": self.node_uid}]
                store.create(SLICES, "", document)

    def change_slices(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes every slice as another client would."""
        for document in list(self.server.store.select(SLICES)):
            change(document)
            name = document["metadata"]["name"]
            self.server.store.update(SLICES, "", name, document)

    def settings(self) -> Settings:
        """Returns the settings that the command would be started with."""
        paths = {"cdiDir": self.cdi, "runDir": self.run, "kubeletRootDir": self.kubelet_root}
        paths |= {"cgroupRoot": self.base / "cgroup", "kubeconfig": self.base / "kubeconfig"}
        config = parse_config({key: str(path) for key, path in paths.items()} | self.settings_of, "test")
        return Settings(config, NODE, POD, str(self.root), None)

    @asynccontextmanager
    async def up(self) -> AsyncGenerator[Settings, None]:
        """Writes all changes, starts serving, and yields the settings."""
        drop_in = {"io.containerd.nri.v1.nri": self.nri, "io.containerd.cri.v1.runtime": self.cri}
        self.host("/etc/containerd/conf.d/50-numa.toml", _toml(drop_in))
        if self.kubelet_of:
            _write(self.kubelet_root / "config.yaml", json.dumps(self.kubelet_of))
        for record in self.records:
            write_claim(self.cdi, record)
        settings = self.settings()
        async with self.server as server:
            server.write_kubeconfig(self.base / "kubeconfig")
            node = self.server.store.get(NODES, "", NODE) if list(self.server.store.select(NODES)) else None
            if node is not None:
                self.server.store.update(NODES, "", NODE, {**node, "status": self.node}, "status")
            if not self.serving:
                yield settings
                return
            listening, placed = listen_unix(self.run / POD / "state.sock")
            service = HttpServer(state_application(cast("Any", self._source(settings))), STATE_SOCKET, listening)
            await service.start()
            try:
                yield settings
            finally:
                await service.end()
                placed.remove()

    def _source(self, settings: Settings) -> SimpleNamespace:
        """Returns the data that the endpoint shows."""
        ledger = Ledger(files_of(*self.records))
        trees = HostTree(self.root), HostTree(self.base / "cgroup")
        watch = MachineWatch(*trees, settings.config, NODE, lambda: ledger, reserve=lambda: self.reserve)
        backend = BackendView(asyncio.get_running_loop().time, settings.config)
        if self.status:
            backend.renew(BackendStatus.model_validate(self.status), self.containers)
        offer = Offer(NODE, {driver: HealthBoard() for driver in DRIVERS}, {})
        offer.snapshot = snapshot(watch.inventory, ledger, Snapshot())
        store = SimpleNamespace(ledger=ledger, quarantined=self.quarantined, change_feed=ChangeFeed(100))
        return SimpleNamespace(
            node=NODE,
            instance=f"{POD}/1",
            watch=watch,
            offer=offer,
            backend=backend,
            store=cast("ClaimStore", store),
            handle_report=lambda: None,
            update_readiness=lambda: [_notice(StatusCode.NOT_REGISTERED, text, unready=True) for text in self.problems],
            warnings=lambda: [_notice(StatusCode.SLICE_FIELDS_DROPPED, text) for text in self.warned],
            metrics=lambda: b"",
        )


def _notice(code: StatusCode, text: str, *, unready: bool = False) -> Notice:
    return Notice(code=code, text=text, unready=unready)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _toml(plugins: dict[str, Any]) -> str:
    lines = []
    # containerd 1.7 would replace the section in config.toml with an empty one.
    for plugin, section in ((plugin, section) for plugin, section in plugins.items() if section):
        tables = {f'plugins."{plugin}"': {k: v for k, v in section.items() if not isinstance(v, dict)}}
        tables |= {f'plugins."{plugin}".{k}': v for k, v in section.items() if isinstance(v, dict)}
        for name, table in tables.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])
