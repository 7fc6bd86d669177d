# SPDX-License-Identifier: Apache-2.0
"""``dra-frontend explain`` alongside the running services, as a user runs it with kubectl exec."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import captured, write_tree
from tests.stage.pods import StagePod, claim_pod, cpus, hugepages, make_claim, memory
from tests.stage.process import wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


@pytest.fixture(scope="module")
def flags(shared: Stage) -> list[str]:
    """Returns flags that point to the stage's machine, sockets and files."""
    base = shared.paths.base
    write_tree(captured("32intel64-2p8co2t+8ve"), base)
    config = base / "explain.yaml"
    below = {name: f"/{path.relative_to(base)}" for name, path in (("cgroupRoot", shared.paths.cgroup_root),)}
    config.write_text(yaml.safe_dump({**below, "kubeconfig": str(shared.paths.kubeconfig)}))
    places = ["--cdi-dir", f"/{shared.paths.cdi_dir.name}", "--run-dir", f"/{shared.paths.run_dir.name}"]
    return ["--config", str(config), "--host-root", str(base), "--node", shared.settings.node, *places]


def explain(flags: list[str], subject: str, *more: str) -> tuple[int, str, str]:
    """Returns the command's exit status, standard output and standard error."""
    command = [sys.executable, "-m", "numa_tools", *flags, "explain", subject, *more]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def document(flags: list[str], subject: str) -> tuple[int, Any]:
    """Returns the exit status and the printed JSON."""
    status, out, err = explain(flags, subject, "-o", "json")
    assert out, err
    return status, json.loads(out)


def test_a_claim_in_use_is_explained(stage: Stage, flags: list[str]) -> None:
    """The claim's resources, the reasons for them and the kind of enforcement are explained by claim, by pod, by CPU
    and by device, and no problem is reported.
    """
    with claim_pod(stage, "db", cpus(4), memory(512 << 20), hugepages(4 << 20)) as pod:
        pod.prepare()
        box = pod.run()
        name = (pod.claim or {})["metadata"]["name"]
        held = sorted(box.cpus())
        status, found = document(flags, f"default/{name}")
        assert (status, found["problems"]) == (0, [])
        given = {row["request"]: row for row in found["has"]}
        assert given["cpus"]["cpus"] == f"{held[0]}-{held[1]},{held[2]}-{held[3]}"
        why = given["cpus"]["why"]
        assert why["shape"]["wholeCores"] == 2
        assert why["text"] == "an allocation made now would choose the same CPUs"
        assert [place["verdict"] for place in why["places"]] == ["chosen"]
        assert (given["pages"]["bytes"], given["memory"]["numaNode"]) == (4 << 20, 0)
        (container,) = found["containers"]
        assert container["cpus"] == container["kernel"]["cpuset.cpus.effective"] == given["cpus"]["cpus"]
        assert document(flags, f"pod/{pod.name}")[1]["claims"][0]["claim"] == found["claim"]
        assert document(flags, str(held[0]))[1]["use"] == f"exclusive: claimed by default/{name}"
        assert document(flags, "cpudevnuma000")[1]["claims"] == {f"default/{name}": "4"}
        status, text, _ = explain(flags, pod.claim_uid)
        assert (status, f"CPUs {given['cpus']['cpus']} of cpudevnuma000" in text) == (0, True)


def test_the_rejection_of_a_second_pod_names_the_first(stage: Stage, flags: list[str]) -> None:
    """At first, the message states that the record is for another pod; later, it states that the first pod's container
    has the claim. The message does not mention forged variables.
    """
    first, second = StagePod(stage, "holder"), StagePod(stage, "second")
    claim = make_claim(stage, "both", [cpus(2)], [first.reference])
    first.claim = claim
    with first:
        first.prepare()
        first.run()
        claim = stage.api(f"{CLAIMS}/both")
        claim["status"]["reservedFor"] = [{"resource": "pods", **pod.reference} for pod in (first, second)]
        second.claim = stage.api(f"{CLAIMS}/both/status", "PUT", claim)
        second.prepare()

        def refusal() -> str:
            with pytest.raises(AnsweredError) as refused:
                second.create()
            return str(refused.value)

        text = refusal()
        assert "default/both" in text
        assert "recorded for pod default/holder and not for this pod" in text
        wait_for("the record to name both pods", lambda: "belongs to container app of pod default/holder" in refusal())
        status, found = document(flags, "pod/default/second")
        assert (status, [one["problem"] for one in found["problems"]]) == (
            1,
            ["container app of pod default/second was refused"],
        )
        states = {one["pod"]: one["state"] for one in found["claims"][0]["containers"]}
        assert states == {"default/holder": "running", "default/second": "refused"}
        stage.runtime("remove_pod", pod=second.sandbox["id"])
        second.unprepare()


def test_a_claim_that_does_not_fit_is_explained(stage: Stage, flags: list[str]) -> None:
    """Each device is listed with its shortage, and the problem has a remedy. A class that does not exist is reported as
    a different problem.
    """
    requests = [cpus(17), {"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com"}}]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "waiting", "uid": "1"}
    metadata = {"name": "greedy", "namespace": "default", "ownerReferences": [owner]}
    stage.api(CLAIMS, "POST", {"metadata": metadata, "spec": {"devices": {"requests": requests}}})
    status, found = document(flags, "claim/default/greedy")
    assert (status, found["state"]) == (1, "pending")
    assert [one["problem"] for one in found["problems"]] == [
        "a request cannot be met on any node",
        "the scheduler finds no devices",
    ]
    rows = {row["request"]: row for row in found["requests"]}
    assert rows["gpu"]["problem"] == "there is no DeviceClass gpu.example.com"
    missing = {one["device"]: one.get("missing", "") for one in rows["cpus"]["devices"]}
    assert missing["cpudevnuma001"] == "allows at most 15 of dra.cpu/cpu, 17 requested"
    status, text, _ = explain(flags, "waiting")
    assert (status, "Claim default/greedy" in text) == (1, True)
    assert "PROBLEM  the scheduler finds no devices\nWHY      request cpus: cpudevnuma000 allows at most 16 of" in text


def test_unknown_subjects_are_reported(flags: list[str]) -> None:
    """One line says where the subject was looked up. A CPU that the machine does not have is not looked up in the API
    server.
    """
    status, out, err = explain(flags, "default/missing")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "neither this node nor namespace default has a claim named missing or a pod named missing" in err
    assert explain(flags, "cpu/999") == (2, "", "dra-frontend: this machine has no cpu 999\n")
    assert explain(flags, "cpu/2-3") == (2, "", "dra-frontend: a CPU must be a single number, such as cpu/3\n")


def test_claims_in_a_masked_archive_are_explained(stage: Stage, flags: list[str], tmp_path: Path) -> None:
    """None of the archive's files contains a name from the cluster, and a claim's resources are explained as on the
    node.
    """
    with claim_pod(stage, "billing-7f9", cpus(4), hugepages(4 << 20)) as pod:
        pod.prepare()
        pod.run("ledger")
        archive = tmp_path / "a.tar.gz"
        for mask in ([], ["--mask"]):
            command = [sys.executable, "-m", "numa_tools", *flags, "gather", "-o", str(archive), *mask]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60 * PATIENCE, check=True)
            assert "not read" not in ran.stderr
            files = contents(archive)
            names = ("billing-7f9", "ledger", stage.settings.node, "default/", '"default"')
            found = {name for text in files.values() for name in names if name in text}
            assert found == (set() if mask else set(names))
        live = document(flags, pod.claim_uid)[1]
        kept = json.loads(explain([], pod.claim_uid, "--from", str(archive), "-o", "json")[1])
        masked = {"claim", "pods", "containers"}
        assert {key: kept[key] for key in kept.keys() - masked} == {key: live[key] for key in live.keys() - masked}
        assert [one["cpus"] for one in kept["containers"]] == [one["cpus"] for one in live["containers"]]
        assert [one["kernel"] for one in kept["containers"]] == [one["kernel"] for one in live["containers"]]


def contents(archive: Path) -> dict[str, str]:
    """Returns the files in an archive by their paths."""
    with tarfile.open(archive) as tar:
        files = {one.name: tar.extractfile(one) for one in tar if one.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file}
