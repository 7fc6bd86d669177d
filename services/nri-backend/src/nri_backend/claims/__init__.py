# SPDX-License-Identifier: Apache-2.0
"""What a container may use, by records alone. Pure; what the kernel says does not count here."""
