# SPDX-License-Identifier: Apache-2.0
"""Settings for property tests: no deadline for one example, since a machine that is busy is not a fault."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
