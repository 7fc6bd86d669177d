# SPDX-License-Identifier: Apache-2.0
"""Client of the frontend's state endpoint. Enforcement of claims never waits for the frontend."""
