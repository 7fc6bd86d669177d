# SPDX-License-Identifier: Apache-2.0
"""The DeviceClasses of a test cluster: those of the chart, for every page size."""

_HUGEPAGES = 'device.driver == "dra.memory" && device.attributes["resource.kubernetes.io"].hugeTLB'
CLASSES = {
    "dra.cpu": 'device.driver == "dra.cpu"',
    "dra.memory": 'device.driver == "dra.memory" && !device.attributes["resource.kubernetes.io"].hugeTLB',
} | {
    f"dra.hugepages-{size}": f'{_HUGEPAGES} && device.attributes["resource.kubernetes.io"].pageSize == "{size}"'
    for size in ("64k", "1m", "2m", "4m", "16m", "32m", "512m", "1g", "2g", "16g")
}
"""The CEL expression of each, by its name."""
