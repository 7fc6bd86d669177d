# SPDX-License-Identifier: Apache-2.0
"""What both processes do on a node, written once: configuration file, log, locks, claim files, addresses, back-off.

Standard library and PyYAML only. Nothing in here decides anything, and nothing speaks a protocol, but for the answers
to probes.
"""
