# SPDX-License-Identifier: Apache-2.0
"""Untrusted input cannot make a parser fail or use much CPU time. ``make fuzz`` runs more inputs."""

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import TARGETS, fuzz
from tests.fuzz.corpus import SHORT, inputs
from tests.fuzz.reduce import reduced
from tests.fuzz.target import FuzzError, Target, check
from tests.fuzz.virtual_time import run


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_input_makes_a_parser_fail(target: Target) -> None:
    """The inputs are nearly correct, or have faults in their bytes."""

    @settings(SHORT, max_examples=target.examples)
    @given(inputs(target))
    def tried(data: bytes) -> None:
        check(target, data)

    tried()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_worst_inputs_are_cheap(target: Target) -> None:
    """The worst inputs have the maximum length that the parser accepts, or exceed it."""
    for bomb in target.bombs:
        check(target, bomb)


def _fails_at_a_brace(data: bytes) -> None:
    if b"}" in data:
        raise KeyError("}")


def _is_slow(data: bytes) -> None:
    ends = time.thread_time() + len(data) / 50
    while time.thread_time() < ends:
        pass


def _hangs(_data: bytes) -> None:
    while True:
        pass


_JSON = st.just(b'{"a": [1, 2]}')


@pytest.mark.parametrize(
    ("parse", "said"), [(_fails_at_a_brace, "KeyError"), (_is_slow, "ms of CPU"), (_hangs, "more than 1.2 s of CPU")]
)
def test_a_failing_input_is_found_and_stored(
    parse: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a parser raises the wrong exception or takes too long, the run fails, and the input can be run again."""
    target = Target("faulty", parse, _JSON, milliseconds=20)  # type: ignore[arg-type]
    assert not fuzz([target], 0.0005, 1, tmp_path)
    printed = capsys.readouterr()
    assert said in printed.err
    assert "FAILED" in printed.out
    (kept, *_) = tmp_path.iterdir()
    with pytest.raises(FuzzError):
        check(target, kept.read_bytes())


def test_permitted_exceptions_are_not_failures(tmp_path: Path) -> None:
    """A parser rejects input with its own exceptions."""
    target = Target("strict", _fails_at_a_brace, _JSON, (KeyError,))
    assert fuzz([target], 0.001, 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failing_trace_is_reduced_to_the_events_that_it_needs() -> None:
    """The bytes before the first event are kept, and of the events only the two that cause the failure."""

    def parse(data: bytes) -> None:
        assert not (data[:1] == b"h" and b"b" in data[1::2].partition(b"a")[2])

    target = Target("trace", parse, _JSON, unit=2, head=1)
    assert reduced(target, b"h" + b"x1a1x2x3b4x5a6b7") == b"ha6b7"


def test_an_input_that_is_not_a_trace_is_not_reduced() -> None:
    """Half of a document would fail for a different reason."""
    assert reduced(Target("faulty", _fails_at_a_brace, _JSON), b"{}") == b"{}"


def test_a_job_without_a_delay_ends_before_its_caller_continues() -> None:
    """If a job has a delay, even one of 0 s, its caller continues first. Traces therefore take both paths through the
    backend's worker.
    """
    order: list[str] = []

    async def program() -> None:
        for name in ("at once", "later"):
            job = asyncio.get_running_loop().run_in_executor(None, order.append, f"job {name}")
            order.append(f"caller {name}")
            await job

    run(program, iter((None, 0.0)))
    assert order == ["job at once", "caller at once", "caller later", "job later"]
