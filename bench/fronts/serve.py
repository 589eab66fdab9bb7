"""Several gateways behind one nginx, as one system that a benchmark can start.

    python -m bench.fronts.serve PORT GATEWAYS BALANCE FOLDER REPLICA_URL...

BALANCE: session (the hash of docs/sessions-in-front.md) or round_robin. In the clear: what is measured is the way, not TLS.
Ends at SIGTERM, and ends what it has started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from bench.measure.ports import free_ports

BALANCES = ("session", "round_robin")
_HASH = "hash $key consistent;"
_NGINX = """
{user} daemon off; pid {folder}/nginx.pid; error_log /dev/null; worker_processes 1;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  map "$http_x_claude_code_session_id$http_session_id$http_x_session_id" $key {{
    "~^(?<session>.+)$" $session; default "$remote_addr $http_authorization $http_x_api_key";
  }}
  upstream gateways {{ zone gateways 256k; {balance} {servers} keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000; client_max_body_size 64m; client_body_buffer_size 1m;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_buffering off; proxy_read_timeout 330s;
    location / {{ proxy_pass http://gateways; }}
  }}
}}
"""


def program() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def gateway(port: int, admin: int, urls: Sequence[str], folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    settings = {"listen": f"127.0.0.1:{port}", "admin_listen": f"127.0.0.1:{admin}", "pools": [{"replicas": list(urls)}]}
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump({**settings, "state": {"url": "off"}}), "utf-8")
    return [sys.executable, "-m", "gateway", "serve", "--config", str(file)]


def nginx(port: int, gateways: Sequence[int], balance: str, folder: Path) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{each};" for each in gateways)
    user = "user root;" if os.geteuid() == 0 else ""
    chosen = _HASH if balance == "session" else ""
    text = _NGINX.format(folder=folder, port=port, servers=servers, balance=chosen, user=user)
    file = folder / "nginx.conf"
    file.write_text(text, "utf-8")
    return [program() or "nginx", "-e", "/dev/null", "-p", str(folder), "-c", str(file)]


def main(arguments: Sequence[str]) -> None:
    port, count, balance, place, *urls = arguments
    folder = Path(place)
    ports = free_ports(2 * int(count))
    commands = [gateway(*ports[2 * number : 2 * number + 2], urls, folder / str(number)) for number in range(int(count))]
    commands.append(nginx(int(port), ports[::2], balance, folder))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.terminate)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
