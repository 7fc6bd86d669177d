# SPDX-License-Identifier: Apache-2.0
"""The backend's side of the state endpoint. Nothing in enforcement waits for it."""
