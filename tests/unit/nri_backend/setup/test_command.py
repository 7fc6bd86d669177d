# SPDX-License-Identifier: Apache-2.0
"""The ``setup-runtime`` command, run as a process with a dump on its standard input."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nri_backend.setup.command import _INPUT_SECONDS, _MAX_BYTES, build_parser
from nri_backend.setup.containerd import Change, write_drop_in
from numa_node.runtimes.containerd import Dump

from tests.fakes.containerd_dump import NRI, Document, dump

Ran = subprocess.CompletedProcess[str]


def text_of(document: Document) -> str:
    """Returns a dump as containerd prints it."""
    settings = [Change((plugin,), section, None) for plugin, section in document["plugins"].items()]
    return f"version = {document['version']}\n" + write_drop_in(Dump(3, {}, ()), settings)


def run(*arguments: object, dumped: str | None = "", path: Path = Path("/nonexistent")) -> Ran:
    """Runs the command with a dump on its standard input, or with an idle terminal if the dump is None."""
    command = [sys.executable, "-m", "nri_backend", "setup-runtime", *map(str, arguments)]
    ours, terminal = os.openpty()
    given: Any = {"stdin": terminal} if dumped is None else {"input": dumped}
    try:
        environment = os.environ | {"PATH": str(path)}
        return subprocess.run(
            command, **given, capture_output=True, text=True, timeout=20, check=False, env=environment
        )
    finally:
        os.close(ours)
        os.close(terminal)


def test_the_drop_in_is_written_to_stdout_and_missing_keys_to_stderr() -> None:
    """The exit status is 1 if a key is missing, and otherwise 0."""
    ran = run(dumped=text_of(dump("2.2")))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "nri-backend setup-runtime: nothing is missing\n")
    ran = run(dumped=text_of(dump("2.1", {"disable": True})))
    assert tomllib.loads(ran.stdout) == {"plugins": {NRI: {"disable": False}}}
    assert ran.stderr == f'nri-backend setup-runtime: [plugins."{NRI}"] disable is true, must be false\n'
    assert ran.returncode == 1


def test_a_usage_error_is_one_line() -> None:
    """The error refers to the help, and the exit status is 2."""
    ran = run("--nonsense")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "nri-backend setup-runtime: unrecognized arguments: --nonsense; see nri-backend setup-runtime --help\n"
    )


def test_the_help_has_examples_that_the_command_accepts() -> None:
    examples = re.findall(r"^  .*?nri-backend setup-runtime (.*)$", run("--help").stdout, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        build_parser().parse_args(example.split())


def test_write_creates_a_private_file_and_never_replaces_one(tmp_path: Path) -> None:
    """The next steps are printed. An existing file stays unchanged, and the exit status is 2."""
    file, dumped = tmp_path / "numa.toml", text_of(dump("1.7"))
    first = run("--write", file, dumped=dumped)
    assert (first.returncode, first.stdout) == (0, "")
    assert f"wrote {file}: add it to imports in config.toml, restart containerd, and check again" in first.stderr
    before = file.read_text()
    assert tomllib.loads(before)["plugins"][NRI]["disable"] is False
    assert file.stat().st_mode & 0o777 == 0o600
    second = run("--write", file, dumped=dumped)
    assert (second.returncode, second.stderr) == (2, f"nri-backend setup-runtime: {file}: File exists\n")
    assert file.read_text() == before


def test_write_leaves_no_truncated_file_behind(tmp_path: Path) -> None:
    """The error names the file, and the next attempt succeeds. A truncated drop-in would keep containerd from
    starting.
    """
    file, dumped = tmp_path / "numa.toml", text_of(dump("2.2", {"disable": True}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        first = run("--write", file, dumped=dumped)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (first.returncode, first.stderr) == (2, f"nri-backend setup-runtime: {file}: File too large\n")
    assert not file.exists()
    assert run("--write", file, dumped=dumped).returncode == 0


def test_the_status_is_1_if_a_drop_in_cannot_make_all_changes(tmp_path: Path) -> None:
    """The exit status is 1 even though --write has written the other settings."""
    file = tmp_path / "numa.toml"
    ran = run("--require-plugin", "--write", file, dumped=text_of(dump("2.0", {"disable": True})))
    assert ran.returncode == 1
    assert "this containerd cannot require plugins" in ran.stderr
    assert file.exists()


@pytest.mark.parametrize("dumped", [None, ""], ids=["terminal", "empty"])
def test_without_input_the_command_runs_containerd(dumped: str | None, tmp_path: Path) -> None:
    """The command runs "containerd config dump". Without containerd, the error gives the command to run on the node."""
    alone = run(dumped=dumped)
    assert alone.returncode == 2
    assert 'nothing to read: run "containerd config dump >FILE" on the node' in alone.stderr
    (tmp_path / "dump").write_text(text_of(dump("2.3")))
    containerd = tmp_path / "containerd"
    # The script is written in Python, because this test also runs in the images, which have no shell.
    containerd.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"sys.stdout.write(open({str(tmp_path / 'dump')!r}).read() if sys.argv[1:] == ['config', 'dump'] else '')\n"
    )
    containerd.chmod(0o755)
    assert run(dumped=dumped, path=tmp_path).returncode == 0
    containerd.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    failed = run(dumped=dumped, path=tmp_path)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "returned non-zero exit status 3" in failed.stderr


@pytest.mark.parametrize("dumped", ["version = 1", "\0\x7f"])
def test_an_invalid_dump_causes_a_one_line_error_and_status_2(dumped: str) -> None:
    ran = run(dumped=dumped)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)


@contextmanager
def waiting(fed: str) -> Iterator[subprocess.Popen[str]]:
    """Runs the command with a dump on a standard input that never reaches end of file, as under ``ctr run``."""
    command = [sys.executable, "-m", "nri_backend", "setup-runtime"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdin
        process.stdin.write(fed)
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def test_standard_input_is_not_read_if_the_dump_is_in_a_file(tmp_path: Path) -> None:
    """If the file is missing, the error names it."""
    file = tmp_path / "dump.toml"
    file.write_text(text_of(dump("2.1", {"disable": True})))
    ran = run(file, dumped=text_of(dump("2.2")))
    assert tomllib.loads(ran.stdout) == {"plugins": {NRI: {"disable": False}}}
    assert ran.returncode == 1
    absent = run(tmp_path / "absent", dumped=text_of(dump("2.2")))
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr == f"nri-backend setup-runtime: {tmp_path}/absent: No such file or directory\n"


def test_standard_input_that_does_not_end_is_an_error_with_a_remedy() -> None:
    """In containerd 2.1, ctr does not forward the end of file on its standard input."""
    with waiting(text_of(dump("2.2"))) as process:
        assert process.stdout
        assert process.stderr
        assert process.wait(_INPUT_SECONDS + 30) == 2
        assert process.stdout.read() == ""
        assert f"no end-of-file on standard input within {_INPUT_SECONDS} s" in (printed := process.stderr.read())
        assert '"containerd config dump >FILE"' in printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_input(number: signal.Signals) -> None:
    """A handler is required, because a container's first process has PID 1, and the kernel discards signals that PID 1
    does not handle.
    """
    with waiting("version = 3\n") as process:
        until = time.monotonic() + 30
        # Bit (signal number - 1) of SigCgt shows that the process handles the signal.
        while not int(_status(process.pid, "SigCgt"), 16) >> (signal.SIGTERM - 1) & 1:
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        assert process.stderr
        assert process.wait(30) == 128 + number
        assert process.stderr.read() == ""


def _status(pid: int, field: str) -> str:
    return Path(f"/proc/{pid}/status").read_text().split(f"{field}:")[1].split()[0]


def test_a_dump_over_4_mib_is_rejected(tmp_path: Path) -> None:
    """The limit applies to a file as well as to standard input."""
    file = tmp_path / "dump.toml"
    file.write_text("#" * (_MAX_BYTES + 1))
    for ran in (run(file), run(dumped=file.read_text())):
        assert (ran.returncode, ran.stderr) == (2, "nri-backend setup-runtime: the dump is larger than 4 MiB\n")
