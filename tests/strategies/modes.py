# SPDX-License-Identifier: Apache-2.0
"""The exposure modes, as arguments for the configuration."""

from typing import Any, Final

MODES: Final[list[dict[str, Any]]] = [
    *({"group_by": group} for group in ("numanode", "socket", "machine", "l3", "coretype")),
    {"cpu_device_mode": "individual"},
]
