# SPDX-License-Identifier: Apache-2.0
"""JSON documents of the state endpoint (``/v1/...``) other than claim records, container reports and the lease.

A model belongs here if the service returns it to users or tools. ``/openapi.json`` and ``docs/state-api.md`` are
generated from these models. DESIGN.md, "The documents of the state endpoint", contains the compatibility rules.
"""

from typing import Final

STATE_VERSION: Final = 1
"""Version of the documents' format, returned by ``/v1/version``. New fields do not change it."""
