# SPDX-License-Identifier: Apache-2.0
"""The machine as values, read through a file tree. Pure; what is offered of it is decided in ``devices``."""
