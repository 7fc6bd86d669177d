# SPDX-License-Identifier: Apache-2.0
"""Values of cgroup files: desired, observed, different. Pure; no container is known here."""
