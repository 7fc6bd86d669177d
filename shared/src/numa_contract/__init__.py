# SPDX-License-Identifier: Apache-2.0
"""What dra-frontend and nri-backend agree on: records, reports, names, CDI documents, the configuration model.

Nothing in here opens a file or a socket, and nothing depends on more than pydantic: both images pay for it. Code that
only one service needs does not belong here.
"""

__version__ = "0.2.0"
