# SPDX-License-Identifier: Apache-2.0
"""Kills for want of memory: each is told once, of the container that it happened in."""

from hypothesis import given
from hypothesis import strategies as st
from nri_backend.enforcement.memory_kills import PodKills, kill_count


def test_the_count_is_read_from_the_kernels_text() -> None:
    """oom_kill counts killed processes; oom and max, which stand beside it, count something else."""
    assert kill_count("low 0\nhigh 4\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n") == 2
    assert kill_count("low 0\nhigh 0\n") == 0
    assert kill_count("") == 0


def test_what_was_there_before_is_nobodys() -> None:
    """Kills of a pod before the first look are not told of a container that ends later."""
    pod = PodKills(total=3)
    assert pod.take(3, {"a": 0}, ended="a") == {}


def test_a_container_that_ended_gets_what_its_cgroup_cannot_tell_any_more() -> None:
    """The cgroup is gone with its last process, and the pod's count has grown by one."""
    pod = PodKills(total=0)
    assert pod.take(0, {"a": 0, "b": 0}) == {}
    assert pod.take(1, {"b": 0}, ended="a") == {"a": 1}
    assert pod.take(1, {"b": 0}, ended="b") == {}


def test_a_cgroup_that_is_gone_before_the_runtime_says_so_tells_whom_it_was() -> None:
    """The kernel's look comes first: the only one that is gone; of two, the runtime says which."""
    pod = PodKills(total=0)
    assert pod.take(0, {"a": 0, "b": 0, "c": 0, "new": None}) == {}
    assert pod.take(1, {"a": None, "b": 0, "c": 0, "new": None}) == {"a": 1}
    assert pod.take(1, {"a": None, "b": 0, "c": 0}, ended="a") == {}
    assert pod.take(2, {"b": None, "c": None}) == {}
    assert pod.take(2, {"b": None, "c": None}, ended="c") == {"c": 1}


def test_a_neighbours_kill_is_not_told_of_the_one_that_ended() -> None:
    """A container that lives on after the kill of a child shows it in its own cgroup."""
    pod = PodKills(total=0)
    assert pod.take(1, {"b": 1}, ended="a") == {"b": 1}
    assert pod.take(3, {"b": 2}, ended="c") == {"b": 1, "c": 1}


def test_a_cgroup_that_outlives_its_container_tells_nothing_twice() -> None:
    """The runtime has told the end, and a process lingers: the count that was told is not told again."""
    pod = PodKills(total=0)
    assert pod.take(1, {"a": 1, "b": 0}, ended="a") == {"a": 1}
    assert pod.take(1, {"a": 1, "b": 0}, ended="a") == {}
    assert pod.take(1, {"a": 1, "b": 0}) == {}
    assert pod.take(2, {"a": None, "b": 0}, ended="a") == {"a": 1}


def test_who_is_forgotten_stands_in_nobodys_way() -> None:
    """A container that was removed without a word is none of those that may have been killed."""
    pod = PodKills(total=0)
    assert pod.take(0, {"a": 0, "b": 0}) == {}
    assert pod.take(1, {"b": None}) == {"b": 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30))
def test_every_kill_is_told_exactly_once(steps: list[tuple[str, bool, bool]]) -> None:
    """Whatever the order of kills, looks and ends, in the end each container was told as many kills as it had."""
    pod, total = PodKills(total=0), 0
    own = dict.fromkeys("abc", 0)
    happened, told = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for name, killed, ends in steps:
        if killed:
            total, own[name], happened[name] = total + 1, own[name] + 1, happened[name] + 1
        others = {other: count for other, count in own.items() if not ends or other != name}
        for who, count in pod.take(total, others, ended=name if ends else "").items():
            told[who] += count
        if ends:
            own[name] = 0
    for who, count in pod.take(total, own).items():
        told[who] += count
    assert told == happened
