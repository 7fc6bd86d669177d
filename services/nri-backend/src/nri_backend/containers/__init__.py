# SPDX-License-Identifier: Apache-2.0
"""What is known of each container and what its cgroup must say. Pure: no files, no clock."""
