# SPDX-License-Identifier: Apache-2.0
"""Several instances at once (a surge update), the files that they share on the node, and other CPU managers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stage.pods import claim_pod, cpus
from tests.stage.process import wait_for
from tests.stage.stage import Instance, OpenStage, Stage
from tests.stage.wires import ask_unix


def _active(stage: Stage, instance: Instance) -> bool:
    status = stage.state("/v1/backend", instance)["status"]
    return bool(status and status["active"])


def test_only_one_of_two_instances_enforces_and_the_other_takes_over(open_stage: OpenStage) -> None:
    """Both instances are ready and called by the runtime, but only the lock holder adjusts containers. When the holder
    dies, the other instance takes over.
    """
    stage = open_stage()
    old = stage.add_ready_instance()
    with claim_pod(stage, "db", cpus(4)) as pod:
        pod.prepare()
        box = pod.run()
        given = box.cpus()
        new = stage.add_instance()
        stage.wait_ready(new)
        assert (_active(stage, old), _active(stage, new)) == (True, False)
        stage.runtime("wait_plugins", count=2)
        # Creating the container would fail if two plugins set the same field.
        box.stop()
        assert pod.run().cpus() == given
        for process in old.processes:
            process.kill()
        wait_for("the standby to become active", lambda: _active(stage, new), 3.0)
        assert {cpu["cpu"] for cpu in stage.state("/v1/cpus", new) if cpu["use"] == "claimed"} == given
        wait_for("state.sock to point to the new instance", lambda: _leads_to(stage, new))
        with claim_pod(stage, "next", cpus(4)) as following:
            following.prepare()
            assert not following.run().cpus() & given


def test_no_claim_is_lost_if_all_processes_die_and_claim_files_are_removed(open_stage: OpenStage) -> None:
    """The node uses cgroupfs and an older NRI. A claim is prepared only while a backend is enforcing claims, and both
    claims are restored after their files have been removed.
    """
    stage = open_stage(cgroup_driver="cgroupfs", nri_level="0.8")
    instance = stage.add_ready_instance()
    with claim_pod(stage, "db", cpus(4)) as pod, claim_pod(stage, "next", cpus(12, numa_node=0)) as following:
        pod.prepare()
        box = pod.run()
        given = box.cpus()
        stage.kill_backend(instance)
        wait_for("the lease to expire", lambda: not stage.state("/v1/backend")["live"], 15.0)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(following.prepare)
            with pytest.raises(TimeoutError):
                waiting.result(1)
            assert len(list(stage.paths.cdi_dir.glob("*.json"))) == 1
            instance.backend.start()
            waiting.result(15)
        instance.frontend.kill()
        stage.kill_backend(instance)
        for path in stage.paths.cdi_dir.glob("*.json"):
            path.unlink()
        for process in instance.processes:
            process.start()
        stage.wait_ready_again(instance)
        wait_for("both records", lambda: len(list(stage.paths.cdi_dir.glob("*.json"))) == 2)
        assert stage.held(pod.claim_uid) == given == box.cpus()
        # The kubelet does not prepare a claim again, so the container of a lost claim could never be created.
        assert following.run().cpus() == stage.held(following.claim_uid)


def test_the_backends_lock_directory_is_private(open_stage: OpenStage) -> None:
    """Only root can enter the directory. A backend that loses the lock exits."""
    stage = open_stage()
    run = stage.paths.run_dir
    instance = stage.add_ready_instance()
    assert (run / "backend").stat().st_mode & 0o777 == 0o700
    (run / "backend/active.lock").unlink()
    assert instance.backend.wait(15) == 1
    log = instance.backend.log_file.read_text()
    assert "replaced by another instance, or removed" in log
    assert "Traceback" not in log


def test_a_static_cpu_manager_in_the_kubelet_is_reported(open_stage: OpenStage) -> None:
    """An Event and a metric report the manager, since claims conflict with the kubelet's pinning."""
    stage = open_stage(backend="")
    socket = stage.add_instance().state_socket
    lease = {"instance": "b", "generation": 1, "synchronized": True, "kubeletPins": ["cpu"], "containers": []}
    wait_for("the socket", socket.exists)
    for _ in range(3):
        ask_unix(socket, "/v1/backend", "PUT", lease)
    (event,) = wait_for("an event", lambda: stage.events("KubeletManagerStatic"))
    assert "the kubelet's static cpu manager or another NRI plugin" in event["note"]
    assert 'dra_numa_kubelet_static_manager{manager="cpu"} 1.0' in ask_unix(socket, "/metrics")


def _leads_to(stage: Stage, instance: Instance) -> bool:
    link = stage.paths.run_dir / "state.sock"
    return link.is_symlink() and link.resolve() == instance.state_socket.resolve()
