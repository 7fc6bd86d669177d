# SPDX-License-Identifier: Apache-2.0
"""Values of cgroup files: wanted, seen, different. Pure; no container and no claim is known here."""
