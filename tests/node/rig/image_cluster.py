# SPDX-License-Identifier: Apache-2.0
"""The cluster with our services as a kubelet runs them: the chart's pod from the built images, instead of processes."""

import subprocess
import time
import uuid
from pathlib import Path

from tests.node.rig import figures
from tests.node.rig.cluster import NODE_NAME, Cluster
from tests.node.rig.driver_pod import DriverPod, rendered
from tests.node.rig.hooks import HookTimes
from tests.node.rig.instance import Instance
from tests.node.rig.node import Node

ARCHIVES = Path("/opt/numa/images")  # put in by run.sh
IMAGES = ("dra-frontend", "nri-backend")
BACKEND_METRICS = "127.0.0.1:8081"  # the chart's default


class ImageInstance(Instance):
    """Both containers of the pod; the other things of an instance are as with processes."""

    def __init__(self, node: Node, times: HookTimes) -> None:
        self.pod_uid = str(uuid.uuid4())
        self._metrics = BACKEND_METRICS
        self._times = times
        self.pod = DriverPod(node, rendered(ARCHIVES / "chart.json"), self.pod_uid, NODE_NAME)
        self.backend = self.pod.backend
        self.frontend = self.pod.frontend


class ImageCluster(Cluster):
    """As Cluster; the images are imported when it starts."""

    def start(self) -> None:
        for image in IMAGES:
            archive, began = ARCHIVES / f"{image}.tar", time.monotonic()
            subprocess.run(["ctr", "-n", "k8s.io", "images", "import", archive], check=True, stdout=subprocess.DEVNULL)
            took = time.monotonic() - began
            figures.note(f"import of {image}", f"{archive.stat().st_size / 1e6:.0f} MB, {took:.0f} s")
        super().start()

    def _make_instance(self, number: int) -> ImageInstance:
        return ImageInstance(self.node, self.times)

    @property
    def instance(self) -> ImageInstance:
        """The first instance."""
        first = self.instances[0]
        assert isinstance(first, ImageInstance)
        return first

    def close(self) -> None:
        try:
            super().close()
        finally:
            for instance in self.instances:
                assert isinstance(instance, ImageInstance)
                instance.pod.remove()
