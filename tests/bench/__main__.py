# SPDX-License-Identifier: Apache-2.0
"""``make bench``: runs a driver against fakes of the surrounding components, measures it, and writes bench.json and
bench.html.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from tests.bench import arguments
from tests.bench.drivers import DriverError
from tests.bench.figures import Report
from tests.bench.page.page import render
from tests.bench.run import measure
from tests.bench.table import table
from tests.stage.process import StageError, end_by_interrupt
from tests.stage.wires import AnsweredError


def main(words: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns 0, or 1 if a measurement failed, 2 if a driver or a report cannot be used, 3 if a budget is not met and
    --strict is given, 130 after an interrupt.
    """
    given = arguments.parse(words)
    if given.render:
        return _render(given.render)
    try:
        drivers, plan = arguments.drivers(given), arguments.plan(given)
    except DriverError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    end_by_interrupt()
    print(f"bench: takes about {plan.minutes(len(drivers))} minutes on a quiet machine", file=sys.stderr)
    try:
        report = measure(plan, drivers)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    except (StageError, AnsweredError, OSError) as error:
        print(f"bench: failed: {error}", file=sys.stderr)
        return 1
    given.output.write_text(report.model_dump_json(indent=1) + "\n")
    page = given.output.with_suffix(".html")
    page.write_text(render(report))
    missed = report.missed()
    print(f"{table(report)}\n\n{given.output} and {page} written")
    print(f"over budget: {', '.join(missed)}" if missed else "every budget is met")
    return 3 if missed and given.strict else 0


def _render(file: Path) -> int:
    """Writes the page for an existing report."""
    try:
        report = Report.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        print(f"bench: {file} is not a report of this benchmark: {error}", file=sys.stderr)
        return 2
    page = file.with_suffix(".html")
    page.write_text(render(report))
    print(f"{page} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
