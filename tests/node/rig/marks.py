# SPDX-License-Identifier: Apache-2.0
"""Marks that tests share."""

import pytest

both_drivers = pytest.mark.parametrize("cgroup_driver", ["systemd", "cgroupfs"], indirect=True)
every_machine = pytest.mark.profile("default", "one-gig")
each_runtime = pytest.mark.profile("default", "containerd-1.7")
in_pool_mode = pytest.mark.configuration(cpuExclusivity="pool")
"""For tests of pool mode only: other containers leave the claimed CPUs when a claim is prepared, and are audited every
second.
"""
