# SPDX-License-Identifier: Apache-2.0
"""gRPC with the kubelet: sockets, registration and messages. Nothing here knows more of a claim than its name."""
