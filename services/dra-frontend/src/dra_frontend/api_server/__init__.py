# SPDX-License-Identifier: Apache-2.0
"""Client of the API server. Documents are dicts; other packages interpret them."""
