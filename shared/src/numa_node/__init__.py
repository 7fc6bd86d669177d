# SPDX-License-Identifier: Apache-2.0
"""Node code shared by both services: configuration file, log, locks, claim files, addresses, back-off.

Depends only on the standard library and PyYAML. No module here makes decisions or implements a protocol.
"""
