# SPDX-License-Identifier: Apache-2.0
"""The files that the driver creates on a node, from its installation to its removal, as listed in the table in
docs/effects.md.
"""

import re

from tests.stage.pods import claim_pod, cpus
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage

UID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{64}")
DIRECTORIES = {
    *("kubelet/plugins/dra.cpu", "kubelet/plugins/dra.memory"),
    *("kubelet/plugins_registry/dra.cpu", "kubelet/plugins_registry/dra.memory"),
    *("run", "run/backend"),
}
KEPT = {"run/backend/active.lock", "run/backend/takeover.lock", "run/claims.journal", "run/claims.lock"}
"""Files that stay until a reboot."""
SOCKETS = {
    *("kubelet/plugins/dra.cpu/dra-UID.sock", "kubelet/plugins/dra.memory/dra-UID.sock"),
    *("kubelet/plugins_registry/dra.cpu/reg-UID.sock", "kubelet/plugins_registry/dra.memory/reg-UID.sock"),
    *("run/UID", "run/UID/state.sock", "run/state.sock"),
}
OF_A_CLAIM = {"cdi/dra.k8s.io-cpu_claim-UID.json", "run/backend/enforcement-records/UID.json"}


def files(stage: Stage) -> set[str]:
    """Returns the paths of files and directories in the driver's directories, with each UID replaced by the word
    UID.
    """
    paths = stage.paths
    roots = {"kubelet/plugins": paths.kubelet_root / "plugins", "run": paths.run_dir, "cdi": paths.cdi_dir}
    roots["kubelet/plugins_registry"] = paths.kubelet_root / "plugins_registry"
    found = {f"{name}/{one.relative_to(root)}" for name, root in roots.items() for one in root.rglob("*")}
    found |= {name for name, root in roots.items() if root.exists()} - {"cdi", "kubelet/plugins"}
    return {UID.sub("UID", one) for one in found} - {"kubelet/plugins_registry"}


def test_files_are_created_and_removed_as_documented(open_stage: OpenStage) -> None:
    """The files are compared after the installation, while a claim exists, after the claim is gone, and after the
    driver's pod has been deleted. Each comparison waits until no temporary file is left: a file is written under a
    temporary name and then renamed. A claim's file is rewritten in the same way when a container first uses the claim.
    """
    stage = open_stage()
    instance = stage.add_ready_instance()
    installed = DIRECTORIES | KEPT | SOCKETS
    wait_for("the driver's files to exist", lambda: files(stage) == installed)
    with claim_pod(stage, "db", cpus(4)) as pod:
        pod.prepare()
        pod.run()
        wait_for("the claim's files to exist", lambda: files(stage) >= OF_A_CLAIM)
        present = {one for one in files(stage) - installed if not one.endswith(".tmp")}
        metadata = {one for one in present if "/dra-device-metadata" in one}
        assert any(one.endswith("/metadata.json") for one in metadata)
        empty = {"run/backend/enforcement-records", "kubelet/plugins/dra.cpu/dra-device-metadata"}
        expected = installed | OF_A_CLAIM | empty | metadata
        wait_for("exactly the claim's files to exist", lambda: files(stage) == expected)
    wait_for("the claim's files to be removed", lambda: files(stage) == installed | empty, 30)
    for process in instance.processes:
        process.stop()
    wait_for("the driver's files to be removed", lambda: files(stage) == DIRECTORIES | KEPT | empty)
