# SPDX-License-Identifier: Apache-2.0
"""Text output of ``dra-frontend doctor``: the findings by group, then the checks that could not be run. This module
does no I/O.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from numa_contract.errors import printable

from numa_tools.doctor.model import Check, Finding, Level
from numa_tools.doctor.table import Verdict

_MAX_EVIDENCE: Final = 20
_MAX_NAMES: Final = 12


def findings_text(verdicts: Sequence[Verdict], node_name: str) -> str:
    """Formats each finding as three lines, plus one line for each piece of evidence, and adds a final line with
    totals.
    """
    lines = [*_findings(verdicts), *_unknown(verdicts), _summary(verdicts, node_name)]
    return "\n".join(map(printable, lines))


def rules_text(checks: Sequence[Check]) -> str:
    """Formats each check as one line that contains the check's rule."""
    return "\n".join(f"{check.id:<32} {check.rule}" for check in checks)


def _findings(verdicts: Sequence[Verdict]) -> Iterator[str]:
    group = ""
    for verdict in verdicts:
        for finding in (one for one in verdict.findings if one.level is not Level.UNKNOWN):
            if verdict.check.group != group:
                group = verdict.check.group
                yield f"== {group}"
            yield from _lines(verdict.check.id, finding)


def _lines(name: str, finding: Finding) -> Iterator[str]:
    yield f"{finding.level.value.upper():<9}{finding.what} [{name}]"
    yield from (f"{'EVIDENCE':<9}{fact}" for fact in finding.evidence[:_MAX_EVIDENCE])
    if len(finding.evidence) > _MAX_EVIDENCE:
        yield f"{'EVIDENCE':<9}and {len(finding.evidence) - _MAX_EVIDENCE} more (-o json prints all)"
    yield f"{'WHY':<9}{finding.why}"
    yield f"{'REMEDY':<9}{finding.remedy}"
    yield ""


def _unknown(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Groups, by reason, the checks that could not be run, so that an unreadable source is reported only once."""
    sources: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        for one in verdict.findings:
            if one.level is Level.UNKNOWN:
                sources.setdefault((one.why, one.remedy), []).append(verdict.check.id)
    if sources:
        yield "== not checked"
    for (why, remedy), names in sources.items():
        yield f"{'UNKNOWN':<9}{_counted(names)}"
        yield f"{'WHY':<9}{why}"
        yield f"{'REMEDY':<9}{remedy}"
        yield ""


def _counted(names: Sequence[str]) -> str:
    """Formats the names of checks that share one reason for not being run, with the number of checks if there are
    several.
    """
    if len(names) == 1:
        return names[0]
    left_out = len(names) - _MAX_NAMES
    more = f", and {left_out} more" if left_out > 0 else ""
    return f"{len(names)} checks: {', '.join(names[:_MAX_NAMES])}{more}"


def _summary(verdicts: Sequence[Verdict], node_name: str) -> str:
    counts = Counter(verdict.result for verdict in verdicts)
    parts = [f"{counts[word]} {text}" for word, text in _WORDS.items() if counts[word] or word == "good"]
    return f"{node_name}: {', '.join(parts)} (out of {len(verdicts)} checks)"


_WORDS = {"good": "good", "problem": "with problems", "note": "with notes", "unknown": "not run"}
