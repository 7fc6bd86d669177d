# SPDX-License-Identifier: Apache-2.0
"""The NRI plugin side of one connection to the runtime. Decisions about containers are made in ``enforcement``."""
