# SPDX-License-Identifier: Apache-2.0
"""Tests of ``make bench``: the smallest possible run, from the command line to the page, and the computed figures."""

import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.arguments import parse, plan
from tests.bench.drivers import DriverError, check_out, earlier_revision
from tests.bench.figures import (
    Collector,
    DriverUnderTest,
    Figure,
    Quantity,
    Report,
    Summary,
    ThreadRate,
    median_ratio,
    shown,
)
from tests.bench.idle import Idle, Rates
from tests.bench.page.page import render
from tests.bench.procfs import Memory, Thread, cpu_seconds, memory, pss_together, split_mappings, switched, threads
from tests.bench.table import table
from tests.stage.process import ROOT
from tests.stage.settings import OUR_BACKEND, OUR_FRONTEND

_SMALLEST = [
    *("--claims", "1", "--containers", "2", "--exclusivity", "pool", "--turns", "2", "--rounds", "1"),
    *("--idle", "1", "--settle", "0", "--pairs", "20"),
]
_WAIT = Quantity(key="wait", section="Waiting", title="Waiting & more", unit="ms", how="How long it waits.", budget=2)


class _Page(HTMLParser):
    """A parsed page: its elements with their names, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, _Page, str]:
    """Returns the report, the page and the output from the smallest run, which compares this driver with itself."""
    output = tmp_path_factory.mktemp("bench") / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.bench", *_SMALLEST, "-o", str(output)),
            *("--against", OUR_FRONTEND, "--against-backend", OUR_BACKEND, "--against-name", "<other> driver"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json(output.read_bytes())
    return report, _Page(output.with_suffix(".html").read_text()), done.stdout


def test_the_smallest_run_measures_every_quantity_of_both_drivers(finished: tuple[Report, _Page, str]) -> None:
    """Each quantity has samples from every turn, for all processes together and, where it matters, for each process."""
    report, _, _ = finished
    for driver in ("this driver", "<other> driver"):
        found = {figure.quantity: figure for figure in report.figures if figure.driver == driver and figure.mode}
        assert set(found) == {
            *("idle-cpu", "idle-cpu-frontend", "idle-cpu-backend"),
            *("wakeups", "wakeups-frontend", "wakeups-backend"),
            *("own-wakeups", "own-wakeups-frontend", "own-wakeups-backend"),
            *("preemptions", "preemptions-frontend", "preemptions-backend"),
            *("rss", "rss-frontend", "rss-backend", "pss", "pss-frontend", "pss-backend"),
            *("kernel-pss", "kernel-pss-frontend", "kernel-pss-backend"),
            *("prepare-dra.cpu", "prepare-dra.memory", "unprepare-dra.cpu", "unprepare-dra.memory"),
            *("CreateContainer-claim", "CreateContainer-plain", "StartContainer-claim", "StartContainer-plain"),
            *("create-at-once", "others-off", "cpu-claim", "cpu-claim-frontend", "cpu-claim-backend", "cpu-plain"),
            *("exec-to-registered", "synchronize", "forgotten"),
        }
        # Each of the two turns measures one pod of each kind.
        hooks = [f"{method}-{kind}" for method in ("CreateContainer", "StartContainer") for kind in ("claim", "plain")]
        for one in ("prepare-dra.cpu", *hooks, "create-at-once", "cpu-claim", "exec-to-registered", "synchronize"):
            assert [len(turn) for turn in found[one].turns] == [1, 1], one
        assert found["forgotten"].samples == [0, 0]
        assert 10 < found["pss"].summary.median < found["rss"].summary.median < 1000
        assert 0 < found["prepare-dra.cpu"].summary.median < found["exec-to-registered"].summary.median
        assert {rate.process for rate in report.threads if rate.driver == driver} == {"DRA driver", "NRI plugin"}
    simulated = {figure.quantity for figure in report.figures if not figure.mode}
    assert simulated == {"simulated-numanode", "simulated-machine", "growth-256", "growth-512"}
    assert report.drivers[0].revision != "unknown"


def test_the_page_is_self_contained_and_has_a_plot_of_each_quantity(finished: tuple[Report, _Page, str]) -> None:
    """The page does not contain a script or refer to another file; every element is closed; each plot has a text
    alternative.
    """
    report, page, output = finished
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.elements}
    targets = {str(one["href"]) for one in page.all("a")}
    assert {target[1:] for target in targets} <= {one.get("id") for one in page.all("section")}
    policy = next(one for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    labels = [str(one["aria-label"]) for one in page.all("svg") if "aria-label" in one]
    for quantity in report.quantities:
        assert quantity.title in page.text
        assert quantity.how in page.text
        assert any(label.startswith(f"{quantity.title}.") for label in labels) == quantity.plotted
    prepare = report.find("prepare-dra.cpu", "pool", "1 claim, 2 containers", "<other> driver")
    assert prepare
    median = shown(prepare.summary.median, "ms")
    assert any(f"<other> driver: {median}" in label for label in labels)
    assert page.text.count("<other> driver") > 20
    assert median in page.text
    assert "What dra-driver-numa costs a node, compared with <other> driver" in page.text
    assert "RATIO" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--claims", "1,2"], "--claims has 2 numbers and --containers has 3"),
        (["--claims", "one"], "'one' is not a list of numbers such as 0,60,250"),
        (["--containers", "5,-1"], "'5,-1' is not a list of numbers"),
        (["--turns", "0"], "'0' is not a whole number of at least 1"),
        (["--rounds", "many"], "'many' is not a whole number of at least 1"),
        (["--pairs", "-1"], "'-1' is not a whole number of at least 0"),
        (["--idle", "-1"], "'-1' is not a number of seconds between 0 and 3600"),
        (["--idle", "nan"], "'nan' is not a number of seconds between 0 and 3600"),
        (["--drivers", "dra.memory"], "'dra.memory' is neither dra.cpu nor dra.cpu,dra.memory"),
        (["--exclusivity", "both"], "invalid choice: 'both'"),
        (["--against", "x", "--against-revision", "y"], "are mutually exclusive"),
        (["--against-backend", "x"], "describe the driver that --against names, but it is not given"),
        (["--drivers", "dra.cpu", "--claims", "250", "--containers", "1"], "has CPUs for 100 claims"),
        (["-o", "/nonexistent/bench.json"], "its directory does not exist or cannot be written"),
        (["-o", "bench.html"], "give a name that ends in .json"),
    ],
)
def test_bad_arguments_are_rejected_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and the message names the argument and the expected values."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "/nonexistent/driver --flag"], "'/nonexistent/driver' is not an executable program"),
        (["--against-revision", "no-such-thing"], "'no-such-thing' is not a revision"),
    ],
)
def test_a_driver_that_does_not_exist_is_reported_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and no directory is created for a revision that does not exist."""
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_loads_are_paired_and_a_grid_has_every_combination() -> None:
    """A node's load only grows, so a grid needs a fresh node for each number of claims."""
    words = ["--claims", "0,60", "--containers", "0,200"]
    assert plan(parse(words)).loads.stages() == [[(0, 0), (60, 200)]]
    assert plan(parse([*words, "--grid"])).loads.stages() == [[(0, 0), (0, 200)], [(60, 0), (60, 200)]]


def test_default_loads_fit_the_time_budget_and_the_registered_drivers() -> None:
    """A run takes about 15 minutes, or 3 with --quick. Without dra.memory there are only claims for CPUs."""
    assert plan(parse([])).loads.pairs == ((0, 0), (60, 200), (250, 500))
    assert plan(parse(["--drivers", "dra.cpu"])).loads.pairs == ((0, 0), (60, 200), (100, 500))
    assert plan(parse([])).minutes(1) <= 15
    assert plan(parse(["--quick"])).minutes(1) <= 3
    assert plan(parse(["--quick", "--turns", "9"])).turns == 9


def _figure(*turns: list[float]) -> Figure:
    collector = Collector()
    for turn in turns:
        collector.add(_WAIT, "", "", "", turn)
    return collector.figures()[0]


def test_a_ratio_compares_samples_of_the_same_turn() -> None:
    """If the machine becomes twice as slow in the second turn, the ratio does not change."""
    ours, other = _figure([1, 1, 9], [2, 2, 2]), _figure([2, 2, 2], [4, 4, 40])
    assert median_ratio(ours, other) == (0.5, 0.5, 0.5)
    assert median_ratio(ours, _figure([0], [4])) == (0.5, 0.5, 0.5)
    assert median_ratio(ours, _figure([0], [0])) is None


def test_statistics_use_all_samples_and_a_report_contains_their_quantiles() -> None:
    """Ten thousand samples become two hundred quantiles with the same statistics."""
    figure = _figure([float(number) for number in range(10_001)])
    assert figure.summary == Summary(count=10_001, median=5000, q1=2500, q3=7500, p99=9900)
    assert len(figure.samples) == 200
    assert (figure.samples[0], figure.samples[-1]) == (0, 10_000)


def test_wakeups_of_grpc_are_recognized_by_the_name_of_the_thread() -> None:
    """All other threads are the driver's own. Each quantity is reported as a sum over all processes and, if there are
    several processes, for each of them.
    """
    rates = {
        "frontend": {"python": Rates(2, 1.0, 0.5, of_grpc=False), "timer_manager": Rates(1, 9.0, 0.25, of_grpc=True)},
        "backend": {"python": Rates(1, 0.5, 0.0, of_grpc=False)},
    }
    samples = {quantity.key: values for quantity, values in Idle({"frontend": 0.25, "backend": 0.5}, rates).samples()}
    assert samples["wakeups"] == [10.5]
    assert samples["own-wakeups"] == [1.5]
    assert samples["own-wakeups-frontend"] == [1.0]
    assert samples["preemptions"] == [0.75]
    assert samples["idle-cpu"] == [0.75]
    alone = Idle({"frontend": 0.25}, {"frontend": rates["frontend"]})
    assert [quantity.key for quantity, _ in alone.samples()] == ["idle-cpu", "wakeups", "own-wakeups", "preemptions"]
    assert Thread("resolver-execut", 0, 0).of_grpc
    assert not Thread("python", 0, 0).of_grpc


def test_measurements_from_outside_agree_with_those_of_the_process_itself() -> None:
    """The CPU time agrees, the main thread is marked as such, and the parts of the memory in smaps add up to the
    total.
    """
    own = os.getpid()
    before = time.process_time()
    assert before <= cpu_seconds(own) <= time.process_time()
    assert [name for name in (thread.name for thread in threads(own).values()) if "(main thread)" in name] == [
        f"{Path('/proc/self/comm').read_text().strip()} (main thread)"
    ]
    found = memory(own)
    assert found.anonymous + sum(found.files.values()) == pytest.approx(found.rss, rel=0.05)
    assert found.kernel_pss <= found.rss


def test_context_switches_of_a_new_thread_are_counted_from_its_start() -> None:
    """A thread that has exited is not counted."""
    before = {1: Thread("python", 10, 1), 2: Thread("python", 5, 0)}
    after = {1: Thread("python", 12, 1), 3: Thread("grpc", 4, 2)}
    assert switched(before, after) == [Thread("python", 2, 0), Thread("grpc", 4, 2)]


_SMAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python3
Rss:                 320 kB
Anonymous:             0 kB
00651000-00652000 rw-p 00051000 08:02 173521      /usr/bin/python3
Rss:                  16 kB
Anonymous:            12 kB
7f0000000000-7f0000021000 rw-p 00000000 00:00 0
Rss:                 100 kB
Anonymous:           100 kB
"""


def test_a_file_that_both_processes_map_counts_once() -> None:
    """Written pages of a private mapping are attributed to their process alone. Processes other than the driver's are
    ignored.
    """
    anonymous, files = split_mappings(_SMAPS)
    assert (anonymous, files) == (112 * 1024, {("08:02", "173521"): 324 * 1024})
    one = Memory(rss=0, kernel_pss=0, anonymous=100, files={("1", "1"): 60, ("1", "2"): 10})
    two = Memory(rss=0, kernel_pss=0, anonymous=200, files={("1", "1"): 40})
    assert pss_together([one, two]) == [100 + 20 + 20 + 10, 200 + 20]
    assert pss_together([one]) == [170]


def _repository(place: Path) -> Path:
    for words in (
        ["init", "-q"],
        ["config", "user.name", "A Name"],
        ["config", "user.email", "a@example.com"],
        ["commit", "-q", "--allow-empty", "-m", "one"],
        ["tag", "v1"],
        ["commit", "-q", "--allow-empty", "-m", "two"],
    ):
        place.mkdir(exist_ok=True)
        subprocess.run(["git", "-C", str(place), *words], check=True)
    return place


def test_a_revision_is_checked_out_once_unless_its_directory_was_removed(tmp_path: Path) -> None:
    """All names of a revision share one directory. git still lists a worktree whose directory "make clean" has
    removed.
    """
    repository, below = _repository(tmp_path / "repository"), tmp_path / "build"
    tree = check_out("v1", repository, below)
    assert tree == check_out("HEAD~1", repository, below)
    assert tree != check_out("HEAD", repository, below)
    (tree / ".git").unlink()
    tree.rmdir()
    assert check_out("v1", repository, below) == tree
    assert (tree / ".git").exists()


def test_a_revision_whose_directory_is_in_use_is_not_measured(tmp_path: Path) -> None:
    """Neither another checkout nor a user's files in the revision's directory are overwritten."""
    repository, below = _repository(tmp_path / "repository"), tmp_path / "build"
    tree = check_out("v1", repository, below)
    subprocess.run(["git", "-C", str(tree), "checkout", "-q", "--detach", "HEAD~0"], check=True)
    (tree / "file").write_text("mine")
    subprocess.run(["git", "-C", str(tree), "add", "file"], check=True)
    with pytest.raises(DriverError, match=r"git cannot check out v1: .*; remove .* if it is in the way"):
        check_out("v1", repository, below)
    assert (tree / "file").read_text() == "mine"


def test_a_revision_runs_its_own_code(tmp_path: Path) -> None:
    """The commands are those of the revision's own stage, and the revision's packages come first in PYTHONPATH."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    driver = earlier_revision("HEAD", clone, tmp_path / "build")
    tree = next((tmp_path / "build").iterdir())
    assert driver.environment["PYTHONPATH"].split(":")[:2] == [str(tree), str(tree / "shared/src")]
    assert driver.frontend.startswith(f"{sys.executable} -m ")
    assert "with changes" not in driver.revision


def test_a_revision_without_the_driver_is_rejected(tmp_path: Path) -> None:
    """Such a revision is older than the driver, or belongs to another project."""
    with pytest.raises(DriverError, match="revision v1 cannot be measured: "):
        earlier_revision("v1", _repository(tmp_path / "repository"), tmp_path / "build")


def _report(*drivers: str) -> Report:
    collector = Collector()
    for driver in drivers:
        collector.add(_WAIT, "pool", "empty node", driver, [1.0, 3.0, 900.0])
    return Report(
        when="2026-01-01 00:00 UTC",
        seconds=60,
        host={"Processor": "A <B>"},
        settings={"Turns": "1"},
        modes={"pool": "Some kernel"},
        drivers=[DriverUnderTest(name=driver, revision="1", frontend="a", backend="") for driver in drivers],
        quantities=collector.quantities(),
        figures=collector.figures(),
        threads=[
            ThreadRate(
                mode="pool",
                load="empty node",
                driver=drivers[0],
                process="only process",
                name="<t>",
                threads=3,
                wakeups=1,
                preemptions=0,
            )
        ],
    )


def test_the_page_for_a_single_driver_has_no_ratio() -> None:
    """The names of the driver, the machine and the threads are escaped on the page."""
    page = _Page(render(_report("<mine>")))
    assert page.open == []
    assert "A <B>" in page.text
    assert "<t>, 3 of them" in page.text
    assert "What <mine> costs a node" in page.text
    assert "ratio" not in page.text.lower()
    assert "Waiting & more" in page.text


def test_an_outlier_does_not_compress_the_other_samples() -> None:
    """The outlier is drawn as an arrow at the edge."""
    collector = Collector()
    collector.add(_WAIT, "pool", "empty node", "mine", [*(1.0 + number / 100 for number in range(40)), 900.0])
    report = _report("mine").model_copy(update={"figures": collector.figures()})
    page = _Page(render(report))
    dots = [float(str(one["cx"])) for one in page.all("circle") if one["class"] == "dot"]
    assert len(dots) == 40
    assert max(dots) - min(dots) > 50
    assert sum(one.get("class") == "beyond" for one in page.all("path")) == 1


def test_a_missed_budget_is_named() -> None:
    """This driver's median is compared with the budget, not the other driver's."""
    assert _report("mine").missed() == ["Waiting & more"]
    assert "2 ms (median)" in table(_report("mine"))
    figures = [figure for figure in _report("mine", "other").figures if figure.driver == "other"]
    assert _report("mine", "other").model_copy(update={"figures": figures}).missed() == []


def test_a_page_is_rendered_again_from_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--render reads a report and writes the page next to it; other files are rejected with status 2."""
    report = tmp_path / "bench.json"
    report.write_text(_report("mine", "other").model_dump_json())
    assert main(["--render", str(report)]) == 0
    assert (tmp_path / "bench.html").read_text() == render(_report("mine", "other"))
    report.write_text('{"version": 1, "figures": []}')
    assert main(["--render", str(report)]) == 2
    assert f"{report} is not a report of this benchmark" in capsys.readouterr().err
