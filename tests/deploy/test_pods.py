"""Containers of the chart run, with their security contexts and probes, and find each other: no cluster, and no image."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import CHART, Helm, container, pod
from tests.deploy.processes import stop, until
from tests.support.kubernetes import endpoint, slice_of
from tests.support.pods import Container, Node, Pod, address, node
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


@contextlib.contextmanager
def an_api_server(here: Node, folder: Path, service: str, addresses: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """It knows the endpoints of that Service. Returns what the kubelet gives to pods that may ask it."""
    place = here.pod({})
    key, certificate = folder / "api.key", folder / "api.crt"
    san = f"subjectAltName=IP:{place.address}"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run([*made, "-subj", "/CN=api", "-addext", san], check=True, capture_output=True)
    endpoints = [endpoint(address, f"{service}-{index}") for index, address in enumerate(addresses)]
    listed = {"metadata": {"resourceVersion": "1"}, "items": [slice_of("a", *endpoints, service=service)]}
    page = folder / "slices.json"
    page.write_text(json.dumps(listed), "utf-8")
    program = [sys.executable, str(ROOT / "tests" / "support" / "slices_server.py")]
    process = subprocess.Popen([*place.inside, *program, "6443", str(certificate), str(key), "a-token", str(page)])
    try:
        yield {
            "account": {"token": "a-token", "ca.crt": certificate.read_text("utf-8"), "namespace": "llm"},
            "environment": {"KUBERNETES_SERVICE_HOST": place.address, "KUBERNETES_SERVICE_PORT": "6443"},
        }
    finally:
        stop(process)


def test_the_demo_answers_helm_test_and_stops_within_its_grace_period(helm: Helm, tmp_path: Path) -> None:
    """helm/examples/cpu-demo.yaml as it is, with an admin key: the gateway finds the replicas by the chart's own source."""
    values = yaml.safe_load((CHART / "examples" / "cpu-demo.yaml").read_text("utf-8"))
    objects = helm.objects({**values, "adminKey": {"existingSecret": {"name": "admin"}}})
    engines, gateway_pod = objects["StatefulSet of replicas"]["spec"]["template"]["spec"], pod(objects)
    service, headless = "demo-warmroute", objects["Service of replicas"]["metadata"]["name"]
    names = {f"{service}.llm": address(3)}
    secrets, maps = {"admin/admin-key": ADMIN_KEY}, {service: objects["ConfigMap"]["data"]}
    with node(tmp_path) as here, an_api_server(here, tmp_path, headless, [address(1), address(2)]) as given:
        for _ in range(2):
            replica_pod = here.pod(names)
            replica = replica_pod.run(engines, only(engines), secrets, {})
            assert replica_pod.passes(only(engines), "startupProbe", replica), replica.output
            restricted(replica)

        front = here.pod(names)
        front.account, front.environment = given["account"], given["environment"]
        gateway = front.run(gateway_pod, container(objects), secrets, maps)
        for probe in ("startupProbe", "livenessProbe"):
            assert front.passes(container(objects), probe, gateway), gateway.output
        until(lambda: front.get(8000, "/ready") == 200, f"the gateway is ready: {gateway.output}")
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


@pytest.mark.parametrize("password", ["", "pass word, with $(X), \\n, \"quotes' and ü\n"])
def test_valkey_keeps_what_it_is_given_and_asks_for_its_password(helm: Helm, tmp_path: Path, password: str) -> None:
    """By a real server: valkey-server, or the redis-server that it comes from."""
    server = valkey_server()
    auth = {"existingSecret": {"name": "valkey"}} if password else {}
    objects = helm.objects({"config": {"discovery": [{"kubernetes": "a"}]}, "valkey": {"enabled": True, "auth": auth}})
    spec = objects["Deployment of valkey"]["spec"]["template"]["spec"]
    assert "valkey-server" in only(spec)["command"]
    program = {**only(spec), "command": [word.replace("valkey-server", str(server)) for word in only(spec)["command"]]}
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
    """Under its own name: Debian's redis-server is a link to redis-check-rdb, one program that goes by how it is called."""
    local = ROOT / ".tools" / "bin" / "redis-server"
    found = str(local) if local.exists() else shutil.which("valkey-server") or shutil.which("redis-server")
    path = Path(found or pytest.skip("no valkey-server, no redis-server"))
    return path.parent.resolve() / path.name


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
