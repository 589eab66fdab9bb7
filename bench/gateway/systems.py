"""The measured systems: installation and start.

Each is configured as its documentation recommends, on 127.0.0.1, in front of the same replicas; prompt-aware routers use
`cache_aware`. Logs are written to /dev/null.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure.cpu import pinned
from bench.measure.machine import ROOT
from bench.measure.ports import free_ports
from bench.measure.prompts import Requests
from gateway import __version__

COMPILED = ROOT / "build" / "compiled"
PEERS = Path(os.environ.get("WARMROUTE_PEERS") or ROOT / ".peers")
BEFORE = "warmroute before"  # another version
START_S = 120.0  # LiteLLM takes half a minute
END_S = 3.0


class NotStarted(Exception):
    """The system does not answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of a start. spare: a second port. folder: of this system only. program: its executable."""

    port: int
    spare: int
    urls: tuple[str, ...]
    folder: Path
    program: str


@dataclass(frozen=True, slots=True)
class System:
    """program: its executable, "" for ours. package: on PyPI, "" if it comes from elsewhere."""

    name: str
    command: Callable[[Setting], list[str]]
    program: str = ""
    package: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str | None:
        """Where its executable is: of its own environment, else on PATH, where root's programs are, too."""
        if not self.program:
            stale = self.name == "warmroute" and self.environment is _COMPILED and not compiled()
            return None if stale else sys.executable
        own = PEERS / self.package / "bin" / self.program
        search = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
        return str(own) if self.package and own.exists() else shutil.which(self.program, path=search)

    @property
    def install(self) -> str:
        if not self.program:
            return f"`python hatch_build.py {COMPILED.relative_to(ROOT)}`"
        return f"`pip install {self.package}`" if self.package else f"`apt-get install {self.program}`"

    def version(self) -> str:
        if not self.program:
            return __version__ if self.package == "warmroute" else importlib.metadata.version(self.package)
        python = PEERS / self.package / "bin" / "python"
        asked = (
            [str(python), "-c", f"import importlib.metadata as m; print(m.version({self.package!r}))"]
            if self.package and python.exists()
            else [str(self.path), "-v" if not self.package else "--version"]
        )
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        found = re.search(r"\d+\.\d+[\w.]*", done.stdout + done.stderr)
        return found[0] if found else ""


@dataclass(slots=True)
class Running:
    """A system that answers."""

    system: System
    process: subprocess.Popen[bytes]
    port: int


# -- their command lines


_COMPILED: Mapping[str, str] = {"PYTHONPATH": str(COMPILED), "PYTHONSAFEPATH": "1"}


def _warmroute(at: Setting) -> list[str]:
    replicas = [flag for url in at.urls for flag in ("--replica", url)]
    return [at.program, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", str(at.port), *replicas]


def with_workers(workers: int) -> System:
    """Ours, compiled, as several processes."""

    def command(at: Setting) -> list[str]:
        return [*_warmroute(at), "--workers", str(workers)]

    return System(f"{workers} workers", command, package="warmroute", environment=_COMPILED)


def another_build(folder: Path) -> System:
    """Ours, of the sources in a folder that `hatch_build.py` made: to compare two versions in one run."""
    return System(BEFORE, _warmroute, package="warmroute", environment={**_COMPILED, "PYTHONPATH": str(folder.resolve())})


def _plain(at: Setting) -> list[str]:
    return [at.program, "-m", "bench.gateway.plain", str(at.port), *at.urls]


def _router(at: Setting) -> list[str]:
    """sglang-router and its forks share their flags, and all but one a subcommand."""
    address = ["--host", "127.0.0.1", "--port", str(at.port), "--prometheus-port", str(at.spare)]
    return [at.program, *address, "--policy", "cache_aware", "--worker-urls", *at.urls]


def _launched(at: Setting) -> list[str]:
    program, *flags = _router(at)
    return [program, "launch", *flags]


# Otherwise it would fetch prices from the internet, and not start without a key.
_LITELLM_ENVIRONMENT: Mapping[str, str] = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


def _litellm(at: Setting) -> list[str]:
    entries = "".join(
        f"  - {{model_name: m, litellm_params: {{model: openai/m, api_base: '{url}/v1', api_key: none}}}}\n" for url in at.urls
    )
    config = at.folder / "litellm.yaml"
    config.write_text(f"model_list:\n{entries}", "utf-8")
    flags = ["--host", "127.0.0.1", "--port", str(at.port), "--num_workers", "1", "--telemetry", "False"]
    return [at.program, "--config", str(config), *flags]


_NGINX = """worker_processes 1;
daemon off;
user root;
pid {folder}/nginx.pid;
error_log /dev/null;
events {{ worker_connections 16384; }}
http {{
  access_log /dev/null;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_max_body_size 64m; client_body_buffer_size 256k;
  keepalive_requests 100000000; keepalive_timeout 600s;
  upstream replicas {{
    least_conn; {servers}
    keepalive 4096; keepalive_requests 100000000; keepalive_timeout 600s;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://replicas;
      proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering on; proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _nginx(at: Setting) -> list[str]:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in at.urls)
    config = at.folder / "nginx.conf"
    text = _NGINX.format(folder=at.folder, port=at.port, servers=servers)
    config.write_text(text if os.geteuid() == 0 else text.replace("user root;\n", ""), "utf-8")
    return [at.program, "-e", "/dev/null", "-p", str(at.folder), "-c", str(config)]


_HAPROXY = """global
  maxconn 8192
  nbthread 1
defaults
  mode http
  option http-no-delay
  option http-keep-alive
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
listen gateway
  bind 127.0.0.1:{port} backlog 4096
  balance leastconn
{servers}
"""


def _haproxy(at: Setting) -> list[str]:
    servers = "\n".join(f"  server r{number} {url.removeprefix('http://')}" for number, url in enumerate(at.urls))
    config = at.folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(port=at.port, servers=servers), "utf-8")
    return [at.program, "-db", "-f", str(config)]


SYSTEMS: Sequence[System] = (
    # As a wheel has it; and as a checkout without a C compiler.
    System("warmroute", _warmroute, package="warmroute", environment=_COMPILED),
    System("warmroute-plain", _warmroute, package="warmroute"),
    System("sglang-router", _launched, "sglang-router", "sglang-router"),
    System("smg", _launched, "smg", "smg"),
    System("vllm-router", _router, "vllm-router", "vllm-router"),
    System("litellm", _litellm, "litellm", "litellm", _LITELLM_ENVIRONMENT),
    System("nginx", _nginx, "nginx"),
    System("haproxy", _haproxy, "haproxy"),
    System("plain aiohttp proxy", _plain, package="aiohttp"),
)


def compiled() -> bool:
    """Whether the compiled packages are there, made from the sources as they are."""
    sources = [path for package in ("router", "gateway") for path in (ROOT / package).rglob("*.py")]
    copies = [COMPILED / path.relative_to(ROOT) for path in sources]
    return all(
        copy.exists() and copy.read_bytes() == path.read_bytes() for path, copy in zip(sources, copies, strict=True)
    ) and any((COMPILED / "router").glob("*.so"))


# -- starting them


@contextlib.contextmanager
def started(
    system: System, urls: Sequence[str], folder: Path, cores: set[int], probe: Callable[[int], bool] | None = None
) -> Iterator[Running]:
    """Runs while the context does, on these cores. probe: whether it answers at this port; by default it is sent generations of
    a chat, which a real engine would take long for. Raises NotStarted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, spare = free_ports(2)
    command = system.command(Setting(port, spare, tuple(urls), folder, str(system.path)))
    with pinned(cores):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_STATE_HOME": str(folder), **system.environment},  # ours keeps responses there
            start_new_session=True,
        )
    try:
        _await_answers(process, port, command, probe or _generates())
        yield Running(system, process, port)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first, so that it ends its own children; then SIGKILL for the rest of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _await_answers(process: subprocess.Popen[bytes], port: int, command: Sequence[str], answers: Callable[[int], bool]) -> None:
    """Some good answers in a row, so that it knows all of its replicas."""
    until, row = time.monotonic() + START_S, 0
    while row < 5:
        if process.poll() is not None or time.monotonic() > until:
            ended = f"ended with {process.returncode}" if process.returncode is not None else f"no answer in {START_S:.0f} s"
            raise NotStarted(f"{ended}: {' '.join(command)}")
        row = row + 1 if answers(port) else 0
        time.sleep(0.1)


def _generates() -> Callable[[int], bool]:
    body = next(Requests(2000, 0)).partition(b"\r\n\r\n")[2]
    return lambda port: good(port, "POST", "/v1/chat/completions", body)


def good(port: int, method: str, path: str, body: bytes | None) -> bool:
    """True if the answer is 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    else:
        return response.status == 200
    finally:
        connection.close()


@contextlib.contextmanager
def mocks(replicas: int, interval: float, cores: set[int], *, chat_only: bool = False) -> Iterator[list[str]]:
    """The base URLs of mock replicas, which run while the context does. chat_only: they do not speak Messages and Responses."""
    command = [sys.executable, "-m", "bench.measure.mock", "--replicas", str(replicas), "--interval", str(interval)]
    if chat_only:
        command.append("--chat-only")
    with pinned(cores):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield [f"http://127.0.0.1:{int(process.stdout.readline())}" for _ in range(replicas)]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
