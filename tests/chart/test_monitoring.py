# SPDX-License-Identifier: Apache-2.0
"""Alerts and dashboard use existing metrics, in expressions that Prometheus can parse."""

import json
import re
import time
from types import SimpleNamespace
from typing import cast

import promql_parser
import pytest
import yaml
from dra_frontend import telemetry as frontend
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.publisher import Publisher
from nri_backend.telemetry import GAUGES
from nri_backend.telemetry import Telemetry as BackendTelemetry
from numa_contract import __version__
from numa_contract.config import Config
from numa_contract.names import DRIVERS
from numa_contract.reports import BackendStatus
from prometheus_client.parser import text_string_to_metric_families

from tests.chart.helm import CHART, EVERYTHING, RULES, Document, only, render
from tests.rigs.symptoms import SECTIONS, slug
from tests.rigs.trees import MemoryTree, captured

PAGE = (CHART.parents[1] / "docs/metrics.md").read_text()
_SERIES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


def scraped() -> frontend.Telemetry:
    """Returns the metrics of a new frontend and its backend."""
    trees = captured("32intel64-2p8co2t+8ve"), MemoryTree({})
    watch = MachineWatch(*trees, Config(), "node", lambda: Ledger({}))
    view = BackendView(time.monotonic)
    metrics = BackendTelemetry().metrics({}, ("partition", "auto"), **dict.fromkeys(GAUGES, 1.0))
    view.renew(BackendStatus(instance="b", generation=1, metrics=metrics), [])
    telemetry = frontend.Telemetry()
    publishers = {driver: cast("Publisher", SimpleNamespace(ready=True)) for driver in DRIVERS}
    gauges = frontend.NodeGauges(lambda: Ledger({}), watch, view, publishers)
    telemetry.register(gauges, frontend.BackendMetrics(view))
    return telemetry


def worked() -> frontend.Telemetry:
    """Returns a frontend's metrics after calls of each kind."""
    telemetry = scraped()
    for driver in DRIVERS:
        telemetry.count_call(driver, "prepare", 0.1, [True])
        telemetry.count_metadata_failure(driver)
    return telemetry


def series() -> set[str]:
    """Returns the names of all time series of both services."""
    families = text_string_to_metric_families(scraped().render().decode())
    return {family.name + ending for family in families for ending in _SERIES.get(family.type, ("",))}


def alerts() -> list[Document]:
    """Returns the rules as Prometheus reads them."""
    groups: list[Document] = only(render(EVERYTHING), "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def documented() -> dict[str, tuple[str, set[str]]]:
    """Returns the type and labels of each metric in the tables of docs/metrics.md, by name without ``_total``."""
    found: dict[str, tuple[str, set[str]]] = {}
    for heading in ("dra-frontend", "nri-backend"):
        table = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        for name, kind in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE):
            found[name.removesuffix("_total")] = kind.split(",")[0], set(re.findall(r"`(\w+)`", kind))
    return found


def dashboard() -> Document:
    """Returns the dashboard as Grafana reads it."""
    maps = [document["data"] for document in render(EVERYTHING) if document["kind"] == "ConfigMap"]
    text = next(data["dra-driver-numa.json"] for data in maps if "dra-driver-numa.json" in data)
    loaded: Document = json.loads(text)
    return loaded


def expressions() -> list[str]:
    """Returns all of the chart's PromQL expressions, with variables replaced as Grafana replaces them."""
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    filled = [one.replace("$__rate_interval", "1m").replace("$node", ".*") for one in asked]
    return [rule["expr"] for rule in alerts()] + filled


def selected(tree: object) -> set[str]:
    """Returns the metrics that an expression reads."""
    return set(re.findall(r"\bdra_[a-z_]+", str(tree)))


def test_every_expression_is_valid_promql_for_existing_metrics() -> None:
    """If a metric is renamed, this test fails until the alerts and panels that use it have been changed."""
    known = series()
    for expression in expressions():
        read = selected(promql_parser.parse(expression))
        assert read
        assert read <= known, expression


def test_queries_on_the_page_are_valid_promql_for_existing_metrics() -> None:
    """Readers copy the queries unchanged. A query may span several lines."""
    blocks = re.findall(r"^```promql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    queries = [query for block in blocks for query in re.sub(r"\n  +", " ", block).splitlines()]
    assert len(queries) > 10
    known = series()
    for query in queries:
        assert selected(promql_parser.parse(query)) <= known, query


def test_the_page_lists_every_metric_with_its_type() -> None:
    """Names, types and labels are public, because users' dashboards and alerts depend on them."""
    families = {one.name: one for one in text_string_to_metric_families(worked().render().decode())}
    described = documented()
    assert {name: one.type for name, one in families.items()} == {name: kind for name, (kind, _) in described.items()}
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= described[name][1], name


def test_the_values_of_every_label_are_explained() -> None:
    """Users need to know a label's values to write queries. A build's version and a NUMA node's number need no
    explanation.
    """
    table = PAGE.split("\n## Values of labels\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", table, re.MULTILINE)
    explained = {
        (metric, label) for labels, of in rows for metric in of.split() for label in re.findall(r"`(\w+)`", labels)
    }
    everywhere = {label for metric, label in explained if metric == "all"}
    for name, (kind, labels) in documented().items():
        metric = f"`{name}_total`" if kind == "counter" else f"`{name}`"
        known = everywhere | {label for of, label in explained if of.rstrip(",") == metric}
        assert labels - known - {"version", "numa_node"} == set(), name


def test_names_follow_the_conventions_of_prometheus() -> None:
    """Names end with base units, only counters end with ``_total``, and durations end with ``_duration_seconds``."""
    for family in text_string_to_metric_families(scraped().render().decode()):
        assert re.fullmatch(r"dra_(cpu|numa)_[a-z]+(_[a-z]+)*", family.name)
        assert not re.search(r"_(total|count|sum|bucket|created|ms|milliseconds|kb|mib|percent)$", family.name)
        if family.type == "histogram":
            assert family.name.endswith("_duration_seconds"), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name


def test_help_texts_are_sentences_with_a_unit() -> None:
    """Each help text describes the measured quantity with its unit and ends with a full stop, in both services."""
    for family in text_string_to_metric_families(scraped().render().decode()):
        text = family.documentation
        kinds = r"Number of \w+|Duration of .* in seconds|Seconds since \w+|Claimed bytes of|1 (if|while) |Always 1; "
        assert re.match(kinds, text), (family.name, text)
        assert text.endswith("."), family.name
        assert len(text) <= 110, family.name
        assert ("seconds" in family.name) == ("econds" in text), family.name
        assert ("bytes" in family.name) == ("bytes" in text), family.name
        assert (family.name.endswith("_info")) <= text.startswith("Always 1"), family.name


def test_versions_of_both_services_are_compared() -> None:
    """If a cluster runs two versions, the expression returns 2, regardless of which service has which version. The
    expression ignores services that are not scraped.
    """
    (rule,) = [rule for rule in alerts() if rule["alert"] == "DraNumaVersionsDiffer"]
    infos = {name for name in series() if name.endswith("_build_info")}
    assert selected(rule["expr"]) == infos == {f"dra_numa_{half}_build_info" for half in ("frontend", "backend")}
    assert rule["expr"] == f"count({' or '.join(f'group by (version) ({name})' for name in sorted(infos)[::-1])}) > 1"
    shown = {line for line in scraped().render().decode().splitlines() if "_build_info{" in line}
    assert shown == {f'{name}{{version="{__version__}"}} 1.0' for name in infos}


def test_invalid_promql_is_rejected() -> None:
    """Shows that the parser used by the tests above detects errors."""
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum by (node (dra_numa_backend_live)")


def test_labels_in_alert_texts_exist_in_the_expressions_result() -> None:
    """In the text of an alert, a label that the expression has aggregated away would be empty."""
    for rule in alerts():
        text = " ".join(rule["annotations"].values())
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert re.fullmatch("DraNuma[A-Za-z]+", rule["alert"])


def test_an_alert_reports_a_missing_node() -> None:
    """After a pod is gone, its series do not become 0 but disappear, so the alert checks for the absence of a series
    that every frontend exports.
    """
    (gone,) = [rule["expr"] for rule in alerts() if rule["alert"] == "DraNumaGone"]
    remembered = set(re.findall(r"last_over_time\((\w+)\[1h\]\)", gone))
    assert remembered == selected(gone) == {"dra_numa_backend_live"}
    assert remembered <= {text.split()[0].partition("{")[0] for text in scraped().render().decode().splitlines()}


def test_every_alert_links_to_its_symptom() -> None:
    """The link leads to the section whose symptoms include the alert; the operator configures the address."""
    sections = {slug(title): text for title, text in SECTIONS.items()}
    base = "https://wiki.example/numa/symptoms.html"
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookURL": base}}}
    (group,) = only(render(values), "PrometheusRule")["spec"]["groups"]
    for rule in group["rules"]:
        address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert address == base
        seen = sections[anchor].partition("**Urgency:**")[0]
        assert f"`{rule['alert']}`" in seen, rule["alert"]


def test_label_values_in_expressions_exist() -> None:
    """An alert on a label value that is never exported would never fire."""
    values = set(re.findall(r'\b(?:call|result|outcome)!?=~?"([^"]*)"', " ".join(expressions())))
    assert values == {"prepare", "error", "timeout|error", "ok", "denied"}
    telemetry = scraped()
    telemetry.count_call("dra.cpu", "prepare", 0.1, [True])
    written = 'dra_numa_claims_handled_total{call="prepare",driver="dra.cpu",result="error"} 1.0'
    assert written in telemetry.render().decode()
    assert 'dra_numa_claim_status_writes_total{result="denied"} 0.0' in telemetry.render().decode()


def test_the_monitor_finds_the_frontend() -> None:
    """The frontend's port serves the metrics of both containers, and each sample has its node as a label."""
    documents = render(EVERYTHING)
    spec = only(documents, "PodMonitor")["spec"]
    endpoints = spec["podMetricsEndpoints"]
    assert [one["port"] for one in endpoints] == ["frontend"]
    assert all(one["relabelings"][0]["targetLabel"] == "node" for one in endpoints)
    template = only(documents, "DaemonSet")["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_operators_rules_are_added() -> None:
    """The operator's rules are a separate group, after the group of the chart's own rules."""
    own = {"alert": "Mine", "expr": "vector(1)"}
    values = {"metrics": {"prometheusRule": {**RULES, "extraRules": [own]}}}
    groups = only(render(values), "PrometheusRule")["spec"]["groups"]
    assert [group["name"] for group in groups] == ["dra-driver-numa", "dra-driver-numa-extra"]
    assert groups[1]["rules"] == [own]


def test_the_rules_are_a_plain_prometheus_rule_file() -> None:
    """promtool, and Prometheus without the operator, can read files/rules.yaml."""
    assert yaml.safe_load((CHART / "files/rules.yaml").read_text()).keys() == {"groups"}
