# SPDX-License-Identifier: Apache-2.0
"""The chart's own values, as a model: what ``values.schema.json`` says beside the configuration of the services.

Objects of the Kubernetes API (affinity, resources, ...) are checked by the API server, not here. Texts in which people
make mistakes are checked in ``_checks.tpl``, in words: of a pattern Helm shows the pattern.
"""

from typing import Annotated, Any, Literal

from numa_contract.config import Config
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Kubernetes = dict[str, Any]
"""An object or a part of one that goes to the API server as it is."""
Texts = dict[str, str]
Port = Annotated[int, Field(ge=1, le=65535)]
Duration = Annotated[str, Field(pattern=r"^[0-9]+(ms|s|m|h)$")]
ExtendedResource = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
"""As in ``resources`` of a container; its domain is not one of Kubernetes."""
Fraction = Annotated[str, Field(pattern=r"^(100|[1-9]?[0-9])%$")] | Annotated[int, Field(ge=0)]


class Values(BaseModel):
    """Base of all parts: camelCase, unknown keys refused, descriptions from the lines below the fields."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )


class Image(Values):
    """Where a container's image comes from."""

    repository: str
    """Lower case; its registry gives way to global.imageRegistry."""
    tag: str
    """Empty: the chart's appVersion."""
    digest: str
    """Wins over the tag."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"]


class Resources(Values):
    """As in a container of a pod."""

    requests: dict[str, str | int | float]
    limits: dict[str, str | int | float]
    claims: list[Kubernetes] = []


class Component(Values):
    """One container of the pod."""

    image: Image
    port: Port
    """TCP port in the pod's own network namespace."""
    resources: Resources
    extra_args: list[str]
    extra_env: list[Kubernetes]
    extra_volume_mounts: list[Kubernetes]


class HugePages(Values):
    """Hugepages of one size."""

    size: str
    count: Annotated[int, Field(ge=0)]
    node: Annotated[int, Field(ge=0)] | None = None
    """NUMA node; left out: spread evenly."""


class HugePageProvision(Values):
    """The init container that sets the number of hugepages."""

    enabled: bool
    """Set the number of hugepages in an init container, before anything is published."""
    pages: list[HugePages]


class LabelPolicy(Values):
    """The MutatingAdmissionPolicy that labels claims for hugepages on demand."""

    enabled: bool
    classes: list[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]]
    """Further DeviceClasses, beside the chart's own."""


class HugepagesOnDemand(Values):
    """What the pools of driverConfig.hugepagesOnDemand need."""

    resources: Resources
    """Of the helper container that writes the pools."""
    label_policy: LabelPolicy


class PartialImage(Values):
    """What a group has of another image."""

    repository: str | None = None
    tag: str | None = None
    digest: str | None = None


class GroupComponent(Values):
    """One container of a group's pods."""

    image: PartialImage


class Group(Values):
    """Nodes that differ. What is left out is as for all other nodes."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    node_selector: Annotated[Texts, Field(min_length=1)] | None = None
    """Left out: nodes with the label dra-driver-numa/group of this name."""
    driver_config: Config | None = None
    frontend: GroupComponent | None = None
    backend: GroupComponent | None = None
    hugepage_provision: HugePageProvision | None = None


class Creation(Values):
    """Objects that may be there already, made by somebody else."""

    create: bool


class Switch(Values):
    """Something that is on or off."""

    enabled: bool


class TolerateMissing(Switch):
    """Who may start pods without the plugin, where the runtime requires it."""

    namespaces: list[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]]
    """Beside the driver's own."""


class AdmissionPolicy(Values):
    """What RBAC cannot say, as ValidatingAdmissionPolicies."""

    enabled: bool
    """Let the driver's account write slices and claims' status of its own node only, and Events about it and pods."""
    parameters: Switch
    """Check the opaque parameters of claims, templates and classes."""
    tolerate_missing: TolerateMissing


class ExistingPods(Switch):
    """Claims for pods of labelled namespaces that have none, as a MutatingAdmissionPolicy."""

    sizes: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """Numbers of CPUs that those namespaces have templates for."""


class RollingUpdate(Values):
    """As in a DaemonSet."""

    max_surge: Fraction
    max_unavailable: Fraction


class UpdateStrategy(Values):
    """As in a DaemonSet."""

    type: Literal["RollingUpdate", "OnDelete"]
    rolling_update: RollingUpdate | None = None


class ResourceQuota(Values):
    """Room for pods of the chart's priority class."""

    enabled: bool
    pods: Annotated[int, Field(ge=1)]


class Probe(Values):
    """When a probe fails."""

    period_seconds: Annotated[int, Field(ge=1)]
    timeout_seconds: Annotated[int, Field(ge=1)]
    failure_threshold: Annotated[int, Field(ge=1)]


class Probes(Values):
    """The three probes of both containers; null: none of the kind."""

    startup: Probe | None = None
    liveness: Probe | None = None
    readiness: Probe | None = None


class DeviceClasses(Values):
    """The DeviceClasses of the cluster."""

    create: bool
    hugepage_sizes: list[str]
    """One class dra.hugepages-<size> each."""
    far_memory: bool
    """Classes for NUMA nodes without CPUs as well."""
    extended_resource: Literal[""] | ExtendedResource
    """A class of single CPUs as this extended resource; empty: none."""


class HostHugepages(Values):
    """Hugepages that host processes hold."""

    detect: bool
    """Mount the node's cgroup tree into the frontend, read-only."""


class HostInterrupts(Values):
    """Interrupts of devices, and unbound kernel workers."""

    mount: bool
    """Mount what moves them into the backend."""


class Doctor(Values):
    """The command "dra-frontend doctor" in the driver's pod."""

    kubelet_proxy: bool
    """Grant get on nodes/proxy, by which it reads the kubelet's configuration."""


class NetworkPolicy(Values):
    """Who may speak with the pods."""

    enabled: bool
    metrics_from: list[Kubernetes]
    """Peers that may read metrics; empty: everybody."""
    api_server_ports: Annotated[list[Port], Field(min_length=1)]
    api_server_cidrs: Annotated[list[str], Field(alias="apiServerCIDRs")]
    """Where the API server is; empty: anywhere."""


class Monitor(Values):
    """A PodMonitor of the Prometheus operator."""

    enabled: bool
    interval: Duration
    labels: Texts


class PrometheusRule(Values):
    """The alerts."""

    enabled: bool
    labels: Texts
    extra_rules: list[Kubernetes]
    runbook_url: Annotated[str, Field(alias="runbookURL", pattern=r"^[^\s\"'#]+$")]
    """Address of docs/runbooks.md; each alert links to its part."""


class Dashboard(Values):
    """The ConfigMap with the Grafana dashboard."""

    enabled: bool
    labels: Texts
    annotations: Texts


class Metrics(Values):
    """Objects for those who watch."""

    pod_monitor: Monitor
    prometheus_rule: PrometheusRule
    dashboard: Dashboard


class OpenShift(Values):
    """What OpenShift wants."""

    scc: Creation
    """The SecurityContextConstraints."""


class Tests(Values):
    """The pod of ``helm test``."""

    create: bool
    node_selector: Texts


class Global(BaseModel):
    """What a chart shares with those that it depends on; others may have values of their own here."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel, use_attribute_docstrings=True)

    image_registry: str | None = None
    """Takes the place of the registry in both repositories: a mirror."""


class ChartValues(Values):
    """Every value of the chart."""

    name_override: str
    fullname_override: str
    namespace_override: str
    image_pull_secrets: list[Kubernetes] | None = None
    frontend: Component
    backend: Component
    driver_config: Config
    """The configuration file of both services, docs/configuration.md."""
    groups: list[Group]
    service_account: Creation
    """Who the frontend is for the API server; its name is the full name."""
    rbac: Creation
    """What it may do there."""
    admission_policy: AdmissionPolicy
    device_classes: DeviceClasses
    existing_pods: ExistingPods
    update_strategy: UpdateStrategy
    min_ready_seconds: Annotated[int, Field(ge=0)]
    termination_grace_period_seconds: Annotated[int, Field(ge=1)]
    priority_class_name: str | None = None
    resource_quota: ResourceQuota
    pod_annotations: Texts | None = None
    pod_labels: Texts | None = None
    node_selector: Texts | None = None
    tolerations: list[Kubernetes] | None = None
    affinity: Kubernetes | None = None
    host_network: bool
    """The pods use the network of their node: for nodes on which the CNI itself has claims."""
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default"]
    selinux_type: Annotated[str, Field(alias="selinuxType", pattern=r"^[a-z0-9_]*$")]
    app_armor_profile: Literal["", "RuntimeDefault", "Unconfined"]
    probes: Probes
    extra_volumes: list[Kubernetes] | None = None
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
    """Helm hands it on to a chart that is a dependency of another."""
