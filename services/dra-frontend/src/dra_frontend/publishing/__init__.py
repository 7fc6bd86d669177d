# SPDX-License-Identifier: Apache-2.0
"""ResourceSlices and device health, as the machine is now. Nothing here decides who holds a device."""
