"""The Grafana dashboard and the alerts ask for metrics, and labels, that are really exported.

What is exported is read off real endpoints after a real sync was told: Ray's metrics agent and prometheus_client's
exposition. SGLang's own metrics need a running engine, so their names are read out of its source.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import ray
import requests
import yaml
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_weight_metrics import ended, proved_rank

import sglang
from sglang.srt.ray.weight_metrics import WeightMetrics
from sglang.srt.ray.weight_sync.states import WeightState

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana-weight-sync.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus-weight-sync.yml").read_text())
EXPORT_TIMEOUT_S = 60.0
ADDED_BY_PROMETHEUS = {"instance", "job"}
_Labels = dict[str, set[str]]


def samples(exposition: str) -> _Labels:
    """Name of each sample -> labels that it has anywhere."""
    found: _Labels = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported(ray_address: str) -> _Labels:
    """What the two endpoints expose once every kind of metric was told."""
    metrics = WeightMetrics(own_endpoint=True)
    ended(metrics, "committed", WeightState.SERVING, [proved_rank(0)])
    own = samples(generate_latest(REGISTRY).decode())
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + EXPORT_TIMEOUT_S
    while True:
        by_ray = samples(requests.get(url, timeout=10).text)
        if "ray_sglang_weight_sync_torn" in by_ray:
            return own | by_ray
        assert time.monotonic() < deadline, f"Ray's agent exported nothing of ours: {by_ray!r}"
        time.sleep(0.5)


def upstreams() -> set[str]:
    """Names of SGLang's own metrics, as exposed, from the calls that make them."""
    found: set[str] = set()
    for file in (Path(sglang.__file__).parent / "srt").rglob("*metric*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    found.add(str(keyword.value.value))
    return {name for name in found if name.startswith("sglang:")}


def selectors(node: object) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels it is filtered by) of each selector in a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield str(node.name), {matcher.name for matcher in node.matchers.matchers}
    for part in ("vector_selector", "vs", "expr", "lhs", "rhs"):
        if (inner := getattr(node, part, None)) is not None:
            yield from selectors(inner)
    for argument in getattr(node, "args", None) or ():
        yield from selectors(argument)


def grouped_by(query: str) -> set[str]:
    return {
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", query)
        for label in group.split(",")
    }


PANELS = [
    (f"{panel['title']} [{prefix}]", target["expr"].replace("${source}", prefix))
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
    for prefix in ("ray_sglang_weight_sync", "sglang_weight_sync")
]
RULES = [(rule["alert"], rule["expr"]) for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(("what", "query"), [*PANELS, *RULES], ids=lambda value: value[:60])
def test_a_query_names_metrics_and_labels_that_exist(
    exported: _Labels, what: str, query: str
) -> None:
    found = list(selectors(promql_parser.parse(query)))
    assert found, f"{what}: no metric in {query!r}"
    for name, filtered in found:
        if name.startswith("sglang:"):
            assert name in upstreams(), f"{what}: SGLang has no {name!r}"
            continue
        assert name in exported, f"{what}: nothing exports {name!r}"
        wanted = filtered | grouped_by(query)
        # Ray's agent names the process (WorkerId); an endpoint of its own has one engine.
        missing = wanted - exported[name] - ADDED_BY_PROMETHEUS - {"WorkerId"}
        assert not missing, f"{what}: {name!r} has no label {missing!r}"


def test_rays_agent_tells_engines_of_one_node_apart(exported: _Labels) -> None:
    assert "WorkerId" in exported["ray_sglang_weight_sync_torn"]


def test_the_check_itself_finds_a_wrong_name(exported: _Labels) -> None:
    query = "sum by (phase) (rate(sglang_weight_sync_phases_sum[5m])) / sglang_weight_sync_torn > 1"
    names = [name for name, _ in selectors(promql_parser.parse(query))]
    assert names == ["sglang_weight_sync_phases_sum", "sglang_weight_sync_torn"]
    assert [name in exported for name in names] == [False, True]


def test_every_metric_of_ours_is_shown() -> None:
    """A metric that no panel shows is one that nobody looks at."""
    from sglang.srt.ray import weight_metrics as ours

    text = json.dumps([panel["targets"] for panel in DASHBOARD["panels"]])
    for name in (*ours.COUNTERS, *ours.HISTOGRAMS, *ours.GAUGES):
        assert f"${{source}}_{name}" in text
