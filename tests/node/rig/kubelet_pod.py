# SPDX-License-Identifier: Apache-2.0
"""Translates a rendered DaemonSet into the kubelet's calls to the runtime: pod sandbox, containers, volumes, cgroup.
The module does no I/O.

Each field of the pod template is translated, or listed in OTHERS with the component that reads it; any other field
raises UnknownFieldError, so the chart and the rig cannot diverge. The rules are those of Kubernetes 1.34 to 1.36 with
cgroup v2: pkg/kubelet/kuberuntime, pkg/kubelet/cm and pkg/securitycontext.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.node._pb import cri_pb2 as pb
from tests.node.rig.kubelet_resources import PERIOD, PodGroup, PodResources, UntranslatableError
from tests.node.rig.template import Fields

Document = Mapping[str, Any]

OTHERS: Final = {
    "affinity": "kube-scheduler",
    "automountServiceAccountToken": "API server: false adds no volume at admission",
    "imagePullSecrets": "image pull, which a node with the images does not do",
    "nodeSelector": "kube-scheduler",
    "serviceAccountName": "API server: the account of the token, which the stand-in does not ask for",
    "tolerations": "kube-scheduler and eviction",
}
"""Fields of the pod's spec that do not reach the runtime, and the component that reads them."""
OTHERS_OF_CONTAINERS: Final = {
    "imagePullPolicy": "image pull: the images are in the runtime",
}

# pkg/securitycontext/util_linux.go: the paths that a container without procMount: Unmasked cannot see or write to.
MASKED_PATHS: Final = (
    *(f"/proc/{name}" for name in ("asound", "acpi", "interrupts", "kcore", "keys", "latency_stats")),
    *(f"/proc/{name}" for name in ("timer_list", "timer_stats", "sched_debug", "scsi")),
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
)
READONLY_PATHS: Final = tuple(f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger"))
_PROPAGATION: Final = {
    None: pb.PROPAGATION_PRIVATE,
    "None": pb.PROPAGATION_PRIVATE,
    "HostToContainer": pb.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": pb.PROPAGATION_BIDIRECTIONAL,
}
_DNS_POLICIES: Final = ("ClusterFirst", "ClusterFirstWithHostNet", "Default")
"""DNS policies that are equivalent on a node whose kubelet has no clusterDNS: pods use the node's own resolvers."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts that the kubelet knows about its node and the pod's environment."""

    name: str
    memory: int
    """The node's memory in bytes."""
    api_server: tuple[str, int] = ("10.96.0.1", 443)
    """Address of the `kubernetes` service."""
    resolvers: tuple[str, ...] = ()
    root: str = "/var/lib/kubelet"
    thermal_throttle: tuple[str, ...] = ()
    """The CPUs' existing ``thermal_throttle`` directories, which Kubernetes has masked since 1.33."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A pod of the DaemonSet."""

    name: str
    uid: str
    attempt: int = 0
    """The sandbox's attempt number."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A directory that must exist before the containers start."""

    name: str
    path: str
    """The volume's path on the node."""
    host_type: str | None = None
    """Type of a hostPath volume, or "" if the type is not checked; None for a volume that the kubelet creates."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the kubelet writes into the volume."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An HTTP probe that the kubelet makes."""

    path: str
    port: int
    period: int
    timeout: int
    failures: int
    """Consecutive failures after which the probe counts as failed."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container in the pod, before its first start."""

    name: str
    config: pb.ContainerConfig
    """Configuration for the first start; started() returns the configuration for a later start."""
    probes: Mapping[str, Probe]
    """Probes by kind: startup, liveness, readiness."""
    hosts_file: str
    """Path on the node; the kubelet writes the file once it knows the pod's address."""
    termination_log: str
    """The termination log's path on the node."""

    def started(self, attempt: int) -> pb.ContainerConfig:
        """Returns the configuration for a start: a restarted container is a new one with a higher attempt number."""
        config = pb.ContainerConfig()
        config.CopyFrom(self.config)
        config.metadata.attempt = attempt
        config.annotations["io.kubernetes.container.restartCount"] = str(attempt)
        config.log_path = f"{self.name}/{attempt}.log"
        return config


@dataclass(frozen=True, slots=True)
class KubeletPod:
    """Everything that a kubelet creates for a pod."""

    sandbox: pb.PodSandboxConfig
    """Sandbox configuration without the cgroup's path, which depends on the cgroup driver."""
    group: PodGroup
    volumes: Sequence[Volume]
    init: Sequence[Container]
    containers: Sequence[Container]
    grace: int
    """Seconds between SIGTERM and SIGKILL."""


def translate(objects: Iterable[Document], identity: Identity, node: NodeFacts) -> KubeletPod:
    """Returns the pod for the only DaemonSet among the rendered objects. Raises UnknownFieldError or
    UntranslatableError.
    """
    objects = list(objects)
    (daemonset,) = (one for one in objects if one["kind"] == "DaemonSet")
    files = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    return _Pod(daemonset, files, identity, node).translated()


class _Pod:
    """The translation of one pod."""

    def __init__(
        self, daemonset: Document, files: Mapping[str, Mapping[str, str]], identity: Identity, node: NodeFacts
    ) -> None:
        self._template = Fields.of(daemonset["spec"]["template"])
        self._spec = self._template.inside("spec")
        self._namespace = str(daemonset["metadata"]["namespace"])
        self._files = files
        self._identity = identity
        self._node = node
        self._directory = f"{node.root}/pods/{identity.uid}"
        self._ports: list[pb.PortMapping] = []

    def translated(self) -> KubeletPod:
        for name in OTHERS:
            self._spec.take(name)
        whole = self._spec
        self._check_dns(whole.take("dnsPolicy", "ClusterFirst"))
        whole.take("enableServiceLinks")  # the only service is `kubernetes`; its variables are always set
        self._grace = int(whole.take("terminationGracePeriodSeconds", 30))
        self._network = pb.NODE if whole.take("hostNetwork", False) else pb.POD
        self._read_context(whole.inside("securityContext"))
        self._volumes = {volume.name: volume for volume in map(self._volume, whole.each("volumes"))}
        specs = {kind: whole.each(kind) for kind in ("initContainers", "containers")}
        resources = {kind: [one.take("resources") or {} for one in specs[kind]] for kind in specs}
        priority = str(whole.take("priorityClassName", ""))
        self._resources = PodResources(
            resources["initContainers"], resources["containers"], priority, self._node.memory
        )
        self._group = self._resources.group()
        init, containers = (
            [self._container(one, given) for one, given in zip(specs[kind], resources[kind], strict=True)]
            for kind in specs
        )
        metadata = self._template.inside("metadata")
        sandbox = self._sandbox(metadata.take("labels", {}), metadata.take("annotations", {}))
        self._template.finish()
        return KubeletPod(sandbox, self._group, tuple(self._volumes.values()), init, containers, self._grace)

    @staticmethod
    def _check_dns(policy: str) -> None:
        if policy not in _DNS_POLICIES:
            raise UntranslatableError(f"dnsPolicy {policy}")

    def _read_context(self, context: Fields) -> None:
        self._user = int(context.take("runAsUser", 0))
        self._group_id = context.take("runAsGroup")
        self._seccomp = _profile(context.inside("seccompProfile"))
        self._selinux = _selinux(context.inside("seLinuxOptions"))

    def _sandbox(self, labels: Document, annotations: Document) -> pb.PodSandboxConfig:
        host = self._network == pb.NODE
        security = pb.LinuxSandboxSecurityContext(
            namespace_options=self._namespaces(),
            run_as_user=pb.Int64Value(value=self._user),
            seccomp=self._seccomp,
            selinux_options=self._selinux,
        )
        if self._group_id is not None:
            security.run_as_group.value = self._group_id
        group = self._group
        resources = pb.LinuxContainerResources(
            cpu_shares=group.shares, cpu_period=PERIOD, cpu_quota=group.quota, memory_limit_in_bytes=group.memory
        )
        return pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(
                name=self._identity.name,
                uid=self._identity.uid,
                namespace=self._namespace,
                attempt=self._identity.attempt,
            ),
            hostname="" if host else self._identity.name[:63],
            log_directory=f"/var/log/pods/{self._namespace}_{self._identity.name}_{self._identity.uid}",
            dns_config=pb.DNSConfig(servers=self._node.resolvers),
            port_mappings=self._ports,
            labels={**labels, **self._pod_labels()},
            annotations={**annotations, "kubernetes.io/config.source": "api"},
            linux=pb.LinuxPodSandboxConfig(security_context=security, resources=resources),
        )

    def _namespaces(self) -> pb.NamespaceOption:
        return pb.NamespaceOption(network=self._network, pid=pb.CONTAINER, ipc=pb.POD)

    def _pod_labels(self) -> dict[str, str]:
        return {
            "io.kubernetes.pod.name": self._identity.name,
            "io.kubernetes.pod.namespace": self._namespace,
            "io.kubernetes.pod.uid": self._identity.uid,
        }

    # --- volumes

    def _volume(self, volume: Fields) -> Volume:
        name = str(volume.take("name"))
        if volume.has("hostPath"):
            host = volume.inside("hostPath")
            return Volume(name, str(host.take("path")), host_type=str(host.take("type", "")))
        if volume.has("configMap"):
            files = self._files[str(volume.inside("configMap").take("name"))]
            return Volume(name, self._own("configmap", name), files=files)
        if volume.has("projected"):
            return Volume(name, self._own("projected", name), files=self._projected(volume.inside("projected")))
        if volume.has("emptyDir"):
            return Volume(name, self._own("empty-dir", name))
        return Volume(name, "")  # the field with the volume's type remains unread, so finish() reports it

    def _own(self, kind: str, name: str) -> str:
        return f"{self._directory}/volumes/kubernetes.io~{kind}/{name}"

    def _projected(self, volume: Fields) -> dict[str, str]:
        """Returns the files in a projected volume. Data from the API server is a placeholder, since the fake needs no
        token.
        """
        found = {}
        for source in volume.each("sources"):
            if source.has("serviceAccountToken"):
                token = source.inside("serviceAccountToken")
                token.take("expirationSeconds")  # the token's lifetime, which the runtime does not use
                found[str(token.take("path"))] = "token"
            elif source.has("configMap"):
                config = source.inside("configMap")
                name = str(config.take("name"))
                for item in config.each("items"):
                    key = str(item.take("key"))
                    found[str(item.take("path"))] = self._files.get(name, {}).get(key, f"{name}/{key}")
            elif source.has("downwardAPI"):
                for item in source.inside("downwardAPI").each("items"):
                    path = str(item.take("path"))
                    found[path] = self._field(item.inside("fieldRef"))
        return found

    def _field(self, reference: Fields) -> str:
        path = str(reference.take("fieldPath"))
        known = {
            "metadata.name": self._identity.name,
            "metadata.namespace": self._namespace,
            "metadata.uid": self._identity.uid,
            "spec.nodeName": self._node.name,
        }
        if path not in known:
            raise UntranslatableError(f"fieldPath {path}")
        return known[path]

    # --- containers

    def _container(self, spec: Fields, resources: Document) -> Container:
        for name in OTHERS_OF_CONTAINERS:
            spec.take(name)
        name = str(spec.take("name"))
        ports = [self._port(one) for one in spec.each("ports")]
        named = {port_name: mapping.container_port for port_name, mapping in ports if port_name}
        hosts, ended = f"{self._directory}/etc-hosts", f"{self._directory}/containers/{name}/termination-log"
        mounts = [self._mount(one) for one in spec.each("volumeMounts")]
        own = [("/etc/hosts", hosts), ("/dev/termination-log", ended)]
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image=spec.take("image")),
            command=spec.take("command", []),
            args=spec.take("args", []),
            envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in self._environment(spec).items()],
            mounts=[*mounts, *(pb.Mount(container_path=a, host_path=b, selinux_relabel=True) for a, b in own)],
            labels={**self._pod_labels(), "io.kubernetes.container.name": name},
            annotations=self._annotations(),
            log_path=f"{name}/0.log",
            linux=pb.LinuxContainerConfig(
                resources=self._resources.of(resources),
                security_context=self._rights(spec.inside("securityContext")),
            ),
        )
        probes = {
            kind: self._probe(spec.inside(f"{kind}Probe"), named)
            for kind in ("startup", "liveness", "readiness")
            if spec.has(f"{kind}Probe")
        }
        return Container(name, config, probes, hosts, ended)

    def _annotations(self) -> dict[str, str]:
        return {
            "io.kubernetes.container.restartCount": "0",
            "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
            "io.kubernetes.container.terminationMessagePolicy": "File",
            "io.kubernetes.pod.terminationGracePeriod": str(self._grace),
        }

    def _environment(self, spec: Fields) -> dict[str, str]:
        host, port = self._node.api_server
        found = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        found |= {"KUBERNETES_SERVICE_PORT_HTTPS": str(port), "KUBERNETES_PORT": f"tcp://{host}:{port}"}
        found |= {f"KUBERNETES_PORT_{port}_TCP": f"tcp://{host}:{port}", f"KUBERNETES_PORT_{port}_TCP_PROTO": "tcp"}
        found |= {f"KUBERNETES_PORT_{port}_TCP_PORT": str(port), f"KUBERNETES_PORT_{port}_TCP_ADDR": host}
        for variable in spec.each("env"):
            name = str(variable.take("name"))
            value = variable.take("value")
            found[name] = self._field(variable.inside("valueFrom").inside("fieldRef")) if value is None else str(value)
        return found

    def _port(self, port: Fields) -> tuple[str, pb.PortMapping]:
        protocol = str(port.take("protocol", "TCP"))
        number, host = int(port.take("containerPort")), int(port.take("hostPort", 0))
        mapping = pb.PortMapping(protocol=protocol, container_port=number, host_port=host)
        self._ports.append(mapping)
        return str(port.take("name", "")), mapping

    def _mount(self, mount: Fields) -> pb.Mount:
        volume = self._volumes[str(mount.take("name"))]
        below = str(mount.take("subPath", ""))
        propagation = mount.take("mountPropagation")
        if propagation not in _PROPAGATION:
            raise UntranslatableError(f"mountPropagation {propagation}")
        return pb.Mount(
            container_path=mount.take("mountPath"),
            host_path=f"{volume.path}/{below}" if below else volume.path,
            readonly=mount.take("readOnly", False),
            # The kubelet labels the files that it creates; host paths keep their labels.
            selinux_relabel=volume.host_type is None,
            propagation=_PROPAGATION[propagation],
        )

    def _rights(self, context: Fields) -> pb.LinuxContainerSecurityContext:
        capabilities = context.inside("capabilities")
        privileged = bool(context.take("privileged", False))
        user, group = context.take("runAsUser", self._user), context.take("runAsGroup", self._group_id)
        rights = pb.LinuxContainerSecurityContext(
            capabilities=pb.Capability(
                add_capabilities=capabilities.take("add", []), drop_capabilities=capabilities.take("drop", [])
            ),
            privileged=privileged,
            namespace_options=self._namespaces(),
            selinux_options=self._selinux,
            run_as_user=pb.Int64Value(value=user),
            readonly_rootfs=context.take("readOnlyRootFilesystem", False),
            no_new_privs=not context.take("allowPrivilegeEscalation", True),
            masked_paths=() if privileged else (*MASKED_PATHS, *self._node.thermal_throttle),
            readonly_paths=() if privileged else READONLY_PATHS,
            seccomp=_profile(context.inside("seccompProfile")) if context.has("seccompProfile") else self._seccomp,
            apparmor=_profile(context.inside("appArmorProfile")) if context.has("appArmorProfile") else None,
        )
        if group is not None:
            rights.run_as_group.value = group
        return rights

    def _probe(self, probe: Fields, ports: Mapping[str, int]) -> Probe:
        request = probe.inside("httpGet")
        port = request.take("port")
        return Probe(
            path=str(request.take("path", "/")),
            port=port if isinstance(port, int) else ports[port],
            period=int(probe.take("periodSeconds", 10)),
            timeout=int(probe.take("timeoutSeconds", 1)),
            failures=int(probe.take("failureThreshold", 3)),
        )


def _profile(profile: Fields) -> pb.SecurityProfile:
    """Returns a seccomp or AppArmor profile; the kubelet's default for seccomp is unconfined."""
    kind = profile.take("type", "Unconfined")
    if kind not in ("RuntimeDefault", "Unconfined"):
        raise UntranslatableError(f"unsupported profile type {kind}")
    return pb.SecurityProfile(profile_type=str(kind))


def _selinux(options: Fields) -> pb.SELinuxOption:
    return pb.SELinuxOption(**{name: options.take(name, "") for name in ("user", "role", "type", "level")})
