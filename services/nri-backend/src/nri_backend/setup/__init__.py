# SPDX-License-Identifier: Apache-2.0
"""What the runtime's configuration lacks. A command; the service does not import it."""
