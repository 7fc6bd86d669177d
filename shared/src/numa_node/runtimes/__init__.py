# SPDX-License-Identifier: Apache-2.0
"""Configuration of container runtimes, interpreted as each release interprets it."""
