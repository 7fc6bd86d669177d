# SPDX-License-Identifier: Apache-2.0
"""gRPC with the kubelet: sockets, registration, messages. It knows no claim beyond its name."""
