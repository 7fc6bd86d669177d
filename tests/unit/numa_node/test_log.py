# SPDX-License-Identifier: Apache-2.0
"""Both containers' logs have one record per line, whatever the values contain."""

import io
import json
import logging
import shlex
from collections.abc import Iterator

import pytest
from numa_node.log import ErrorLog, RateLimitedLog, set_up_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    yield io.StringIO()
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_text_lines_are_key_value_pairs(stream: io.StringIO) -> None:
    """A line can be split into pairs. A value with spaces, quotes or line breaks stays a single value. Records
    below the configured level are not logged.
    """
    set_up_logging("info", "text", stream)
    logging.getLogger("a.b").debug("quiet")
    logging.getLogger("a.b").info("moved %d", 3, extra={"claim": "u-1", "why": 'a "b"\nc', "none": ""})
    (line,) = stream.getvalue().splitlines()
    pairs = dict(word.split("=", 1) for word in shlex.split(line))
    assert pairs.pop("time").endswith("Z")
    assert pairs == {
        "level": "info", "logger": "a.b", "msg": "moved 3", "claim": "u-1", "why": 'a "b"\\nc', "none": ""
    }  # fmt: skip


def test_text_lines_contain_no_python_notation(stream: io.StringIO) -> None:
    """A field whose value is None is omitted. Mappings, lists and Booleans are written without Python's syntax."""
    set_up_logging("info", "text", stream)
    fields = {"before": None, "memory": {"memory-numa000": 5, "b": True}, "problems": ["x", "y z"], "ready": False}
    logging.getLogger("a").info("read", extra=fields)
    logging.getLogger("a").info("read", extra={"many": {str(i): "v" * 100 for i in range(1000)}})
    first, second = stream.getvalue().splitlines()
    assert first.endswith('msg=read memory=memory-numa000:5,b:true problems="x, y z" ready=false')
    assert len(second) < 2300


def test_json_lines_are_objects(stream: io.StringIO) -> None:
    """Each line is one object, with the extra fields next to the message. An exception is part of the object."""
    set_up_logging("debug", "json", stream)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed", extra={"cpus": frozenset({1})})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["msg"], entry["level"], entry["cpus"]) == ("failed", "error", "frozenset({1})")
    assert entry["exception"].endswith("ValueError: no")


@pytest.mark.parametrize("form", ["text", "json"])
def test_values_cannot_forge_lines(stream: io.StringIO, form: str) -> None:
    """A value, message or argument that contains line breaks stays on one line and is truncated."""
    forged = "x\n2026-01-01 ERROR claim deleted, releasing its devices\r\x1b[31m" + "y" * 10_000
    set_up_logging("info", form, stream)
    logging.getLogger("a").warning("refused %s", forged, extra={"field": forged})
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue()) < 6000


def test_a_warning_is_logged_once_for_each_item(caplog: pytest.LogCaptureFixture) -> None:
    """The warning is logged again if the problem changes, or if it goes away and comes back. An unexpected exception is
    logged with its traceback.
    """
    error_log = ErrorLog(logging.getLogger("a"), KeyError)
    for error in (OSError("full"), OSError("full"), OSError("read-only")):
        error_log.log("x", "not written", error)
    for fault in (OSError("full"), None):
        with error_log.catch("y", "not written"):
            if fault is not None:
                raise fault
    error_log.log("y", "not written", OSError("full"))
    error_log.log("z", "odd", ZeroDivisionError())
    error_log.log("w", "known", KeyError("w"))
    told = [(record.__dict__["item"], record.__dict__["error"], bool(record.exc_info)) for record in caplog.records]
    assert told == [
        ("x", "full", False),
        ("x", "read-only", False),
        ("y", "full", False),
        ("y", "full", False),
        ("z", "ZeroDivisionError()", True),
        ("w", "'w'", False),
    ]


def test_the_number_of_remembered_warnings_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Memory does not grow with the number of possible problems. The oldest problem is forgotten and may be logged
    again.
    """
    error_log = ErrorLog(logging.getLogger("a"))
    for number in range(1000):
        error_log.log(number, "not written", "full")
    error_log.log(999, "not written", "full")
    error_log.log(0, "not written", "full")
    assert len(caplog.records) == 1001


def test_warnings_beyond_a_limit_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The last warning in a period says when the next warning may be logged, and that next warning contains the number
    of omitted warnings.
    """
    now = 0.0
    limited = RateLimitedLog(logging.getLogger("a"), 2, 60.0, lambda: now)
    for _ in range(1000):
        limited.warn("event", {"object": "p"})
    now = 60.0
    limited.warn("event", {"object": "q"})
    fields = [
        (one.__dict__["object"], one.__dict__.get("nextAfterSeconds"), one.__dict__.get("leftOutBefore"))
        for one in caplog.records
    ]
    assert fields == [("p", None, None), ("p", 60, None), ("q", None, 998)]
