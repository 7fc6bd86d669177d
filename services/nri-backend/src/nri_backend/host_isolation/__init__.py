# SPDX-License-Identifier: Apache-2.0
"""Moves interrupts, kernel workers and host daemons off claimed CPUs.

This package does not write to pods' cgroups: only ``enforcement`` does.
"""
