"""Containers of the chart run, with their security contexts and probes, and find each other: no cluster, and no image."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.helm import Helm, Objects, container, pod
from tests.deploy.processes import until
from tests.support.pods import Container, address, node
from tests.support.tools import tool

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
    server = shutil.which("valkey-server") or shutil.which("redis-server") or pytest.skip("no valkey-server, no redis-server")
    auth = {"existingSecret": {"name": "valkey"}} if password else {}
    objects = helm.objects({"config": {"discovery": [{"kubernetes": "a"}]}, "valkey": {"enabled": True, "auth": auth}})
    spec = objects["Deployment of valkey"]["spec"]["template"]["spec"]
    program = {**only(spec), "command": [Path(server).name]}
    with node(tmp_path) as here:
        place = here.pod({})
        valkey = place.run(spec, program, {"valkey/password": password}, {})
        cli = [*place.inside, str(Path(server).with_name(Path(server).name.replace("server", "cli"))), "-h", place.address]
        if not Path(cli[-3]).exists():
            pytest.skip(f"no {Path(cli[-3]).name}")

        def said(*words: str, key: str = "") -> str:
            login = {"REDISCLI_AUTH": key, "VALKEYCLI_AUTH": key} if key else {}
            return subprocess.run([*cli, *words], env=login, capture_output=True, text=True, check=False).stdout.strip()

        until(lambda: said("ping", key=password) == "PONG", f"it answers: {valkey.output}")
        restricted(valkey)
        assert said("ping") == ("NOAUTH Authentication required." if password else "PONG")
        assert said("set", "a", "b", key=password) == "OK"
        assert said("config", "get", "maxmemory", key=password).split() == ["maxmemory", str(256 << 20)]
        assert said("config", "get", "save", key=password) == "save", "nothing is written to disk"
        assert valkey.stopped(30) == 0, valkey.output
