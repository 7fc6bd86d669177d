# SPDX-License-Identifier: Apache-2.0
"""API server client. Documents are dicts, which other packages interpret."""
