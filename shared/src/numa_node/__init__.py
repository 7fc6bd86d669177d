# SPDX-License-Identifier: Apache-2.0
"""What both processes do on a node, written once: configuration file, log, locks, claim files, addresses, back-off.

Standard library and PyYAML only. Nothing in here makes decisions or speaks a protocol.
"""
