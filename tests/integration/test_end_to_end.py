# SPDX-License-Identifier: Apache-2.0
"""Both services with all stand-ins, each a process of its own: what a claim and the other containers get."""

import pytest

from tests.stage.pods import Box, StagePod, claim_pod, cpu_set, cpus, delete_claim, hugepages, make_claim, memory
from tests.stage.process import wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

ALL = set(range(32))
NODE_0 = {*range(8), *range(16, 24)}
MIB = 1 << 20


def test_a_claim_becomes_a_pinned_container(stage: Stage) -> None:
    """The container of a claim has the claim's CPUs, the memory of their node and the claimed hugepages, no more."""
    with claim_pod(stage, "db", cpus(4), memory(512 * MIB), hugepages(4 * MIB)) as pod:
        pod.prepare()
        claimed = stage.held(pod.claim_uid)
        assert len(claimed) == 4
        assert claimed < NODE_0
        assert {cpu % 16 for cpu in claimed} == {min(claimed), min(claimed) + 1}, "two whole cores"
        box = pod.run()
        assert cpu_set(box.env[f"DRA_CPUSET_{pod.claim_uid}"]) == claimed
        assert cpu_set(box.described["cpus"]) == box.cpus() == claimed
        assert box.read("cpuset.mems.effective") == "0"
        for place in (box.directory, box.directory.parent):
            assert (place / "hugetlb.2MB.max").read_text().strip() == str(4 * MIB)
            assert (place / "hugetlb.2MB.rsvd.max").read_text().strip() == str(4 * MIB)
        pages = next(one for one in stage.state("/v1/memory") if one["device"] == "hugepages-2m-numa000")
        assert pages["claimedBytes"] == 4 * MIB
    assert not list(stage.paths.cdi_dir.glob("*.json"))


def test_a_plain_container_makes_way_and_comes_back(stage: Stage) -> None:
    """Others are off the claimed CPUs before the claim's container is created, and get them back after unprepare."""
    with StagePod(stage, "web") as web, claim_pod(stage, "db", cpus(6)) as db:
        plain = web.run()
        before = plain.cpus()
        assert before == ALL
        db.prepare()
        claimed = stage.held(db.claim_uid)
        created = db.create()
        # At this moment the runtime has the answer to CreateContainer, and nobody waits for anything.
        assert not plain.cpus() & claimed
        created.start()
        late = web.run("late")
        assert late.cpus() == plain.cpus() == before - claimed
        db.end()
        plain.comes_to(before)
        late.comes_to(before)


def test_a_claim_passes_from_one_pod_to_the_next(stage: Stage) -> None:
    """The kubelet is silent when the next pod uses a prepared claim: refused once, then the claim was read again."""
    first, second = StagePod(stage, "first"), StagePod(stage, "second")
    with first:
        first.claim = make_claim(stage, "heirloom", [cpus(2)], [first.reference])
        first.prepare()
        given = first.run().cpus()
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/heirloom"
        claim = stage.api(path)
        claim["status"]["reservedFor"] = [{"resource": "pods", **second.reference}]
        second.claim = stage.api(f"{path}/status", "PUT", claim)
        second.prepare()
        stage.runtime("remove_pod", pod=first.sandbox["id"])
        first.sandbox = {}
        first.unprepare()
        first.claim = None
    with second:

        def starts() -> Box | None:
            try:
                return second.create()
            except AnsweredError:
                return None

        box = wait_for("the claim to pass on", starts)
        assert box is not None
        box.start()
        assert box.cpus() == given == stage.held(second.claim_uid)


def test_unprepare_under_a_living_container_keeps_its_cpus_held(stage: Stage) -> None:
    """CPUs on which a process may still run go into no other hand, pool included, until it is gone."""
    with StagePod(stage, "web") as web, claim_pod(stage, "old", cpus(16, numa_node=0)) as old:
        plain = web.run()
        old.prepare()
        box = old.run()
        given = box.cpus()
        old.unprepare()
        delete_claim(stage, "old-claim")
        old.claim = None
        with claim_pod(stage, "new", cpus(16, numa_node=0)) as new:
            with pytest.raises(AnsweredError, match=r"CPU"):
                new.prepare()
            assert box.cpus() == given
            assert not plain.cpus() & given
            box.remove()
            wait_for("the CPUs to be free", lambda: all(c["use"] == "shared" for c in stage.state("/v1/cpus")))
            new.prepare()
            assert stage.held(new.claim_uid) == given
        plain.comes_to(ALL)


@pytest.mark.fault("protocol trap 4.10")
def test_a_kubelet_that_restarts_finds_everything_as_it_was(stage: Stage) -> None:
    """After its restart the kubelet prepares every claim again: the same devices, no second allocation."""
    with claim_pod(stage, "db", cpus(4), memory(MIB)) as pod:
        pod.prepare()
        box = pod.run()
        given, ids = box.cpus(), list(pod.cdi_ids)
        stage.kubelet("restart")
        stage.api("/apis/resource.k8s.io/v1/resourceslices", "DELETE")
        stage.wait_registered()
        pod.prepare()
        assert sorted(pod.cdi_ids) == sorted(ids)
        assert stage.held(pod.claim_uid) == box.cpus() == given
        wait_for("the slices", lambda: len(stage.slices()) == 3)
