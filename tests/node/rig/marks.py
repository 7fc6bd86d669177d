# SPDX-License-Identifier: Apache-2.0
"""Pytest marks that several node tests use."""

import pytest

both_drivers = pytest.mark.parametrize("cgroup_driver", ["systemd", "cgroupfs"], indirect=True)
every_machine = pytest.mark.profile("default", "one-gig")
each_runtime = pytest.mark.profile("default", "containerd-1.7")
in_pool_mode = pytest.mark.configuration(cpuExclusivity="pool")
"""Mark that configures the driver for pool mode. In this mode, other containers leave the claimed CPUs when a claim is
prepared, and the backend audits them every second.
"""
