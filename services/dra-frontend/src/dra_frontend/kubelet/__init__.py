# SPDX-License-Identifier: Apache-2.0
"""gRPC communication with the kubelet: sockets, registration and messages. The package uses only a claim's name and
UID.
"""
