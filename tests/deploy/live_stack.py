"""A gateway that a real Prometheus scrapes: with keys, a ledger, prices, comparison of policies, and all that goes wrong.

Replicas: two simulated engines (one found in a file), one that refuses every generation (so there are retries), one that
breaks off its streams, one that is slow behind a queue for two, one with too large counts, one that is down, and one that is
down and has a fallback. A second gateway, which is not scraped, gets some of the traffic; both share through a real store, and
have their keys in one database.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.measure.ports import free_port
from tests.deploy.processes import answers, running
from tests.support.redis import RedisServer, serving
from tests.support.tools import ROOT, tool

CLIENTS = 12
RULES_FILE = ROOT / "rules" / "warmroute.yaml"
POD = {"namespace": "llm", "service": "gw-metrics", "pod": "gw-0"}  # as the chart's ServiceMonitor labels it


class Faulty(http.server.BaseHTTPRequestHandler):
    """An engine of one model, and what becomes of its generations."""

    protocol_version = "HTTP/1.1"
    model = "sim"

    def do_GET(self) -> None:
        self.answer(200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.generate()

    def generate(self) -> None:
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


class Breaks(Faulty):
    """Streams end after their first words, without an end."""

    model = "breaks"

    def generate(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        choice = {"index": 0, "delta": {"role": "assistant", "content": "Once upon"}, "finish_reason": None}
        event = {"id": "c", "object": "chat.completion.chunk", "model": self.model, "created": 1, "choices": [choice]}
        data = f"data: {json.dumps(event)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.close_connection = True


class Slow(Faulty):
    """A fifth of a second for each answer, which has no usage."""

    model = "narrow"

    def generate(self) -> None:
        time.sleep(0.2)
        message = {"role": "assistant", "content": "Done."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer(200, {"id": "c", "object": "chat.completion", "model": self.model, "created": 1, "choices": [choice]})


class Boasts(Faulty):
    """More prompt tokens than a request has bytes, which the audit finds."""

    model = "boasts"

    def generate(self) -> None:
        choice = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
        counts = {"prompt_tokens": 9000, "completion_tokens": 1, "total_tokens": 9001}
        answer = {"id": "c", "object": "chat.completion", "model": self.model, "created": 1, "choices": [choice]}
        self.answer(200, {**answer, "usage": counts})


@dataclass
class Stack:
    """A running gateway, its sibling, its listener for Prometheus, and the Prometheus that scrapes it."""

    folder: Path
    settings: dict[str, Any]
    process: subprocess.Popen[bytes]
    gateway: str
    sibling: str
    scraped: str
    prometheus: str
    keys: Mapping[str, str]
    rounds: Iterator[int] = field(default_factory=itertools.count)

    @property
    def instance(self) -> str:
        return self.scraped.removeprefix("http://")

    def traffic(self) -> None:
        """One round: new and repeated prompts, streamed or not, of two tenants; refused and unanswerable requests."""
        number = next(self.rounds)
        with ThreadPoolExecutor(CLIENTS) as pool:
            statuses = set(pool.map(self.conversation, [f"{number}-{client}" for client in range(CLIENTS)]))
            assert statuses == {(200, 200, 200, 404, 503, 200)}
            self.faults(pool, number)
        elsewhere = chat("sim", f"Elsewhere: {number}. " * 40)
        assert self.post(elsewhere, "team-0", self.sibling) == 200
        self.reload(number)

    def conversation(self, topic: str) -> tuple[int, ...]:
        long = chat("sim", f"You answer questions about {topic}. " * 40)
        send = partial(self.post, tenant=f"team-{len(topic) % 2}")
        return (
            send({**long, "stream": True}),  # a miss
            send({**long, "stream": True}),  # a hit
            send(long),
            send({**long, "model": "unheard-of"}),
            send({**long, "model": "asleep"}),
            send(chat("sim", "Hi")),  # shorter than a block
        )

    def faults(self, pool: ThreadPoolExecutor, number: int) -> None:
        """A full queue, a broken stream, a fallback, keys over their limit and without one, a kept response, a breakpoint."""
        assert set(pool.map(self.post, [chat("narrow", "Slowly. " * 40)] * 6)) >= {200, 429}
        assert self.post({**chat("breaks", "Tell me. " * 40), "stream": True}) == 200
        assert set(pool.map(self.post, [chat("boasts", "How long? " * 40)] * 6)) == {200}
        assert self.post(chat("detour", "This way. " * 40)) == 200
        assert 429 in {self.post(chat("sim", "Hi"), "capped") for _ in range(3)}
        assert [self.post(chat("sim", "Hi"), other) for other in ("nobody", "")] == [401, 401]
        response = {"model": "sim", "input": f"Keep this: {number}.", "max_output_tokens": 8, "store": True}
        assert self.post(response, path="/v1/responses") == 200
        text = {"type": "text", "text": f"Remember {number}. " * 80, "cache_control": {"type": "ephemeral"}}
        message = {"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": [text]}]}
        assert self.post(message, path="/v1/messages") == 200

    def reload(self, number: int) -> None:
        """Another price, or a mistake, in turns."""
        prices = {**self.settings["prices"], "sim": {"input": 500.0, "output": 1500.0 + number, "cached_input": 50.0}}
        changed = {**self.settings, "prices": prices} if number % 2 else {**self.settings, "nonsense": number}
        (self.folder / "gateway.yaml").write_text(yaml.safe_dump(changed), "utf-8")
        self.process.send_signal(signal.SIGHUP)

    def post(
        self, body: Mapping[str, Any], tenant: str = "team-0", gateway: str = "", path: str = "/v1/chat/completions"
    ) -> int:
        headers = {"content-type": "application/json"}
        if tenant:
            headers["authorization"] = f"Bearer {self.keys.get(tenant, 'wr-nobody')}"
        return sent(f"{gateway or self.gateway}{path}", body, headers)[0]

    def series(self, promql: str, span_s: float = 60.0) -> list[tuple[set[str], list[float]]]:
        """The labels and the values (without NaN) of each series of the last minute."""
        now = time.time()
        result = self.ask("query_range", query=promql, start=str(now - span_s), end=str(now), step="1")["result"]
        values = [(set(each["metric"]), [float(value) for _, value in each["values"]]) for each in result]
        return [(labels, [value for value in numbers if not math.isnan(value)]) for labels, numbers in values]

    def ask(self, path: str, **arguments: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.scraped}/metrics", timeout=60) as answer:
            return str(answer.read().decode())


def chat(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}


def sent(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except http.client.IncompleteRead as cut:
        return 200, cut.partial


@contextlib.contextmanager
def stack_in(folder: Path) -> Iterator[Stack]:
    prometheus = tool("prometheus")
    with contextlib.ExitStack() as parts:
        enter = parts.enter_context
        replicas = {name: enter(simulated(folder, name)) for name in ("one", "two")}
        replicas |= {kind.__name__.lower(): enter(serving_thread(kind)) for kind in (Faulty, Breaks, Slow, Boasts)}
        store = enter(serving(RedisServer(folder)))
        (folder / "found.yaml").write_text(yaml.safe_dump({"replicas": [{"name": "two", "url": replicas["two"]}]}), "utf-8")
        own, settings = enter(a_gateway(folder, "gateway", replicas, store.url))
        _, others = enter(a_gateway(folder, "sibling", replicas, store.url))
        admin = f"http://{settings['admin_listen']}/warmroute/keys"
        limits: dict[str, dict[str, int]] = {"team-0": {}, "team-1": {}, "capped": {"requests_per_minute": 1}}
        made = {tenant: sent(admin, {"tenant": tenant, **each}, {})[1] for tenant, each in limits.items()}
        keys = {tenant: json.loads(answer)["key"] for tenant, answer in made.items()}
        url, scraped = (f"http://{settings[name]}" for name in ("listen", "metrics_listen"))
        asked = enter(a_prometheus(folder, prometheus, scraped))
        yield Stack(folder, settings, own, url, f"http://{others['listen']}", scraped, asked, keys)


@contextlib.contextmanager
def simulated(folder: Path, name: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gateway", "replica", "--engine", "sim", "--port", url.rpartition(":")[2]]
    with running(command, folder / f"{name}.log", lambda: answers(f"{url}/v1/models")):
        yield url


@contextlib.contextmanager
def serving_thread(kind: type[Faulty]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def settings_of(folder: Path, name: str, replicas: Mapping[str, str], store: str) -> dict[str, Any]:
    def pool(name: str, *members: str, **more: Any) -> dict[str, Any]:
        urls = [{"url": replicas.get(each, f"http://127.0.0.1:{free_port()}"), "name": each} for each in members]
        return {"name": name, "replicas": urls, **more}

    listeners = ("listen", "admin_listen", "metrics_listen")
    return {
        **{listener: f"127.0.0.1:{free_port()}" for listener in listeners},
        "pools": [
            pool("main", "one", "faulty"),
            pool("asleep", "asleep", models=["asleep"]),
            pool("narrow", "slow", models=["narrow"], max_inflight=1, max_queue=2),
            pool("breaks", "breaks", models=["breaks"], resume_streams=True),
            pool("boasts", "boasts", models=["boasts"]),
            pool("detour", "gone", models=["detour"], fallback={"pool": "main", "model": "sim"}),
        ],
        "discovery": [{"file": str(folder / "found.yaml"), "pool": "main"}],
        "routing": {"ttl_s": 2, "compare": True},  # so that the index forgets while we look
        "sharing": {"url": store},
        "snapshot": {"file": str(folder / f"{name}.snapshot")},
        "state": {"url": f"sqlite:///{folder}/{name}-state.sqlite"},
        "ledger": {"url": f"sqlite:///{folder}/{name}-ledger.sqlite"},
        "keys": {"url": f"sqlite:///{folder}/keys.sqlite"},
        "prices": {
            "sim": {"input": 500.0, "output": 1500.0, "cached_input": 50.0},
            "breaks": {"input": 500.0, "output": 1500.0},
        },
        "limits": {"drain_timeout_s": 5},
    }


@contextlib.contextmanager
def a_gateway(
    folder: Path, name: str, replicas: Mapping[str, str], store: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    settings = settings_of(folder, name, replicas, store)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with running(command, folder / f"{name}.log", lambda: answers(f"http://{settings['listen']}/health")) as process:
        yield process, settings


@contextlib.contextmanager
def a_prometheus(folder: Path, binary: Path, scraped: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    target = {"targets": [scraped.removeprefix("http://")], "labels": POD}
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    jobs: Sequence[Mapping[str, Any]] = [{"job_name": "warmroute", "static_configs": [target]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({"global": times, "rule_files": [str(RULES_FILE)], "scrape_configs": jobs}), "utf-8")
    command = [
        str(binary),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=warn",
    ]
    with running(command, folder / "prometheus.log", lambda: answers(f"{url}/-/ready")):
        yield url
