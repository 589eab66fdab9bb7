"""The fronts of docs/proxies.md as they stand there, over gateways that are processes of their own.

Changed are only what differs on every machine: the port, the certificate's files, and the gateways' addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.measure.ports import free_port
from tests.deploy.processes import answers, running, until
from tests.support.tools import ROOT, tool

PAGE: Final = ROOT / "docs" / "proxies.md"
FRONTS: Final = ("nginx", "haproxy", "envoy")
GATEWAY: Final = re.compile(r"10\.0\.0\.1\d:8000")
AROUND: Final = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
http {{
  access_log off; client_body_temp_path {folder}/bodies; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  {block}
}}
"""


def blocks(language: str) -> list[str]:
    """The page's blocks of code in it, of those for several gateways."""
    text = PAGE.read_text("utf-8").split("\n## Several gateways\n")[1]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate for localhost, which is its own authority. both: its key behind it."""

    chain: Path
    key: Path
    both: Path

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.chain))


def certificate(folder: Path) -> Certificate:
    made = Certificate(folder / "tls.crt", folder / "tls.key", folder / "tls.pem")
    command = [
        tool("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    names += ["-addext", "basicConstraints=critical,CA:FALSE"]  # some refuse an authority as a server
    subprocess.run([*command, *names, "-keyout", made.key, "-out", made.chain], check=True, capture_output=True)
    made.both.write_bytes(made.chain.read_bytes() + made.key.read_bytes())
    return made


def replaced(text: str, written: str, meant: str) -> str:
    """Exactly one of it."""
    assert text.count(written) == 1, f"{written} is {text.count(written)} times in the page's configuration"
    return text.replace(written, meant)


def for_each(text: str, ports: Sequence[int]) -> str:
    """The lines with the page's gateways, with these in their place."""
    lines = text.splitlines()
    places = [place for place, line in enumerate(lines) if GATEWAY.search(line)]
    assert len(places) == 2
    first = lines[places[0]]
    numbered = first.replace(" a ", " g{number} ").replace("id 1 ", "id {number} ")
    made = [
        GATEWAY.sub(f"127.0.0.1:{port}", numbered.replace("{number}", str(number)))
        for number, port in enumerate(ports, start=1)
    ]
    lines[places[0] : places[1] + 1] = made
    return "\n".join(lines) + "\n"


def nginx(port: int, gateways: Sequence[int], tls: Certificate, folder: Path, balance: str = "") -> list[str]:
    """balance: in the place of the line that hashes."""
    (block,) = blocks("nginx")
    block = replaced(block, "listen 443 ssl http2;", f"listen 127.0.0.1:{port} ssl http2;")
    block = replaced(block, "/etc/nginx/tls/tls.crt", str(tls.chain))
    block = replaced(block, "/etc/nginx/tls/tls.key", str(tls.key))
    if balance:
        block = replaced(block, "hash $warmroute_key consistent;", balance)
    conf = folder / "nginx.conf"
    conf.write_text(AROUND.format(folder=folder, block=for_each(block, gateways)), "utf-8")
    return [str(tool("nginx")), "-c", str(conf)]


def haproxy(port: int, gateways: Sequence[int], tls: Certificate, folder: Path) -> list[str]:
    (block,) = blocks("haproxy")
    block = replaced(block, "bind :443", f"bind 127.0.0.1:{port}")
    block = replaced(block, "/etc/haproxy/tls.pem", str(tls.both))
    conf = folder / "haproxy.conf"
    conf.write_text(for_each(block, gateways), "utf-8")
    return [str(tool("haproxy")), "-db", "-f", str(conf)]


def envoy(port: int, gateways: Sequence[int], tls: Certificate, folder: Path) -> list[str]:
    block = blocks("yaml")[0]
    block = replaced(block, "/etc/envoy/tls.crt", str(tls.chain))
    block = replaced(block, "/etc/envoy/tls.key", str(tls.key))
    block = replaced(block, "{address: 0.0.0.0, port_value: 443}", f"{{address: 127.0.0.1, port_value: {port}}}")
    config = yaml.safe_load(block)
    (cluster,) = config["static_resources"]["clusters"]
    (group,) = cluster["load_assignment"]["endpoints"]
    assert len(group["lb_endpoints"]) == 2
    group["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}} for each in gateways
    ]
    conf = folder / "envoy.yaml"
    conf.write_text(yaml.safe_dump(config), "utf-8")
    quiet = ["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    return [str(tool("envoy")), *quiet, "-c", str(conf)]


def envoy_gateway(port: int, gateways: Sequence[int], tls: Certificate, folder: Path) -> list[str]:
    """Envoy as Envoy Gateway configures it for the page's BackendTrafficPolicy: the headers without an order, and Maglev."""
    command = envoy(port, gateways, tls, folder)
    (policy,) = [one for one in yaml.safe_load_all(blocks("yaml")[1]) if one["kind"] == "BackendTrafficPolicy"]
    conf = Path(command[-1])
    config = yaml.safe_load(conf.read_text("utf-8"))
    (cluster,), (listener,) = config["static_resources"]["clusters"], config["static_resources"]["listeners"]
    del cluster["ring_hash_lb_config"]
    cluster["lb_policy"] = "MAGLEV"
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][1]["route"]
    names = [header["name"] for header in policy["spec"]["loadBalancer"]["consistentHash"]["headers"]]
    route["hash_policy"] = [{"header": {"header_name": name}} for name in names]
    conf.write_text(yaml.safe_dump(config), "utf-8")
    return command


COMMANDS: Final[dict[str, Callable[[int, Sequence[int], Certificate, Path], list[str]]]] = {
    "nginx": nginx,
    "haproxy": haproxy,
    "envoy": envoy,
    "envoy gateway": envoy_gateway,
}


class Gateways:
    """Processes on ports of their own, over the same replicas. They can be killed and started again."""

    def __init__(self, folder: Path, replicas: Sequence[str], count: int, more: Mapping[str, Any]) -> None:
        """more: keys of their configuration."""
        self._more = more
        self._folder = folder
        self._replicas = list(replicas)
        self._running: dict[int, contextlib.ExitStack] = {}
        self._logs: list[tuple[int, Path]] = []
        self.ports = [free_port() for _ in range(count)]

    def start(self, number: int) -> None:
        settings = {
            "listen": f"127.0.0.1:{self.ports[number]}",
            "admin_listen": "off",
            "pools": [{"replicas": self._replicas}],
            "state": {"url": "off"},
            **self._more,
        }
        file = self._folder / f"gateway-{number}.yaml"
        file.write_text(yaml.safe_dump(settings), "utf-8")
        log = self._folder / f"gateway-{number}-{len(self._logs)}.log"
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
        stack = contextlib.ExitStack()
        process = stack.enter_context(running(command, log, lambda: answers(f"http://127.0.0.1:{self.ports[number]}/ready")))
        stack.callback(process.kill)
        self._running[number] = stack
        self._logs.append((number, log))

    def kill(self, number: int) -> None:
        """At once, as a machine that fails."""
        self._running.pop(number).close()

    def stop(self) -> None:
        for number in list(self._running):
            self.kill(number)

    def lines(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """By the request's id: the gateway that answered it, and its log line."""
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        for number, log in self._logs:
            for line in log.read_text("utf-8").splitlines():
                if '"message":"request"' in line:
                    entry = json.loads(line)
                    found[entry["id"]] = number, entry
        return found

    def where(self, ids: Sequence[str]) -> dict[str, tuple[int, dict[str, Any]]]:
        """The same of these requests, when all are in the logs."""

        def all_of() -> dict[str, tuple[int, dict[str, Any]]] | None:
            found = self.lines()
            return {one: found[one] for one in ids} if all(one in found for one in ids) else None

        return until(all_of, "the gateways' log lines") or {}


@dataclass(frozen=True, slots=True)
class Site:
    """A front that answers. url: https."""

    url: str
    gateways: Gateways
    tls: Certificate


@contextlib.asynccontextmanager
async def gateways_of(folder: Path, replicas: Sequence[str], count: int, **more: Any) -> AsyncIterator[Gateways]:
    gateways = Gateways(folder, replicas, count, more)
    try:
        await asyncio.gather(*(asyncio.to_thread(gateways.start, number) for number in range(count)))
        yield gateways
    finally:
        await asyncio.to_thread(gateways.stop)


@contextlib.asynccontextmanager
async def front(name: str, gateways: Sequence[int], folder: Path, **options: str) -> AsyncIterator[tuple[str, Certificate]]:
    """Its URL, and the certificate that it shows. It runs, whether a gateway is behind it or not."""
    port, tls = free_port(), certificate(folder)
    command = COMMANDS[name](port, gateways, tls, folder, **options)
    stack = contextlib.ExitStack()
    try:
        await asyncio.to_thread(stack.enter_context, running(command, folder / "front.log", lambda: listens(port)))
        yield f"https://localhost:{port}", tls
    finally:
        await asyncio.to_thread(stack.close)


def listens(port: int) -> bool:
    """Whether something on this port shakes hands."""
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError):
        ssl.get_server_certificate(("127.0.0.1", port), timeout=5)
        return True
    return False
