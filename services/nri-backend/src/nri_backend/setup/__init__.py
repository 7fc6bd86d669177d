# SPDX-License-Identifier: Apache-2.0
"""Finds settings that are missing in the configuration of a container runtime. The service does not import it."""
