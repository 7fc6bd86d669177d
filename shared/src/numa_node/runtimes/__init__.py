# SPDX-License-Identifier: Apache-2.0
"""Configuration of container runtimes, as their releases read it."""
