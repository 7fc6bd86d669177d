# SPDX-License-Identifier: Apache-2.0
"""Configuration of container runtimes, interpreted by the rules of each release."""
