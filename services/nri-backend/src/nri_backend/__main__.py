# SPDX-License-Identifier: Apache-2.0
"""The command ``nri-backend``."""

import sys

from nri_backend.app import main

if __name__ == "__main__":
    sys.exit(main())
