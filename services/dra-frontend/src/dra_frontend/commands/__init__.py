# SPDX-License-Identifier: Apache-2.0
"""What a person runs. Nothing here starts the service, keeps state, or writes to the node unless asked to."""
