# SPDX-License-Identifier: Apache-2.0
"""Validation of opaque parameters when tenants create objects, by the same rules that the driver applies later."""

import itertools
import re
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from dra_frontend.allocation.claim import RefusedError, Source
from dra_frontend.allocation.parameters import CpuConfig, MemoryConfig, ParameterValue, Section
from dra_frontend.allocation.resolve import cpu_parameters
from dra_frontend.devices.model import DeviceKind
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.names import CPU_DRIVER, DRIVERS, FORMER_PARAMETERS, MEMORY_DRIVER, TOLERATE_MISSING_ANNOTATION
from pydantic import ValidationError

from tests.chart.helm import CHART, Document, render
from tests.chart.policies import ALLOWED, NOT_MATCHED, binding, judge, messages, policy

PARAMETERS = policy("parameters")
TOLERATE = policy("tolerate-missing")
SECTIONS: dict[str, type[Section]] = {CPU_DRIVER: CpuConfig, MEMORY_DRIVER: MemoryConfig}
EXAMPLES = sorted((CHART.parents[1] / "examples").glob("*.yaml"))


def opaque(driver: str, parameters: Any, requests: tuple[str, ...] = ()) -> Document:
    """Returns an entry for ``config``."""
    return {"opaque": {"driver": driver, "parameters": parameters}} | ({"requests": [*requests]} if requests else {})


def said(driver: str, section: Any, requests: tuple[str, ...] = ()) -> Document:
    """Returns an entry for ``config`` whose parameters contain this section for the driver."""
    return opaque(driver, {"apiVersion": "v1alpha1", SECTIONS[driver].KEY: section}, requests)


def claim(*config: Document) -> Document:
    """Returns a claim."""
    return {"kind": "ResourceClaim", "spec": {"devices": {"config": [*config]} if config else {}}}


def verdict(*config: Document) -> str:
    """Returns the server's decision when a claim is created."""
    return judge(PARAMETERS, "CREATE", claim(*config))


def accepted(driver: str, section: Any) -> bool:
    """Returns True if the driver itself accepts a section: its fields, and a CPU list if it has one."""
    try:
        stated = SECTIONS[driver].model_validate(section)
        if isinstance(stated, CpuConfig) and stated.cpuset is not None:
            cpu_parameters({"cpuset": ParameterValue(stated.cpuset, Source.CLAIM)}, DeviceKind.MACHINE)
    except (ValidationError, RefusedError):
        return False
    return True


def literals(annotation: Any) -> list[Any]:
    """Returns the allowed values of a field that has a fixed list of them."""
    inner = [one for one in get_args(annotation) if get_origin(one) is Literal]
    return [value for one in inner for value in get_args(one)]


FIELDS = [
    (driver, field.alias or name, literals(field.annotation))
    for driver, section in SECTIONS.items()
    for name, field in section.model_fields.items()
] + [(CPU_DRIVER, name.old, [*name.words]) for name in FORMER_PARAMETERS]
ODD: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 0.5, 1.5, 8191, 8192, 1 << 40, 504),
    *("", "x", "off", "on", "no", "false", "0", "0-3,8", "8,0-3", "5-", " 0-3 ", "0-9000", [], ["packed"], {}),
    *({"path": path} for path in ("/dev/hugepages", "/a/../b", "/proc/x", "/dev/", "//", "relative", "/a\n", 1)),
    *({"path": "/a", "mode": mode} for mode in ("0770", "1777", "7777", "rwx", None, 770)),
    *({"mode": "1"}, {"path": "/" + "a" * 4095}, {"path": "/a", "size": 1}),
]


@pytest.mark.parametrize(("driver", "field", "values"), FIELDS, ids=lambda value: str(value)[:20])
def test_policy_and_driver_agree_on_every_value(driver: str, field: str, values: list[Any]) -> None:
    """A field or a value that only the policy or only the driver accepts makes this test fail."""
    for value in [*values, *ODD, *itertools.chain(*(one[2] for one in FIELDS))]:
        section = {field: value}
        judged = verdict(said(driver, section))
        assert (judged == ALLOWED) == accepted(driver, section), (section, judged)


@given(
    st.dictionaries(st.sampled_from([one[1] for one in FIELDS] + ["more"]), st.sampled_from(ODD), max_size=4), st.data()
)
def test_policy_and_driver_agree_on_sections(section: Document, data: st.DataObject) -> None:
    """The policy and the driver agree for any combination of fields in a section."""
    driver = data.draw(st.sampled_from(DRIVERS))
    assert (verdict(said(driver, section)) == ALLOWED) == accepted(driver, section)


def test_every_example_is_allowed() -> None:
    """Documented manifests can be applied."""
    for path in EXAMPLES:
        for document in yaml.safe_load_all(path.read_text()):
            if document and document["kind"].startswith("ResourceClaim"):
                assert judge(PARAMETERS, "CREATE", document) == ALLOWED, path


@pytest.mark.parametrize("document", [one for one in render() if one["kind"] == "DeviceClass"])
def test_the_charts_own_classes_are_allowed(document: Document) -> None:
    """The classes contain no parameters for the driver."""
    assert judge(PARAMETERS, "CREATE", document) == ALLOWED


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([opaque(CPU_DRIVER, {"cpuConfig": {}})], "parameters must be {apiVersion: v1alpha1, cpuConfig: {...}}"),
        ([opaque(CPU_DRIVER, {"apiVersion": "v1", "cpuConfig": {}})], "parameters must be"),
        ([opaque(CPU_DRIVER, {"apiVersion": "v1alpha1"})], "parameters must be"),
        ([opaque(CPU_DRIVER, {"apiVersion": "v1alpha1", "memoryConfig": {}})], "parameters must be"),
        ([opaque(CPU_DRIVER, {"apiVersion": "v1alpha1", "cpuConfig": {}, "x": 1})], "parameters must be"),
        ([opaque(CPU_DRIVER, {"apiVersion": "v1alpha1", "cpuConfig": []})], "parameters must be"),
        ([opaque(CPU_DRIVER, ["x"])], "parameters must be"),
        ([opaque(CPU_DRIVER, "x")], "parameters must be"),
        ([said(CPU_DRIVER, {"l4": "x"})], "cpuConfig: unknown field l4; known fields are cpuset, strategy"),
        (
            [said(MEMORY_DRIVER, {"strategy": "packed"})],
            "memoryConfig: unknown field strategy; known fields are binding",
        ),
        ([said(CPU_DRIVER, {"l3": "always"})], "l3 must be one of preferred, required, ignore; got 'always'"),
        ([said(CPU_DRIVER, {"l3": "a" * 41})], "l3 must be one of preferred, required, ignore; got a longer text"),
        (
            [said(CPU_DRIVER, {"quota": True})],
            "quota must be one of lift, keep; got the boolean true (YAML reads on, yes",
        ),
        (
            [said(CPU_DRIVER, {"irqs": False})],
            "irqs must be one of move, keep; got the boolean false (YAML reads off, no",
        ),
        ([said(CPU_DRIVER, {"poolCPUs": 0})], "poolCPUs must be one of none, all, numa; got a number"),
        ([said(CPU_DRIVER, {"poolCPUs": "pool"})], "poolCPUs must be one of none, all, numa; got 'pool'"),
        ([said(CPU_DRIVER, {"shared": "x"})], "shared must be one of none, all, numa; got 'x'"),
        (
            [said(CPU_DRIVER, {"isolated": "only", "isolcpus": "only"})],
            "cpuConfig.isolated is the former name of isolcpus, and both are given; remove isolated",
        ),
        (
            [said(CPU_DRIVER, {"poolCPUs": "all", "shared": "pool"})],
            "cpuConfig.shared is the former name of poolCPUs, and both are given; remove shared",
        ),
        ([said(MEMORY_DRIVER, {"protect": ["low"]})], "protect must be one of none, low, min; got a list or a map"),
        ([said(CPU_DRIVER, {"cpuset": -1})], "in ascending order"),
        ([said(MEMORY_DRIVER, {"mount": {"path": "/x", "mode": 504}})], "without quotes YAML reads it as 504"),
        ([said(CPU_DRIVER, {"fullPhysicalCores": "true"})], "must be true or false, without quotes"),
        ([said(CPU_DRIVER, {"cpuset": "8,0-3"})], "in ascending order"),
        ([said(CPU_DRIVER, {"cpuset": "0-65535," * 1000})], "in ascending order"),
        ([said(MEMORY_DRIVER, {"high": 2})], "above 0 and up to 1"),
        ([said(MEMORY_DRIVER, {"mount": "/x"})], "memoryConfig.mount must be {path"),
        ([said(MEMORY_DRIVER, {"mount": {"path": "/proc/x"}})], "not one of the runtime's own"),
        ([said(MEMORY_DRIVER, {"mount": {"path": "/x", "mode": "rwx"}})], "octal permissions in quotes"),
        ([said(CPU_DRIVER, {}, ("a",)), said(CPU_DRIVER, {}, ("b", "a"))], "two entries of parameters for one request"),
        ([said(CPU_DRIVER, {}), said(CPU_DRIVER, {"l3": "ignore"})], "or two for all requests"),
    ],
)
def test_an_error_contains_a_remedy(config: list[Document], text: str) -> None:
    """The error is a single sentence in the output of "kubectl apply", and is the same for a template."""
    assert text in verdict(*config)
    template = {"kind": "ResourceClaimTemplate", "spec": {"spec": claim(*config)["spec"]}}
    assert text in judge(PARAMETERS, "CREATE", template)


@pytest.mark.parametrize(
    "config",
    [
        [],
        [opaque("gpu.example", {"anything": ["at", "all"]})],
        [opaque(CPU_DRIVER, {})],
        [
            said(CPU_DRIVER, {"l3": "ignore"}),
            said(CPU_DRIVER, {"l3": "required"}, ("a",)),
            said(MEMORY_DRIVER, {}, ("a",)),
        ],
        [said(CPU_DRIVER, {"cpuset": "0-3"}, ("a",)), said(CPU_DRIVER, {"cpuset": 8}, ("b",))],
        [said(CPU_DRIVER, {"shared": word}, (word,)) for word in ("none", "pool", "numa")],
        [said(CPU_DRIVER, {"isolated": "only", "isolcpus": None, "shared": None, "poolCPUs": "all"})],
        [said(CPU_DRIVER, {"quota": word}, (str(word),)) for word in ("lift", "keep", "off", False)],
        [{"requests": ["a"]}],
    ],
)
def test_valid_and_foreign_parameters_are_allowed(config: list[Document]) -> None:
    """Other drivers' parameters, no parameters, and an entry for all requests together with an entry for one named
    request are allowed.
    """
    assert verdict(*config) == ALLOWED
    assert judge(PARAMETERS, "CREATE", {"kind": "ResourceClaim", "spec": {}}) == ALLOWED


def test_a_class_may_not_name_cpus() -> None:
    """All claims that use the class would request the same CPUs."""
    device_class: Document = {"kind": "DeviceClass", "spec": {"config": [said(CPU_DRIVER, {"cpuset": "0-3"})]}}
    assert (
        judge(PARAMETERS, "CREATE", device_class)
        == "cpuConfig.cpuset may only be set in a claim, not in a DeviceClass: remove it here"
    )
    device_class["spec"]["config"] = [said(CPU_DRIVER, {"quota": "keep"})]
    assert judge(PARAMETERS, "CREATE", device_class) == ALLOWED


def test_existing_objects_can_be_updated() -> None:
    """The finalizer can be removed from a claim that the policy would reject; the claim's spec cannot be changed to
    another invalid one.
    """
    old = claim(said(CPU_DRIVER, {"l4": "x"}))
    assert judge(PARAMETERS, "UPDATE", old | {"metadata": {"finalizers": []}}, old) == NOT_MATCHED
    assert "unknown field l5" in judge(PARAMETERS, "UPDATE", claim(said(CPU_DRIVER, {"l5": "x"})), old)


def test_messages_are_valid_for_the_server() -> None:
    """Each message is one line. Every ``messageExpression`` is accompanied by a static ``message``, which the server
    uses if the expression fails.
    """
    for name in ("own-node", "own-claims", "own-events", "parameters", "tolerate-missing"):
        assert all("\n" not in message and message.strip() for message in messages(policy(name)))
    assert len(list(messages(PARAMETERS))) == len(PARAMETERS["validations"])


def pod(annotation: str | None) -> Document:
    """Returns a pod, optionally with the annotation."""
    return {"kind": "Pod", "metadata": {"annotations": {TOLERATE_MISSING_ANNOTATION: annotation}} if annotation else {}}


def test_tenants_cannot_start_pods_without_the_plugin() -> None:
    """The value of the annotation does not matter, since the runtime only checks that it exists. The policy does not
    apply to pods in system namespaces.
    """
    for value in ("true", "false", "1"):
        assert "is for system pods in dra-driver-numa, kube-system only" in judge(TOLERATE, "CREATE", pod(value))
    assert judge(TOLERATE, "CREATE", pod(None)) == NOT_MATCHED
    assert judge(TOLERATE, "UPDATE", pod("true"), pod("true")) == NOT_MATCHED
    assert "remove it" in judge(TOLERATE, "UPDATE", pod("true"), pod(None))
    values = {"admissionPolicy": {"tolerateMissing": {"namespaces": ["cni", "kube-system"]}}}
    (expression,) = binding("tolerate-missing", values)["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert expression == {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["dra-driver-numa", "cni", "kube-system"],
    }


@pytest.mark.parametrize("name", ["parameters", "tolerateMissing"])
def test_a_policy_can_be_left_out(name: str) -> None:
    """Each policy has its own switch; the others are still rendered."""
    documents = render({"admissionPolicy": {name: {"enabled": False}}})
    ends = {
        re.sub(".*dra-driver-numa-", "", one["metadata"]["name"])
        for one in documents
        if "AdmissionPolicy" in one["kind"]
    }
    gone = {"parameters": "parameters", "tolerateMissing": "tolerate-missing"}[name]
    assert ends == {"own-node", "own-claims", "own-events", "parameters", "tolerate-missing"} - {gone}
