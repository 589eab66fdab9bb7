"""Containers of the chart run, with their security contexts and probes, and find each other: no cluster, and no image."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.helm import Helm, Objects, container, pod
from tests.deploy.processes import until
from tests.support.pods import Container, Pod, address, node
from tests.support.tools import ROOT, tool

pytestmark = pytest.mark.tools

NO_CAPABILITIES = "0" * 16
ADMIN_KEY = "an-admin-key"


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tool("helm"), tmp_path)


def only(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    (one,) = spec["containers"]
    assert isinstance(one, dict)
    return one


def restricted(running: Container) -> None:
    """The process is what the security contexts say."""
    status = running.status
    assert status["Uid"].split() == ["65532"] * 4
    assert (status["CapEff"], status["CapBnd"], status["NoNewPrivs"]) == (NO_CAPABILITIES, NO_CAPABILITIES, "1")
    enter = ["nsenter", "-t", str(running.process.pid), "-m", "-r", "touch"]
    refused = subprocess.run([*enter, "/etc/x"], capture_output=True, text=True, check=False)
    assert "Read-only file system" in refused.stderr
    assert subprocess.run([*enter, "/tmp/x"], check=False).returncode == 0


def rendered(helm: Helm) -> Objects:
    """The gateway and simulated replicas, and where they are: the chart's own source needs an API server."""
    stable = "http://demo-warmroute-replicas-{}.demo-warmroute-replicas.llm:8000"
    pools = [{"name": "main", "replicas": [stable.format(0), stable.format(1)]}]
    return helm.objects(
        {
            "replicas": {"enabled": True, "engine": "sim", "model": "sim", "pool": "main"},
            "config": {"pools": pools},
            "adminKey": {"existingSecret": {"name": "admin"}},
        }
    )


def test_the_demo_answers_helm_test_and_stops_within_its_grace_period(helm: Helm, tmp_path: Path) -> None:
    objects = rendered(helm)
    engines, gateway_pod = objects["StatefulSet of replicas"]["spec"]["template"]["spec"], pod(objects)
    service, headless = "demo-warmroute", "demo-warmroute-replicas"
    names = {f"{headless}-{index}.{headless}.llm": address(index) for index in range(2)} | {f"{service}.llm": address(2)}
    secrets, maps = {"admin/admin-key": ADMIN_KEY}, {service: objects["ConfigMap"]["data"]}
    with node(tmp_path) as here:
        for _ in range(2):
            replica_pod = here.pod(names)
            replica = replica_pod.run(engines, only(engines), secrets, {})
            assert replica_pod.passes(only(engines), "startupProbe", replica), replica.output
            restricted(replica)

        front = here.pod(names)
        gateway = front.run(gateway_pod, container(objects), secrets, maps)
        for probe in ("startupProbe", "livenessProbe"):
            assert front.passes(container(objects), probe, gateway), gateway.output
        until(lambda: front.get(8000, "/ready") == 200, "the gateway is ready")
        restricted(gateway)
        assert front.get(8000, "/warmroute/replicas") == 401, "there is an admin key"
        assert front.get(8002, "/metrics") == 200

        tests = objects["Pod of test"]["spec"]
        tester = here.pod(names).run({**gateway_pod, **tests}, only(tests), {}, {})
        assert tester.process.wait(120) == 0, tester.output
        assert "sim has answered" in tester.output
        unknown = {**only(tests), "args": [*only(tests)["args"], "no-such-model"]}
        refused = here.pod(names).run({**gateway_pod, **tests}, unknown, {}, {})
        assert refused.process.wait(120) == 1
        assert "FAILED" in refused.output
        assert "no-such-model" in refused.output

        assert gateway.stopped(gateway_pod["terminationGracePeriodSeconds"]) == 0, gateway.output


@pytest.mark.parametrize("password", ["", "pass word, with $(X) and \"quotes'"])
def test_valkey_keeps_what_it_is_given_and_asks_for_its_password(helm: Helm, tmp_path: Path, password: str) -> None:
    """By a real server: valkey-server, or the redis-server that it comes from."""
    server = valkey_server()
    auth = {"existingSecret": {"name": "valkey"}} if password else {}
    objects = helm.objects({"config": {"discovery": [{"kubernetes": "a"}]}, "valkey": {"enabled": True, "auth": auth}})
    spec = objects["Deployment of valkey"]["spec"]["template"]["spec"]
    assert only(spec)["command"] == ["valkey-server"]
    program = {**only(spec), "command": [str(server)]}
    with node(tmp_path) as here:
        place = here.pod({})
        valkey = place.run(spec, program, {"valkey/password": password}, {}, server.parent)
        login = [["AUTH", password]] if password else []
        until(lambda: said(place, *login, ["PING"]).endswith("+PONG\r\n"), f"it answers: {valkey.output}")
        restricted(valkey)
        assert said(place, ["PING"]).startswith("-NOAUTH" if password else "+PONG")
        assert said(place, *login, ["SET", "a", "b"]).endswith("+OK\r\n")
        assert str(256 << 20) in said(place, *login, ["CONFIG", "GET", "maxmemory"])
        assert said(place, *login, ["CONFIG", "GET", "save"]).endswith("save\r\n$0\r\n\r\n"), "nothing is written to disk"
        assert valkey.stopped(30) == 0, valkey.output


def valkey_server() -> Path:
    local = ROOT / ".tools" / "bin" / "redis-server"
    found = str(local) if local.exists() else shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found or pytest.skip("no valkey-server, no redis-server")).resolve()


def said(pod: Pod, *commands: Sequence[str]) -> str:
    """The answers to commands of one connection, as they come over the wire; empty: nobody is there."""
    words = [b"*%d\r\n" % len(command) + b"".join(map(bulk, command)) for command in [*commands, ["QUIT"]]]
    program = (
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[1], 6379), 5) as to:\n"
        "    to.sendall(bytes.fromhex(sys.argv[2]))\n"
        "    while some := to.recv(65536): sys.stdout.buffer.write(some)\n"
    )
    arguments = [pod.address, b"".join(words).hex()]
    command = [*pod.inside, sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    return done.stdout.decode().removesuffix("+OK\r\n")


def bulk(word: str) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode())
