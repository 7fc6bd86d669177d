# SPDX-License-Identifier: Apache-2.0
"""ttrpc without input and output: what is on the wire, and who may say what when. No socket, no task, no clock."""
