# SPDX-License-Identifier: Apache-2.0
"""The only door to the API server. Documents are dicts; what they mean is said elsewhere."""
