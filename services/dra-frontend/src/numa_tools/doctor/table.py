# SPDX-License-Identifier: Apache-2.0
"""Lists all checks, ordered so that causes precede their effects, and runs the checks on facts. This module does no
I/O.
"""

from dataclasses import dataclass
from typing import Any, Final

from numa_tools.doctor.checks import claims, cluster, configuration, driver, host, kernel, kubelet, runtime
from numa_tools.doctor.facts import Facts
from numa_tools.doctor.model import Check, Finding, Level

CHECKS: Final[tuple[Check, ...]] = (
    *configuration.CHECKS,
    *kernel.CHECKS,
    *runtime.CHECKS,
    *kubelet.CHECKS,
    *cluster.CHECKS,
    *driver.CHECKS,
    *claims.CHECKS,
    *host.CHECKS,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The findings of one check."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def result(self) -> str:
        """``good``, or the findings' most severe level."""
        levels = {one.level for one in self.findings}
        return next((level.value for level in (Level.PROBLEM, Level.UNKNOWN, Level.NOTE) if level in levels), "good")


def examine(facts: Facts) -> list[Verdict]:
    """Runs every check and returns the verdicts."""
    return [Verdict(check, tuple(check.run(facts))) for check in CHECKS]


def report(verdicts: list[Verdict], node_name: str) -> dict[str, Any]:
    """Returns the verdicts as plain values, for JSON."""
    return {
        "node": node_name,
        "problems": sum(verdict.result == Level.PROBLEM for verdict in verdicts),
        "checks": [
            {
                "id": verdict.check.id,
                "rule": verdict.check.rule,
                "result": verdict.result,
                "findings": [
                    {
                        "level": one.level.value,
                        "what": one.what,
                        "evidence": list(one.evidence),
                        "why": one.why,
                        "remedy": one.remedy,
                    }
                    for one in verdict.findings
                ],
            }
            for verdict in verdicts
        ],
    }
