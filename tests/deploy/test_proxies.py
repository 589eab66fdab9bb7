"""The gateway behind a real nginx and a real haproxy on the same machine.

First nginx's shortest configurations: what clients from outside can reach. nginx spoke HTTP/1.0 to its upstreams by default
before 1.29.7, and HTTP/1.1 since, so the version is given. Then the configurations of docs/proxies.md as they stand there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.measure.ports import free_port
from tests.deploy.processes import answers, running, until
from tests.support.tools import ROOT, tool

pytestmark = pytest.mark.tools

NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{ listen 127.0.0.1:{shortest}; proxy_http_version 1.0; location / {{ proxy_pass http://127.0.0.1:{gateway}; }} }}
  server {{
    listen 127.0.0.1:{keeps_host};
    location / {{ proxy_pass http://127.0.0.1:{gateway}; proxy_set_header Host $host; proxy_http_version 1.1; }}
  }}
  server {{ listen 127.0.0.1:{hides}; proxy_http_version 1.1; location / {{ proxy_pass http://127.0.0.1:{gateway}; }} }}
}}
"""


class Site:
    """The ports of a gateway and of the nginx before it. hides: nothing shows the gateway that this one is a proxy."""

    def __init__(self) -> None:
        self.gateway, self.admin, self.shortest, self.keeps_host, self.hides, self.replica = (free_port() for _ in range(6))


@contextlib.contextmanager
def gateway(port: int, admin: int, replica: int, folder: Path, **more: Any) -> Iterator[None]:
    """A gateway on this port, in front of a replica (which need not be there). more: keys of its configuration."""
    settings = {
        "listen": f"127.0.0.1:{port}",
        "admin_listen": f"127.0.0.1:{admin}",
        "pools": [{"replicas": [f"http://127.0.0.1:{replica}"]}],
        **more,
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    serve = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with running(serve, folder / "gateway.log", lambda: answers(f"http://127.0.0.1:{port}/health")):
        yield


@pytest.fixture(params=["", "k-1"], ids=["without a key", "with a key"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    nginx = str(tool("nginx"))
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", request.param)
    made = Site()
    conf = tmp_path / "nginx.conf"
    conf.write_text(NGINX.format(folder=tmp_path, **vars(made)))
    with (
        gateway(made.gateway, made.admin, made.replica, tmp_path),
        running(
            [str(nginx), "-c", str(conf)],
            tmp_path / "nginx.log",
            lambda: all(answers(f"http://127.0.0.1:{port}/health") for port in (made.shortest, made.keeps_host, made.hides)),
        ),
    ):
        yield made


def ask(port: int, path: str, host: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
    """(status, body)."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Host": host, **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


DRAIN: dict[str, Any] = {"path": "/warmroute/drain", "data": b'{"name": "x"}'}


def test_operator_endpoints_are_not_open_to_the_clients_of_a_proxy(site: Site) -> None:
    for port in (site.shortest, site.keeps_host):
        for host in ("api.example.com", "localhost", "127.0.0.1"):
            for what in ({"path": "/warmroute/replicas"}, DRAIN):
                assert ask(port, host=host, **what)[0] in (401, 403)


def test_nothing_inside_is_shown_to_the_clients_of_a_proxy(site: Site) -> None:
    for port in (site.shortest, site.keeps_host):
        status, body = ask(port, "/metrics", "api.example.com")
        assert status in (401, 403)  # with a key, without one
        body += ask(port, "/ready", "api.example.com")[1]
        chat = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        status, error = ask(port, "/v1/chat/completions", "api.example.com", chat)
        assert status == 503
        assert "request id" in error
        assert str(site.replica) not in body + error


def test_a_proxy_that_hides_itself_makes_operators_of_its_clients_unless_there_is_a_key(site: Site) -> None:
    """As docs/proxies.md states. The operator endpoints are out of its reach all the same."""
    keyed = ask(site.shortest, "/warmroute/replicas", "localhost")[0] == 401
    assert ask(site.hides, "/metrics", "api.example.com")[0] == (401 if keyed else 200)
    for what in ({"path": "/warmroute/replicas"}, DRAIN):
        assert ask(site.hides, host="api.example.com", **what)[0] in (401, 403)


# -- the configurations for one gateway of docs/proxies.md

PAGE = ROOT / "docs" / "proxies.md"
AROUND = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  {block}
}}
"""
HAPROXY_SOCKET = "/run/haproxy/admin.sock"
MODEL = "sim"
SIM = [sys.executable, "-m", "gateway.commands.cli", "replica", "--engine", "sim"]
TOKENS = 40
INFLIGHT = re.compile(r"^warmroute_replica_inflight\{.*\} 1", re.MULTILINE)


def block_of(program: str, port: int, upstream: int) -> str:
    """The configuration on the page, with these ports."""
    text = PAGE.read_text("utf-8").split("\n## Several gateways\n")[0]
    (block,) = re.findall(rf"^```{program}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for written, meant in (
        ("listen 80;" if program == "nginx" else "bind :80", f"127.0.0.1:{port}"),
        ("server 127.0.0.1:8000" if program == "nginx" else "server a 127.0.0.1:8000", f"127.0.0.1:{upstream}"),
    ):
        assert block.count(written) == 1
        block = block.replace(written, re.sub(r"(127\.0\.0\.1:8000|:?80)(?=;?$)", meant, written))
    return block


def command_of(program: str, block: str, folder: Path) -> list[str]:
    conf = folder / "proxy.conf"
    if program == "nginx":
        conf.write_text(AROUND.format(folder=folder, block=block))
        return [str(tool("nginx")), "-c", str(conf)]
    assert block.count(HAPROXY_SOCKET) == 1
    conf.write_text(block.replace(HAPROXY_SOCKET, str(folder / "admin.sock")))
    return [str(tool("haproxy")), "-db", "-f", str(conf)]


@pytest.fixture(params=["nginx", "haproxy"])
def proxied(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(the port of the proxy, that of the gateway behind it), over a simulated replica that streams slowly."""
    monkeypatch.delenv("WARMROUTE_ADMIN_KEY", raising=False)
    port, behind, admin, replica = (free_port() for _ in range(4))
    command = command_of(request.param, block_of(request.param, port, behind), tmp_path)
    sim = [*SIM, "--port", str(replica), "--decode-rate", "20"]
    with (
        running(sim, tmp_path / "replica.log", lambda: answers(f"http://127.0.0.1:{replica}/v1/models")),
        gateway(behind, admin, replica, tmp_path),
        running(command, tmp_path / "proxy.log", lambda: answers(f"http://127.0.0.1:{port}/ready")),
    ):
        yield port, behind


def chat(model: str, text: str, **options: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **options}).encode()


def model_at(port: int) -> str:
    name = json.loads(ask(port, "/v1/models", "localhost")[1])["data"][0]["id"]
    assert isinstance(name, str)
    return name


def connected(port: int) -> int:
    """TCP connections on loopback that a server on this port has accepted."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:])
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_what_goes_through_the_proxies_of_the_page(proxied: tuple[int, int]) -> None:
    port, behind = proxied
    model = model_at(port)
    # larger than nginx's default for bodies; the answer is the engine's: the prompt is too long for it
    status, body = ask(port, "/v1/chat/completions", "localhost", chat(model, "a " * (1 << 20), max_tokens=1))
    assert (status, "context" in body or "too long" in body) == (400, True), body[:300]
    # tokens as they come, not the whole answer at once
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers: Mapping[str, str] = {"Content-Type": "application/json", "Host": "localhost"}
    connection.request("POST", "/v1/chat/completions", chat(model, "hi", max_tokens=TOKENS, stream=True), headers)
    answer = connection.getresponse()
    first = answer.read1()
    assert b"data: " in first
    assert b"[DONE]" not in first
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    # the proxy keeps its connections, and its clients are not operators
    assert not [name for name in answer.headers if name.lower().startswith("x-warmroute")]
    for path in ("/metrics", "/warmroute/replicas", "/health"):
        assert ask(port, path, "localhost")[0] == 404
    assert "pools_without_replica" not in ask(port, "/ready", "localhost")[1]
    until(lambda: 1 <= connected(behind) <= 4, "few connections to the gateway, and kept ones")


def test_a_client_that_leaves_before_its_answer_ends_its_request(proxied: tuple[int, int], tmp_path: Path) -> None:
    """Its answer would take half a minute."""
    port, behind = proxied
    log, body = tmp_path / "gateway.log", chat(model_at(port), "hi", max_tokens=600)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head + body)
        until(
            lambda: re.search(r"^warmroute_replica_inflight\{.*\} 1", ask(behind, "/metrics", "localhost")[1], re.M), "it runs"
        )
    line = until(lambda: [line for line in log.read_text("utf-8").splitlines() if '"message":"request"' in line], "it is over")
    assert json.loads(line[0])["status"] == 499


@pytest.mark.parametrize("proxied", ["haproxy"], indirect=True)
def test_haproxy_takes_a_gateway_out_at_an_operators_command(proxied: tuple[int, int], tmp_path: Path) -> None:
    assert ask(proxied[0], "/ready", "localhost")[0] == 200
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(tmp_path / "admin.sock"))
        control.sendall(b"set server warmroute/a state drain\n")
        assert control.recv(1000).strip() == b"", "haproxy answers nothing on success"
    assert ask(proxied[0], "/ready", "localhost")[0] == 503


# -- a proxy that cuts what is silent

IMPATIENT = """
server {{
  listen 127.0.0.1:{port};
  proxy_http_version 1.1; proxy_read_timeout 1s; proxy_next_upstream off;
  location / {{ proxy_pass http://127.0.0.1:{gateway}; }}
}}
"""
PATHS = {"/v1/chat/completions": b"data: [DONE]\n\n", "/v1/messages": b"message_stop", "/v1/responses": b"response.incomplete"}


@pytest.mark.parametrize("keepalive_s", [0.2, 0])
def test_signs_of_life_keep_a_proxy_from_cutting_a_long_prefill(keepalive_s: float, tmp_path: Path) -> None:
    """A prefill of 3 s behind nginx, which waits for a byte for 1 s."""
    port, behind, admin, replica = (free_port() for _ in range(4))
    conf = tmp_path / "nginx.conf"
    conf.write_text(AROUND.format(folder=tmp_path, block=IMPATIENT.format(port=port, gateway=behind)))
    sim = [*SIM, "--port", str(replica), "--prefill-rate", "1000"]
    with (
        running(sim, tmp_path / "replica.log", lambda: answers(f"http://127.0.0.1:{replica}/v1/models")),
        gateway(behind, admin, replica, tmp_path, limits={"keepalive_s": keepalive_s}, timeouts={"first_byte_s": 60}),
        running(
            [str(tool("nginx")), "-c", str(conf)], tmp_path / "nginx.log", lambda: answers(f"http://127.0.0.1:{port}/ready")
        ),
    ):
        model = model_at(port)
        for number, (path, end) in enumerate(PATHS.items()):
            text = f"{number} of the words. " * 500
            body = json.loads(chat(model, text, stream=True, max_tokens=2))
            if path == "/v1/responses":
                body = {"model": model, "input": text, "stream": True, "max_output_tokens": 16}
            status, told = ask(port, path, "localhost", json.dumps(body).encode(), **{"Content-Type": "application/json"})
            if keepalive_s:
                assert (status, end in told.encode()) == (200, True), told[-300:]
            else:
                assert status == 504
