# SPDX-License-Identifier: Apache-2.0
"""Change notifications for claim records."""

import asyncio

from dra_frontend.claims.directory import Change
from dra_frontend.claims.store import ChangeFeed


def said(news: ChangeFeed, after: int | None) -> list[str]:
    """Returns the claims that have changed since the given generation. Fails if the response does not arrive
    immediately.
    """
    answer = news.after(after, 60.0)
    try:
        answer.send(None)
    except StopIteration as end:
        return [change.uid for change in end.value.changes]
    answer.close()
    raise AssertionError("the reader has to wait although the response is known")


def test_changes_after_a_generation_are_returned() -> None:
    """Each change has a number, and a reader that has missed several changes gets all of them in order."""
    news = ChangeFeed(10)
    for uid in "abc":
        news.publish(Change("prepared", "dra.cpu", uid))
    news.publish(Change("freed", "dra.cpu", "a"))  # The claim's record was removed earlier.
    assert said(news, 10) == ["a", "b", "c"]
    assert said(news, 12) == ["c"]
    assert said(news, None) == []


def test_a_generation_from_another_instance_gets_an_immediate_answer() -> None:
    """If the generation comes from an earlier or later frontend instance, the response contains this instance's current
    generation.
    """
    news = ChangeFeed(10)
    assert said(news, 3) == []
    assert said(news, 99) == []


def test_only_the_latest_changes_are_remembered() -> None:
    """Memory is bounded. The generation alone shows a reader that it has missed changes."""
    news = ChangeFeed(0)
    for number in range(1000):
        news.publish(Change("prepared", "dra.cpu", str(number)))
    assert said(news, 0) == [str(number) for number in range(744, 1000)]


async def test_all_waiting_readers_are_notified() -> None:
    """A single change is sent to all waiting readers. A reader that asks again waits for the next change."""
    news = ChangeFeed(0)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(news.after(0, 60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        news.publish(Change("released", "dra.memory", "u"))
    assert {task.result().generation for task in waiting} == {1}


async def test_a_wait_is_bounded() -> None:
    """If nothing changes, the same generation is returned after the timeout, or immediately on shutdown."""
    news = ChangeFeed(5)
    assert (await news.after(5, 0.01)).generation == 5
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(news.after(5, 60.0))
        await asyncio.sleep(0)
        news.close()
    assert (await waiting).changes == ()
    assert (await news.after(5, 60.0)).generation == 5
