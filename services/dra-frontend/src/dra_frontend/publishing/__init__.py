# SPDX-License-Identifier: Apache-2.0
"""ResourceSlices and device health, as the machine is now. Nothing here knows who holds a device."""
