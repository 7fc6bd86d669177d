# SPDX-License-Identifier: Apache-2.0
"""Publishes ResourceSlices and device health for the current machine. Nothing here decides which claim gets a
device.
"""
