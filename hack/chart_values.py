# SPDX-License-Identifier: Apache-2.0
"""Model of the chart's values, from which ``values.schema.json`` and the table in the chart's README are generated.

Kubernetes API objects (affinity, resources, ...) are not validated here, since the API server does that. Strings that
are often misspelled are validated in ``_checks.tpl`` instead of by a pattern: Helm would only print the pattern that
does not match, while ``_checks.tpl`` explains the mistake.
"""

from typing import Annotated, Any, Literal

from numa_contract.config import Config
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Kubernetes = dict[str, Any]
"""An object of the Kubernetes API, or a part of one, that is rendered unchanged."""
Texts = dict[str, str]
Port = Annotated[int, Field(ge=1, le=65535)]
Duration = Annotated[str, Field(pattern=r"^[0-9]+(ms|s|m|h)$")]
ExtendedResource = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
"""Name of an extended resource, ``domain/name``, as in a container's ``resources``."""
Fraction = Annotated[str, Field(pattern=r"^(100|[1-9]?[0-9])%$")] | Annotated[int, Field(ge=0)]


class Values(BaseModel):
    """Base of all models. Keys are in camelCase, unknown keys are rejected, and descriptions come from the fields'
    docstrings.
    """

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )


class Image(Values):
    """The image of a container."""

    repository: str
    """Repository of the image, in lower case. global.imageRegistry replaces its registry."""
    tag: str
    """Tag of the image. If empty, the chart's appVersion is used."""
    digest: str
    """Digest of the image, sha256:... If set, the tag is ignored."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"]
    """Policy for pulling the image."""


class Resources(Values):
    """Resources of a container."""

    requests: dict[str, str | int | float]
    limits: dict[str, str | int | float]
    claims: list[Kubernetes] = []


class Component(Values):
    """One container of the pod."""

    image: Image
    port: Port
    """TCP port for probes, in the pod's network namespace. The frontend's port also serves all metrics."""
    resources: Resources
    """Requests and limits of the container."""
    extra_args: list[str]
    """Additional arguments for the process."""
    extra_env: list[Kubernetes]
    """Additional environment variables for the container."""
    extra_volume_mounts: list[Kubernetes]
    """Additional volume mounts for the container; see extraVolumes."""


class HugePages(Values):
    """Hugepages of one size."""

    size: str
    """Page size, for example 2Mi."""
    count: Annotated[int, Field(ge=0)]
    """Total number of pages, including those that exist already."""
    node: Annotated[int, Field(ge=0)] | None = None
    """NUMA node. If it is not set, the pages are divided evenly among the NUMA nodes."""


class HugePageProvision(Values):
    """The init container that sets the number of hugepages."""

    enabled: bool
    """Runs an init container that sets the number of hugepages before the driver publishes any devices."""
    pages: list[HugePages]
    """Number of hugepages for each page size and NUMA node."""


class LabelPolicy(Values):
    """The MutatingAdmissionPolicy that labels claims for hugepages on demand."""

    enabled: bool
    """Labels claims for hugepages on demand with a MutatingAdmissionPolicy. If false, set the label yourself."""
    classes: list[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]]
    """Your own DeviceClasses for hugepages on demand, in addition to the chart's."""


class HugepagesOnDemand(Values):
    """Values for the pools in driverConfig.hugepagesOnDemand. Without such pools they have no effect."""

    resources: Resources
    """Requests and limits of the helper container that changes the number of hugepages."""
    label_policy: LabelPolicy


class PartialImage(Values):
    """Image values that a group overrides."""

    repository: str | None = None
    tag: str | None = None
    digest: str | None = None


class GroupComponent(Values):
    """One container of a group's pods."""

    image: PartialImage


class Group(Values):
    """Nodes that need different values. A key that a group omits has the same value as on all other nodes."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    node_selector: Annotated[Texts, Field(min_length=1)] | None = None
    """Labels that select the group's nodes. If they are not set, the label
    dra-driver-numa/group selects the nodes, with the group's name as its value.
    """
    driver_config: Config | None = None
    frontend: GroupComponent | None = None
    backend: GroupComponent | None = None
    hugepage_provision: HugePageProvision | None = None


class Creation(Values):
    """Objects that the chart creates if ``create`` is true."""

    create: bool


class ServiceAccount(Creation):
    """The ServiceAccount of the frontend. The backend has no token."""

    name: Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
    """Name of the ServiceAccount. If empty, the full name of the release is used."""
    annotations: Texts
    """Annotations of the ServiceAccount that the chart creates."""


class Switch(Values):
    """A part of the chart that can be enabled."""

    enabled: bool


class TolerateMissing(Switch):
    """The ValidatingAdmissionPolicy for the annotation dra-driver-numa/tolerate-missing."""

    namespaces: list[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]]
    """Namespaces, in addition to the driver's own, where pods may have this annotation."""


class AdmissionPolicy(Values):
    """ValidatingAdmissionPolicies for rules that RBAC cannot express."""

    enabled: bool
    """Restricts the driver's account to its own node's slices and claim statuses, and to Events about that node and
    about pods.
    """
    parameters: Switch
    """Checks the opaque parameters of claims, templates and classes when they are created."""
    tolerate_missing: TolerateMissing


class ExistingPods(Switch):
    """The MutatingAdmissionPolicy that adds claims to Guaranteed pods in labelled namespaces."""

    sizes: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """CPU counts for which the labelled namespaces have a ResourceClaimTemplate."""


class RollingUpdate(Values):
    """The ``rollingUpdate`` of a DaemonSet."""

    max_surge: Fraction
    """Number or percentage of nodes where a second pod may start before the first one is terminated."""
    max_unavailable: Fraction
    """Number or percentage of nodes that may be without a ready pod."""


class UpdateStrategy(Values):
    """The ``updateStrategy`` of a DaemonSet."""

    type: Literal["RollingUpdate", "OnDelete"]
    """Update strategy. OnDelete replaces a pod only after it has been deleted."""
    rolling_update: RollingUpdate | None = None
    """How many nodes are updated at a time."""


class ResourceQuota(Values):
    """A ResourceQuota that allows pods with the chart's priority class."""

    enabled: bool
    """Creates a ResourceQuota, which some providers require for pods with a critical priority class."""
    pods: Annotated[int, Field(ge=1)]
    """Number of pods. It must be at least twice the number of nodes, since an update runs two pods on each node."""


class Probe(Values):
    """Timing of a probe."""

    period_seconds: Annotated[int, Field(ge=1)]
    timeout_seconds: Annotated[int, Field(ge=1)]
    failure_threshold: Annotated[int, Field(ge=1)]


class Probes(Values):
    """Probes of both containers."""

    startup: Probe | None = None
    """Startup probe; null disables it."""
    liveness: Probe | None = None
    """Liveness probe; null disables it."""
    readiness: Probe | None = None
    """Readiness probe; null disables it."""


class DeviceClasses(Values):
    """The DeviceClasses of the cluster."""

    create: bool
    """Creates the DeviceClasses. Set it to false if another release has created them."""
    hugepage_sizes: list[str]
    """Page sizes for which the chart creates a class dra.hugepages-<size>."""
    far_memory: bool
    """Creates classes for memory on NUMA nodes without CPUs (CXL, HBM)."""
    extended_resource: Literal[""] | ExtendedResource
    """Extended resource that pods use to request individual CPUs without a claim. If empty, CPUs cannot be
    requested in this way.
    """


class HostHugepages(Values):
    """Hugepages that host processes use."""

    detect: bool
    """Detects hugepages that host processes use, and does not offer them to claims. For this, the frontend mounts the
    cgroup tree read-only.
    """


class HostInterrupts(Values):
    """Values for device interrupts and unbound kernel workers."""

    mount: bool
    """Moves interrupts and kernel workers away from claimed CPUs. For this, the backend mounts the kernel files that
    control them.
    """


class Doctor(Values):
    """The command "dra-frontend doctor" in the driver's pod."""

    kubelet_proxy: bool
    """Grants get on nodes/proxy, which the doctor uses to read the kubelet's configuration. values.yaml explains the
    risk.
    """


class NetworkPolicy(Values):
    """The NetworkPolicy for the pods."""

    enabled: bool
    """Allows connections to the metrics port and to the API server, and nothing else."""
    metrics_from: list[Kubernetes]
    """NetworkPolicyPeers that may read metrics. If empty, all peers may."""
    api_server_ports: Annotated[list[Port], Field(min_length=1)]
    """Ports of the API server. If its port is not in the list, the driver cannot publish devices."""
    api_server_cidrs: Annotated[list[str], Field(alias="apiServerCIDRs")]
    """Addresses of the API server. If empty, connections to any address are allowed."""


class Monitor(Values):
    """A PodMonitor of the Prometheus operator."""

    enabled: bool
    """Creates a PodMonitor."""
    interval: Duration
    """Time between two scrapes."""
    labels: Texts
    """Labels that your Prometheus uses to select the PodMonitor."""


class PrometheusRule(Values):
    """A PrometheusRule with the alerts."""

    enabled: bool
    """Creates a PrometheusRule with the driver's alerts."""
    labels: Texts
    """Labels that your Prometheus uses to select the rules."""
    extra_rules: list[Kubernetes]
    """Your own rules. The chart adds them to the PrometheusRule as a separate group."""
    runbook_url: Annotated[str, Field(alias="runbookURL", pattern=r"^(https?://[^\s\"'#]+)?$")]
    """Address at which your organization serves docs/symptoms.md. Each alert links to its section of that page. If
    empty, the alerts link to the page in the repository that the chart was released from. A chart from a checkout has
    no such default, and requires this value if the alerts are enabled.
    """


class Dashboard(Values):
    """A ConfigMap with the Grafana dashboard."""

    enabled: bool
    """Creates a ConfigMap with the dashboard."""
    labels: Texts
    """Labels that Grafana's sidecar uses to find the dashboard."""
    annotations: Texts
    """Annotations of the ConfigMap, for example the one that sets the folder in Grafana."""


class Metrics(Values):
    """Objects for the Prometheus operator and Grafana."""

    pod_monitor: Monitor
    prometheus_rule: PrometheusRule
    dashboard: Dashboard


class OpenShift(Values):
    """Objects for OpenShift."""

    scc: Creation
    """Creates a SecurityContextConstraints object that allows the driver's pods."""


class Tests(Values):
    """The pod of ``helm test``."""

    create: bool
    """Creates the pod of "helm test", which claims a CPU and checks which CPUs it runs on."""
    node_selector: Texts
    """Nodes where this pod may run."""


class Global(BaseModel):
    """Values that a chart shares with its dependencies. Other charts may put their own values here."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel, use_attribute_docstrings=True)

    image_registry: str | None = None
    """Replaces the registry in both image repositories, for example with a mirror."""


class ChartValues(Values):
    """Every value of the chart."""

    name_override: str
    """Replaces the chart's name in object names."""
    fullname_override: str
    """Replaces the full name, which consists of the release name and the chart name."""
    namespace_override: str
    """Namespace for all objects. If empty, the release's namespace is used."""
    image_pull_secrets: list[Kubernetes] | None = None
    """Secrets that the kubelet uses to pull the images."""
    frontend: Component
    backend: Component
    driver_config: Config
    """The configuration file of both containers; see docs/configuration.md."""
    groups: list[Group]
    """Groups of nodes that need different values; see docs/fleet.md."""
    service_account: ServiceAccount
    rbac: Creation
    """Creates the ClusterRole of the ServiceAccount, and the ClusterRoleBinding."""
    admission_policy: AdmissionPolicy
    device_classes: DeviceClasses
    existing_pods: ExistingPods
    update_strategy: UpdateStrategy
    min_ready_seconds: Annotated[int, Field(ge=0)]
    """Number of seconds for which a new pod must be ready before the next node is updated."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1)]
    """Number of seconds after which a terminating pod is killed."""
    priority_class_name: str | None = None
    """PriorityClass of the pods."""
    resource_quota: ResourceQuota
    pod_annotations: Texts | None = None
    """Additional annotations for the pods."""
    pod_labels: Texts | None = None
    """Additional labels for the pods."""
    node_selector: Texts | None = None
    """Nodes where the driver runs."""
    tolerations: list[Kubernetes] | None = None
    """Tolerations of the pods. The default tolerates every taint."""
    affinity: Kubernetes | None = None
    """Affinity of the pods."""
    host_network: bool
    """Uses the node's network, for nodes where the CNI plugin itself has claims."""
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default"]
    """DNS policy of the pods."""
    selinux_type: Annotated[str, Field(alias="selinuxType", pattern=r"^[a-z0-9_]*$")]
    """SELinux type of the containers. If empty, the runtime's default is used, which may not write to cgroups."""
    app_armor_profile: Literal["", "RuntimeDefault", "Unconfined"]
    """AppArmor profile of the containers. If empty, the runtime applies its default profile on nodes that have
    AppArmor.
    """
    probes: Probes
    extra_volumes: list[Kubernetes] | None = None
    """Additional volumes for the pods."""
    hugepage_provision: HugePageProvision
    hugepages_on_demand: HugepagesOnDemand
    host_hugepages: HostHugepages
    host_interrupts: HostInterrupts
    doctor: Doctor
    metrics: Metrics
    network_policy: NetworkPolicy
    open_shift: Annotated[OpenShift, Field(alias="openshift")]
    tests: Tests
    global_: Annotated[Global | None, Field(alias="global")] = None
    """Values that Helm passes from a chart to its dependencies."""
