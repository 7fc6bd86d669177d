# SPDX-License-Identifier: Apache-2.0
"""Runs a command with a different soft limit on open files, without a shell: open_files.py NUMBER COMMAND..."""

import os
import resource
import sys

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), hard))
os.execvp(sys.argv[2], sys.argv[2:])
