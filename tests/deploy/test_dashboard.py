"""The dashboard and the rules: every metric and label in them is one that a server or a router shows."""

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml

from jaxserve.engine.stats import KVStoreStats
from jaxserve.kv_store.tier import TierStats
from jaxserve.routing.app import make_router
from jaxserve.routing.options import RouterOptions
from scripts.bench.replay_engine import replay_llm
from tests.serving.http_server import listening, serving

DEPLOY = Path(__file__).parents[2] / "deploy"
OURS = re.compile(r"\b(jaxserve(?:_router)?:\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """Metric -> its labels, of a server with a store and of a router in front of it, both of which have answered."""
    llm = replay_llm(max_num_seqs=4)
    llm.engine.stats.kv_store = KVStoreStats(tiers=(TierStats("host"), TierStats("disk")))
    with serving(llm, names=("replay",)) as server:
        router = make_router(RouterOptions(backends=(server.url,)))
        with listening(router) as url:
            for _ in range(2):
                assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 9}).status_code == 200
            text = server.client.get("/metrics").text + httpx.get(f"{url}/metrics").text
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):  # counters with labels show no line before they count
            _, _, name, kind = line.split()
            found.setdefault(name + ("_bucket" if kind == "histogram" else ""), set())
        elif not line.startswith("#"):
            name, labels = re.match(r"([\w:]+)(?:\{(.*)\})?", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


def expressions() -> dict[str, str]:
    """Where it stands -> PromQL."""
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    found = {f"{panel['title']}, {t['refId']}": t["expr"] for panel in board["panels"] for t in panel["targets"]}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    for group in rules["groups"]:
        found |= {rule.get("alert") or rule["record"]: rule["expr"] for rule in group["rules"]}
    return found


LABELS_OF = {"prefills_total": {"result"}, "request_failures_total": {"model_name"}}  # of what counts nothing here
MADE = ("model:jaxserve_time_to_first_token_seconds:p95", "model:jaxserve_inter_token_latency_seconds:p95")


@pytest.mark.parametrize("where", expressions())
def test_what_is_asked_for_is_shown(shown, where):
    expression = expressions()[where]
    for made in MADE:
        assert made not in expression or made in expressions()
    asked = OURS.findall(re.sub("|".join(MADE), "", expression))
    assert asked or any(made in expression for made in MADE)
    for name, selector in asked:
        assert name in shown, f"{where}: no {name}"
        labels = shown[name] | LABELS_OF.get(name.partition(":")[2], set()) | {"instance"}
        assert set(re.findall(r"(\w+)=", selector)) <= labels, f"{where}: {name} has {labels}"
        for grouped in re.findall(r"by \(([\w, ]+)\)", expression):
            assert set(re.split(r", *", grouped)) <= labels, f"{where}: {name} has {labels}"


def test_the_board_is_one_that_grafana_takes():
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 12 and board["uid"] == "jaxserve"
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(ids), "panels on top of each other"
    used = set(re.findall(r"\$(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in board["templating"]["list"]}


def test_all_that_a_store_counts_is_on_the_board(shown):
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name, _ in OURS.findall(target["expr"])}
    counted = {name for name in shown if name.startswith("jaxserve:kv_store_")}
    assert len(counted) >= 10 and counted <= asked


def test_names_that_are_wrong_are_found(shown):
    assert "jaxserve:no_such_metric" not in shown and "jaxserve:time_to_first_token_seconds" not in shown
    assert {"model_name", "le"} <= shown["jaxserve:time_to_first_token_seconds_bucket"]
