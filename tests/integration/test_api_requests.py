# SPDX-License-Identifier: Apache-2.0
"""The API requests from one node, counted by the server, as documented in docs/fleet.md."""

import time
from collections import Counter

from numa_node.ticks import QUIET_SECONDS

from tests.stage.pods import StagePod, cpus, hugepages, make_claim
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage

# Requests by verb and resource. A watch is counted when it ends. There are three slices, for CPUs, memory and
# hugepages. Each driver sends a dry run of its first slice, and reads the Node that will own a slice before each write.
START = {("get", "nodes"): 6, ("list", "resourceslices"): 2, ("create", "resourceslices"): 2 + 3}
# Each driver reads the claim, and also the Node unless it has read the Node in the last ten seconds; status.devices is
# written once.
CLAIM = {("get", "resourceclaims"): 2, ("patch", "resourceclaims"): 1}
TAKE_OVER = {("get", "nodes"): 1, ("list", "resourceslices"): 2, ("get", "resourceclaims"): 1}
# The longest time between two runs of a periodic task, plus a second for its requests. After a shorter wait, the claim
# might be created before the first sweep of claims; the sweep would then read it, which is one more request.
IDLE_SECONDS = QUIET_SECONDS + 1.0


def asked(stage: Stage) -> Counter[tuple[str, str]]:
    """Returns the requests that the frontends have sent so far."""
    served = stage.api("/fake", "POST", {"served": True})["served"]
    found = Counter((one["verb"], one["resource"]) for one in served if "dra" in one["agent"])
    found.pop(("watch", "resourceslices"), None)
    return found


def settled(stage: Stage) -> Counter[tuple[str, str]]:
    """Returns the requests once no more have been sent for a while."""

    def quiet() -> Counter[tuple[str, str]] | None:
        before = asked(stage)
        time.sleep(IDLE_SECONDS)
        return before if asked(stage) == before else None

    found = wait_for("the frontend to be idle", quiet, 30)
    assert found is not None
    return found


def test_a_node_sends_few_requests(open_stage: OpenStage) -> None:
    """The driver sends requests when it starts, for each claim, and when a new pod takes over. An idle node sends
    none.
    """
    stage = open_stage(partitions=True)
    first = stage.add_ready_instance()
    start = settled(stage)
    assert dict(start) == START
    with StagePod(stage, "db") as pod:
        pod.claim = make_claim(stage, "db", [cpus(2), hugepages("4Mi")], [pod.reference])
        pod.prepare()
        pod.run()
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/db"
        wait_for("a status", lambda: stage.api(path)["status"].get("devices"), 30)
        claimed = settled(stage)
        cost = claimed - start
        assert cost.pop(("get", "nodes"), 0) <= 1
        assert dict(cost) == CLAIM
        stage.add_ready_instance()
        first.frontend.stop()
        first.backend.stop()
        wait_for("the frontend to compare the claim", lambda: (asked(stage) - claimed)["get", "resourceclaims"], 30)
        taken_over = settled(stage)
        assert dict(taken_over - claimed) == TAKE_OVER
        pod.end()
    assert settled(stage) == taken_over
