# SPDX-License-Identifier: Apache-2.0
"""Configuration of container runtimes, interpreted the way each release does."""
