# SPDX-License-Identifier: Apache-2.0
"""Contract between dra-frontend and nri-backend: records, reports, names, CDI documents, the configuration model.

No module here opens a file or a socket. The only dependency is pydantic, since every dependency enlarges both images.
Code that only one service needs does not belong here.
"""

__version__ = "0.2.0"
