# SPDX-License-Identifier: Apache-2.0
"""How a backend of release 0.1.0 tells of containers: by epochs. For one release, while an upgrade passes through.

A lease of a new epoch empties the reports; single ones follow; a lease that says ``complete`` ends the telling.
"""

from numa_contract.reports import BackendStatus, ContainerReport


class FormerEpoch:
    """The epoch of the present telling."""

    def __init__(self) -> None:
        self._epoch = ("", "")
        self.known = True
        """Whether the epoch of the last lease was known; if not, that backend sends every container again."""

    def renew(self, status: BackendStatus, containers: dict[str, ContainerReport]) -> bool:
        """Takes a lease, and empties the reports for a new epoch; tells whether they are complete now."""
        epoch = (status.instance, status.epoch)
        self.known = epoch == self._epoch
        if not self.known:
            self._epoch = epoch
            containers.clear()
        # "Complete" in a new epoch speaks of reports that were sent to somebody else, or before a restart of ours.
        return self.known and status.complete


def take_former_report(report: ContainerReport, containers: dict[str, ContainerReport]) -> None:
    """Takes one report. Of refused attempts to create a container the last one stays: CRI-O never takes any back."""
    if report.refused and report.state == "unknown":
        attempt = (report.pod_uid, report.name)
        for one in tuple(containers.values()):
            if one.refused and one.state == "unknown" and (one.pod_uid, one.name) == attempt:
                del containers[one.id]
    containers[report.id] = report
