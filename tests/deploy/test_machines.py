"""deploy/: the systemd unit and the compose file, without systemd as process 1 and without Docker."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bench.measure.ports import free_port
from gateway.features.sharing.server.client import PASSWORD, SENTINEL_PASSWORD
from replica.flags import parser
from tests.deploy.processes import answers, running, until
from tests.deploy.test_pods import valkey_server
from tests.support.configs import load
from tests.support.pods import Container, Pod, address, node
from tests.support.tools import ROOT, tool

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "warmroute.service"
COMPOSE: Mapping[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
CONFIG = DEPLOY / "warmroute" / "config.yaml"
WARMROUTE = Path(sys.executable).with_name("warmroute")
END_S = 10  # beside the times that the configuration gives, as in the chart
MOST_EXPOSED = 2.0  # of systemd's own rating, from 0 (locked up) to 10
DENY_WRITE_EXECUTE = 65  # prctl's PR_SET_MDWE


def lines_of(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)


def command_of(service: Mapping[str, Any], config: str = "config.yaml") -> list[str]:
    """With the configuration that the variable CONFIG names."""
    return [word.replace("${CONFIG:-config.yaml}", config) for word in service["command"]]


def services(profile: str) -> Mapping[str, Mapping[str, Any]]:
    return {name: each for name, each in COMPOSE["services"].items() if profile in each.get("profiles", [profile])}


# -- the configuration of both


def test_the_gateway_loads_the_configuration() -> None:
    config = load(CONFIG, {}, {})
    assert (config.listen, config.metrics_listen) == ("0.0.0.0:8000", "0.0.0.0:8002")
    (source,) = config.discovery
    assert source.file == "/etc/warmroute/replicas.yaml"


def test_the_configuration_for_sharing_is_the_same_but_for_that() -> None:
    both = [yaml.safe_load((DEPLOY / "warmroute" / name).read_text("utf-8")) for name in ("config.yaml", "sharing.yaml")]
    assert both[1] == {**both[0], "sharing": {"url": "redis://valkey:6379"}}
    load(DEPLOY / "warmroute" / "sharing.yaml", {}, {})


# -- systemd


def test_the_unit_starts_the_gateway_and_waits_for_its_requests() -> None:
    config = load(CONFIG, {}, {})
    (start,) = lines_of("ExecStart")
    assert start.split() == ["/opt/warmroute/bin/warmroute", "serve", "--config", "/etc/warmroute/config.yaml"]
    assert int(lines_of("TimeoutStopSec")[0]) >= config.limits.drain_accept_s + config.limits.drain_timeout_s + END_S
    assert int(lines_of("LimitNOFILE")[0]) >= 4 * config.limits.connections


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with this checkout's program."""
    file = tmp_path / UNIT.name
    file.write_text(UNIT.read_text("utf-8").replace("/opt/warmroute/bin/warmroute", str(WARMROUTE)), "utf-8")
    return file


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze") or pytest.skip("no systemd-analyze")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def test_systemd_takes_the_unit(unit: Path) -> None:
    done = analyzed("verify", "--man=no", unit)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_rates_it_as_locked_up(unit: Path) -> None:
    done = analyzed("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}", "--no-pager", unit)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gateway_needs_no_memory_that_can_be_written_and_executed(tmp_path: Path) -> None:
    """MemoryDenyWriteExecute, with what may want such memory: uvloop, SQLite, callbacks from the DNS library."""
    assert lines_of("MemoryDenyWriteExecute") == ["yes"]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(DENY_WRITE_EXECUTE + 1, 0, 0, 0, 0) < 0:  # PR_GET_MDWE
        pytest.skip("this kernel cannot deny it")
    replica, port = free_port(), free_port()
    config = tmp_path / "config.yaml"
    discovery = [{"dns": {"name": "localhost", "port": replica}}]
    config.write_text(json.dumps({"listen": f"127.0.0.1:{port}", "admin_listen": "off", "discovery": discovery}), "utf-8")
    denied = (
        "import ctypes, mmap, os, sys\n"
        f"assert ctypes.CDLL(None).prctl({DENY_WRITE_EXECUTE}, 1, 0, 0, 0) == 0\n"
        "try: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "except PermissionError: os.execv(sys.argv[1], sys.argv[1:])"
    )
    engine = [str(WARMROUTE), "replica", "--engine", "sim", "--port", str(replica)]
    serve = [sys.executable, "-c", denied, str(WARMROUTE), "serve", "--config", str(config)]
    url = f"http://127.0.0.1:{port}"
    with (
        running(engine, tmp_path / "replica.log", lambda: answers(f"http://127.0.0.1:{replica}/health")),
        running(serve, tmp_path / "gateway.log", lambda: answers(f"{url}/health")),
    ):
        until(lambda: answers(f"{url}/ready"), "the replica is found by DNS")
        chat = [sys.executable, str(ROOT / "helm" / "files" / "connection.py"), url, "request"]
        assert subprocess.run(chat, check=False).returncode == 0


# -- Docker Compose


@pytest.mark.tools
def test_the_compose_file_keeps_to_the_specification() -> None:
    schema = json.loads(tool("compose-spec.json").read_text("utf-8"))
    later = {"name"}  # keys that came after this version of the schema
    known = {name: value for name, value in COMPOSE.items() if name not in later}
    jsonschema.Draft201909Validator(schema).validate(known)
    assert COMPOSE["name"] == "warmroute"


def test_what_is_mounted_and_named_is_there() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), f"{name}: {source}"
    assert set(COMPOSE["services"]["prometheus"]["command"]) >= {"--config.file=/etc/prometheus/prometheus.yml"}


@pytest.mark.parametrize("profile", ["sim", "vllm"])
def test_each_profile_has_the_replicas_of_the_configuration(profile: str) -> None:
    names = set(services(profile))
    for service in services(profile).values():
        names |= set(service.get("networks", {}).get("default", {}).get("aliases", ()))
    listed = yaml.safe_load((DEPLOY / "warmroute" / "replicas.yaml").read_text("utf-8"))["replicas"]
    assert {url.removeprefix("http://").removesuffix(":8000") for url in listed} <= names
    for service in services(profile).values():
        if (command := service["command"])[0] == "replica":
            options = parser().parse_args(command[1:])
            assert (options.host, options.port) == ("0.0.0.0", 8000)
        elif service.get("entrypoint") == ["vllm", "serve"]:
            assert {"--enable-prompt-tokens-details", "8000"} <= set(command)


def test_our_containers_have_no_rights() -> None:
    ours = {name: each for name, each in COMPOSE["services"].items() if not name.startswith("vllm")}
    assert {"gateway", "gateway-2", "replica-1", "replica-2", "prometheus", "valkey"} == ours.keys()
    for name, service in ours.items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    ports = [port for each in ours.values() for port in each.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len(set(ports)) == len(ports)


def test_gateways_keep_what_they_know_when_their_container_is_made_anew() -> None:
    volumes = [
        volume for name in ("gateway", "gateway-2") for volume in COMPOSE["services"][name]["volumes"] if ":ro" not in volume
    ]
    assert volumes == ["gateway:/var/lib/warmroute", "gateway-2:/var/lib/warmroute"]
    assert COMPOSE["volumes"].keys() >= {"gateway", "gateway-2"}
    for name in ("gateway", "gateway-2"):
        assert COMPOSE["services"][name]["environment"]["XDG_STATE_HOME"] == "/var/lib"
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert "RUN mkdir --mode 1777 /var/lib/warmroute\n" in image, "a new volume gets the rights of the image's folder"


def test_only_gateways_reach_the_valkey_that_asks_for_no_password() -> None:
    assert COMPOSE["networks"] == {"sharing": {"internal": True}}
    members = {name for name, each in COMPOSE["services"].items() if "sharing" in each.get("networks", ())}
    assert members == {"gateway", "gateway-2", "valkey"}
    assert COMPOSE["services"]["valkey"]["networks"].keys() == {"sharing"}
    assert COMPOSE["services"]["valkey"].get("ports", []) == []


@pytest.mark.parametrize("page", ["docs/machines.md", "deploy/compose.yaml"])
def test_every_profile_on_the_page_is_one(page: str) -> None:
    known = {profile for each in COMPOSE["services"].values() for profile in each.get("profiles", ())}
    assert set(re.findall(r"--profile (\S+)", (ROOT / page).read_text("utf-8"))) == known


def test_secrets_are_named_where_they_are_given() -> None:
    secrets = {"WARMROUTE_ADMIN_KEY", "WARMROUTE_READ_KEY", "PGPASSWORD", PASSWORD, SENTINEL_PASSWORD}
    for page in (UNIT, ROOT / "docs" / "machines.md"):
        assert [name for name in secrets if name not in page.read_text("utf-8")] == [], page
    for name in ("gateway", "gateway-2"):
        environment = COMPOSE["services"][name]["environment"]
        assert {key for key, value in environment.items() if value is None} == secrets, "from the environment of docker compose"


@pytest.mark.tools
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8")
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace("/etc/prometheus/rules", str(ROOT / "rules")), "utf-8")
    done = subprocess.run([tool("promtool"), "check", "config", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = yaml.safe_load(text)["scrape_configs"]
    targets = [each for job in jobs for each in job["static_configs"][0]["targets"]]
    assert {target.partition(":")[0] for target in targets} <= services("sim").keys()
    (found,) = jobs[0]["dns_sd_configs"]
    first, port = jobs[0]["static_configs"][0]["targets"][0].split(":")
    scraped = {first, *found["names"]}
    assert scraped == {name for name in COMPOSE["services"] if name.startswith("gateway")}, "each gateway"
    assert (found["type"], found["port"]) == ("A", int(port))


def test_the_containers_of_the_compose_file_answer(tmp_path: Path) -> None:
    """The commands of the services, as the image would run them, with their user, without rights, in a network of their own."""
    names = ["replica-1", "replica-2", "gateway"]
    hosts = {name: address(index) for index, name in enumerate(names)}
    with node(tmp_path) as here:
        pods = {name: here.pod(hosts) for name in names}
        for name, pod in pods.items():
            made = started(pod, name)
            until(lambda pod=pod: pod.get(8000, "/health") == 200, f"{name} is there: {made.output}")  # type: ignore[misc]
            assert made.status["Uid"].split() == ["65532"] * 4
        gateway = pods["gateway"]
        until(lambda: gateway.get(8000, "/ready") == 200, "the replicas are found")
        assert gateway.get(8002, "/metrics") == 200
        assert said(gateway, COMPOSE["services"]["gateway"]["healthcheck"]["test"][1:]) == 0
        assert chats(gateway)


def test_two_gateways_of_the_compose_file_share(tmp_path: Path) -> None:
    """The profile `sharing` with CONFIG=sharing.yaml: what one has sent, the other knows."""
    server = valkey_server()
    names = ["replica-1", "replica-2", "valkey", "gateway", "gateway-2"]
    hosts = {name: address(index) for index, name in enumerate(names)}
    with node(tmp_path) as here:
        pods = {name: here.pod(hosts) for name in names}
        output = {name: started(pod, name, "sharing.yaml", server) for name, pod in pods.items()}
        gateways = [pods["gateway"], pods["gateway-2"]]
        for name, gateway in zip(names[-2:], gateways, strict=True):
            until(lambda gateway=gateway: gateway.get(8000, "/ready") == 200, f"{name}: {output[name].output}")  # type: ignore[misc]
            until(lambda gateway=gateway: "warmroute_sharing_gateways 1" in metrics(gateway), f"{name} sees the other one")  # type: ignore[misc]
            assert "warmroute_sharing_up 1" in metrics(gateway)
        first, second = gateways
        chat = {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "A long prompt. " * 100}]}
        assert said(first, ["python", "-c", POST, f"http://{first.address}:8000/v1/chat/completions", json.dumps(chat)]) == 0
        until(lambda: blocks(second) == blocks(first) > 0, "the second one knows the prompt")


POST = (
    "import sys, urllib.request as r; "
    "r.urlopen(r.Request(sys.argv[1], sys.argv[2].encode(), {'content-type': 'application/json'}), timeout=60)"
)


def started(pod: Pod, name: str, config: str = "config.yaml", valkey: Path | None = None) -> Container:
    """The container of a service. valkey: the program that is valkey-server here."""
    maps = {"etc": {path.name: path.read_text("utf-8") for path in (DEPLOY / "warmroute").iterdir()}}
    spec, container = as_pod(name, COMPOSE["services"][name], config)
    if name == "valkey" and valkey:
        return pod.run(spec, {**container, "command": [str(valkey), *container["command"][1:]]}, {}, maps, valkey.parent)
    return pod.run(spec, container, {}, maps)


def chats(gateway: Pod) -> bool:
    test = [str(ROOT / "helm" / "files" / "connection.py"), f"http://{gateway.address}:8000"]
    return said(gateway, ["python", *test, "request"]) == 0


def metrics(gateway: Pod) -> str:
    """Those of the gateway; empty: it is not there."""
    program = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    command = [*gateway.inside, sys.executable, "-c", program, f"http://{gateway.address}:8002/metrics"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def blocks(gateway: Pod) -> float:
    return sum(float(value) for value in re.findall(r"^warmroute_trie_blocks\S* (\S+)$", metrics(gateway), re.MULTILINE))


def said(pod: Pod, command: Sequence[str]) -> int:
    """The exit status of a command in the pod's network."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run([*pod.inside, *command], env=environment, check=False, timeout=120).returncode


def as_pod(name: str, service: Mapping[str, Any], config: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A service of the compose file in the words of Kubernetes."""
    user, group = map(int, service["user"].split(":"))
    context = {
        "runAsUser": user,
        "runAsGroup": group,
        "readOnlyRootFilesystem": service["read_only"],
        "capabilities": {"drop": service["cap_drop"]},
        "allowPrivilegeEscalation": "no-new-privileges:true" not in service["security_opt"],
    }
    volumes = [volume.split(":") for volume in service.get("volumes", ())]
    mounts = [{"name": "etc" if source.startswith(".") else "state", "mountPath": target} for source, target, *_ in volumes]
    entry = [] if "valkey-server" in service["command"] else ["warmroute"]  # the image's entry point
    command = [*entry, *command_of(service, config)]
    spec = {"volumes": [{"name": "etc", "configMap": {"name": "etc"}}, {"name": "state"}]}
    environment = [{"name": key, "value": value} for key, value in service.get("environment", {}).items() if value is not None]
    made = {"name": name, "command": command, "env": environment, "securityContext": context, "volumeMounts": mounts}
    return spec, made
