# SPDX-License-Identifier: Apache-2.0
"""The client of the frontend's state endpoint. Nothing in the enforcement of claims waits for it."""
