"""The gateway behind the shortest configurations of a real nginx on the same machine: what clients from outside can reach.

nginx speaks HTTP/1.0 to its upstreams unless told otherwise (newer releases may differ, so it is told here). A proxy that
speaks HTTP/1.1, asks for the gateway's own address and adds no header is not among these: without an admin key nobody can tell
it from a client on this machine (docs/operations.md).
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.fuzzing.diff import nginx_program
from tests.deploy.processes import answers, free_port, running
from tests.tools import missing

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
}}
"""


class Site:
    """The ports of a gateway and of the nginx before it."""

    def __init__(self) -> None:
        self.gateway, self.admin, self.shortest, self.keeps_host, self.replica = (free_port() for _ in range(5))


@pytest.fixture(params=["", "k-1"], ids=["without a key", "with a key"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    nginx = nginx_program() or missing("nginx is missing: apt-get install nginx-light")
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", request.param)
    made = Site()
    settings = {
        "listen": f"127.0.0.1:{made.gateway}",
        "admin_listen": f"127.0.0.1:{made.admin}",
        "pools": [{"replicas": [f"http://127.0.0.1:{made.replica}"]}],
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    serve = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(file)]
    conf = tmp_path / "nginx.conf"
    conf.write_text(NGINX.format(folder=tmp_path, **vars(made)))
    with (
        running(serve, tmp_path / "gateway.log", lambda: answers(f"http://127.0.0.1:{made.gateway}/health")),
        running(
            [str(nginx), "-c", str(conf)],
            tmp_path / "nginx.log",
            lambda: all(answers(f"http://127.0.0.1:{port}/health") for port in (made.shortest, made.keeps_host)),
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
        assert status == 403
        body += ask(port, "/ready", "api.example.com")[1]
        chat = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        status, error = ask(port, "/v1/chat/completions", "api.example.com", chat)
        assert status == 503
        assert "request id" in error
        assert str(site.replica) not in body + error
