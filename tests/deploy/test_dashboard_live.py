"""The dashboard against the truth: a real Prometheus that scrapes a real gateway in front of simulated replicas.

Traffic goes on until every query has answered with something to see, so no test depends on when a scrape happens. The
replicas are two simulated engines, one that refuses every generation (so there are retries), and one that is down. A second
gateway, which is not scraped, gets some of the traffic; they share through a real store.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import math
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.measure.ports import free_port
from tests.deploy import dashboard
from tests.deploy.dashboard import FILES, Query
from tests.deploy.processes import answers, running, until
from tests.support.redis import RedisServer, serving
from tests.support.tools import ROOT, tool

# May be zero in a test that does nothing wrong: the engines report their usage and their hits, none restarts, and none has to
# let anybody wait; and both gateways know of each other all the time.
QUIET = {
    *(f"Sharing losses/{ref}" for ref in "ABCDE"),
    "Snapshots failed/A",
    "Unmetered responses/A",
    "Cache hits missing/A",
    "Cache losses/A",
    "Running and waiting in the engines/B",
}
CLIENTS = 12
RULES = yaml.safe_load((ROOT / "rules" / "warmroute.yaml").read_text("utf-8"))

pytestmark = pytest.mark.tools


class Refuses(http.server.BaseHTTPRequestHandler):
    """An engine that lists its model and answers every generation with 503."""

    def do_GET(self) -> None:
        self.answer(200, {"object": "list", "data": [{"id": "sim", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(503, {"error": {"message": "overloaded", "type": "server_error"}})

    def answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: the test's output is not the place."""


@dataclass
class Stack:
    """A running gateway, its sibling, its listener for Prometheus, and the Prometheus that scrapes it."""

    gateway: str
    sibling: str
    scraped: str
    prometheus: str
    rounds: Iterator[int] = field(default_factory=itertools.count)

    def traffic(self) -> None:
        """One round: new and repeated prompts, streamed or not, of two tenants; refused and unanswerable requests."""
        number = next(self.rounds)
        with ThreadPoolExecutor(CLIENTS) as pool:
            statuses = set(pool.map(self.conversation, [f"{number}-{client}" for client in range(CLIENTS)]))
        assert statuses == {(200, 200, 200, 404, 503, 200)}
        elsewhere = {"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": f"Elsewhere: {number}. " * 40}]}
        assert self.post(elsewhere, "team-0", self.sibling) == 200

    def conversation(self, topic: str) -> tuple[int, ...]:
        head = f"You answer questions about {topic}. " * 40
        chat = {"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": head}]}
        tenant = f"team-{len(topic) % 2}"
        return (
            self.post({**chat, "stream": True}, tenant),  # a miss
            self.post({**chat, "stream": True}, tenant),  # a hit
            self.post(chat, tenant),
            self.post({**chat, "model": "unheard-of"}, tenant),
            self.post({**chat, "model": "asleep"}, tenant),
            self.post({**chat, "messages": [{"role": "user", "content": "Hi"}]}, tenant),  # shorter than a block
        )

    def post(self, body: Mapping[str, Any], tenant: str, gateway: str = "") -> int:
        headers = {"content-type": "application/json", "x-tenant-id": tenant}
        url = f"{gateway or self.gateway}/v1/chat/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def series(self, promql: str) -> list[tuple[set[str], list[float]]]:
        """The labels and the values (without NaN) of each series of the last minute."""
        now = time.time()
        result = self.ask("query_range", query=promql, start=str(now - 60), end=str(now), step="1")["result"]
        values = [(set(each["metric"]), [float(value) for _, value in each["values"]]) for each in result]
        return [(labels, [value for value in numbers if not math.isnan(value)]) for labels, numbers in values]

    def ask(self, path: str, **arguments: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.scraped}/metrics", timeout=60) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    prometheus = tool("prometheus")
    folder = tmp_path_factory.mktemp("live")
    with contextlib.ExitStack() as running_parts:
        replicas = {name: running_parts.enter_context(simulated(folder, name)) for name in ("one", "two")}
        replicas["refuses"] = running_parts.enter_context(refusing())
        store = running_parts.enter_context(serving(RedisServer(folder)))
        gateway, scraped = running_parts.enter_context(a_gateway(folder, "gateway", replicas, store.url))
        sibling, _ = running_parts.enter_context(a_gateway(folder, "sibling", replicas, store.url))
        yield Stack(gateway, sibling, scraped, running_parts.enter_context(a_prometheus(folder, prometheus, scraped)))


@contextlib.contextmanager
def simulated(folder: Path, name: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gateway", "replica", "--engine", "sim", "--port", url.rpartition(":")[2]]
    with running(command, folder / f"{name}.log", lambda: answers(f"{url}/v1/models")):
        yield url


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def a_gateway(folder: Path, name: str, replicas: Mapping[str, str], store: str) -> Iterator[tuple[str, str]]:
    """(the clients' URL, that of the metrics)."""
    url, scraped = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    settings = {
        "listen": url.removeprefix("http://"),
        "metrics_listen": scraped.removeprefix("http://"),
        "pools": [
            {"replicas": [{"url": url, "name": name} for name, url in replicas.items()]},
            {"models": ["asleep"], "replicas": [{"url": f"http://127.0.0.1:{free_port()}", "name": "asleep"}]},
        ],
        "routing": {"ttl_s": 2},  # so that the index forgets while we look
        "sharing": {"url": store},
        "snapshot": {"file": str(folder / f"{name}.snapshot"), "every_s": 1},
        "prices": {"sim": {"input": 500.0, "output": 1500.0}},
        "limits": {"drain_timeout_s": 5},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with running(command, folder / f"{name}.log", lambda: answers(f"{url}/health")):
        yield url, scraped


@contextlib.contextmanager
def a_prometheus(folder: Path, binary: Path, scraped: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    target = {"job_name": "warmroute", "static_configs": [{"targets": [scraped.removeprefix("http://")]}]}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}), "utf-8")
    command = [
        str(binary),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=warn",
    ]
    with running(command, folder / "prometheus.log", lambda: answers(f"{url}/-/ready")):
        yield url


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dashboard.read(request.param)


def flaw(stack: Stack, query: Query, selection: Mapping[str, str]) -> str:
    """What is missing from the query's answer, or nothing."""
    found = stack.series(query.promql(selection))
    if not any(values for _, values in found):
        return "no data"
    if not all(query.legend_labels <= labels for labels, _ in found):
        return f"no label for the legend {query.legend!r}"
    if str(query) not in QUIET and not any(value > 0 for _, values in found for value in values):
        return "nothing but zero"
    return ""


def flaws_of(stack: Stack, queries: list[Query], selection: Mapping[str, str]) -> dict[str, str]:
    return {str(query): reason for query in queries if (reason := flaw(stack, query, selection))}


@pytest.mark.parametrize("selection", [{}, {"model": "sim", "replica": "one"}], ids=["all", "one model and replica"])
def test_every_query_shows_the_traffic(stack: Stack, board: dict[str, Any], selection: dict[str, str]) -> None:
    queries = list(dashboard.queries(board))
    assert {str(query) for query in queries} >= QUIET, "the titles of panels"
    # A selection of one model leaves the models out that nobody could answer for.
    if selection:
        queries = [query for query in queries if query.panel not in {"Server errors", "Error ratio"}]

    deadline = time.monotonic() + 180
    stack.traffic()
    while (flaws := flaws_of(stack, queries, selection)) and time.monotonic() < deadline:
        stack.traffic()
    assert flaws == {}


def test_every_variable_has_values(stack: Stack, board: dict[str, Any]) -> None:
    stack.traffic()
    known = {"model": "sim", "replica": "one"}
    for metric, label in dashboard.variables(board).values():
        has_values = partial(stack.ask, f"label/{label}/values", **{"match[]": metric})
        assert known[label] in until(has_values, f"the variable {label} has values")


def test_promtool_accepts_the_metrics(stack: Stack) -> None:
    stack.traffic()
    command = [str(tool("promtool")), "check", "metrics"]
    done = subprocess.run(command, input=stack.metrics(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_model_that_nobody_serves_is_no_label(stack: Stack) -> None:
    stack.traffic()
    assert 'model="sim"' in stack.metrics()
    assert "unheard-of" not in stack.metrics()


# Alerts about what is wrong in this stack: one replica is down, alone in its pool, and requests for its model are a 503. The
# replica that refuses everything may be cut off at that moment, and use up the retries.
TRUE_HERE = {"WarmrouteNoReplica", "WarmrouteReplicaDown", "WarmrouteErrors"}
MAY_BE_TRUE = {"WarmrouteReplicaCircuitOpen", "WarmrouteRetryBudgetExhausted"}


def test_alerts_are_about_what_is_wrong_and_nothing_else(stack: Stack) -> None:
    def pending() -> set[str]:
        stack.traffic()
        rules = [rule for group in RULES["groups"] for rule in group["rules"]]
        return {rule["alert"] for rule in rules if stack.ask("query", query=rule["expr"])["result"]}

    assert until(lambda: (found := pending()) >= TRUE_HERE and found, "the alerts see the replica that is down")
    assert pending() - MAY_BE_TRUE == TRUE_HERE
