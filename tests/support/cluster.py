"""A real Kubernetes API server on free ports of 127.0.0.1: etcd and kube-apiserver, built by scripts/kube-apiserver.sh.

There is no kubelet and no scheduler: `run_pod` gives a pod an address and makes it ready, and `finish_pod` removes a deleted
pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.measure.ports import free_port
from tests.support.paths import ROOT

ADMIN = "admin-token"
NAMESPACE = "/api/v1/namespaces/default"
SLICES = "/apis/discovery.k8s.io/v1beta1/namespaces/default/endpointslices"
PODS = "/api/v1/namespaces/default/pods"

Object = dict[str, Any]


def program(name: str) -> Path:
    """The path of a program. Skips the test without it."""
    path = ROOT / ".tools" / "bin" / name
    if not path.exists():
        pytest.skip(f"{name} is missing: run scripts/kube-apiserver.sh")
    return path


class Cluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._etcd_port, self._port = free_port(), free_port()
        self._etcd: asyncio.subprocess.Process | None = None
        self._server: asyncio.subprocess.Process | None = None
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca_file = folder / "certs" / "apiserver.crt"  # its own
        self.token_file = folder / "token"
        self.token_file.write_text(ADMIN)

    async def start(self) -> None:
        certs = self._folder / "certs"
        certs.mkdir()
        key = await asyncio.create_subprocess_exec(
            "openssl", "genrsa", "-out", certs / "sa.key", "2048", stderr=subprocess.DEVNULL
        )
        assert await key.wait() == 0
        (self._folder / "tokens.csv").write_text(f'{ADMIN},admin,admin-uid,"system:masters"\n')
        url, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
        self._etcd = await self._begun(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        await self.start_server()

    async def start_server(self) -> None:
        """Starts the server, and returns when it is ready."""
        certs = self._folder / "certs"
        self._server = await self._begun(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--insecure-port=0",
            f"--cert-dir={certs}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://test",
            f"--service-account-signing-key-file={certs / 'sa.key'}",
            f"--service-account-key-file={certs / 'sa.key'}",
            "--api-audiences=https://test",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
        )
        async with asyncio.timeout(120):
            while True:
                assert self._server.returncode is None, "kube-apiserver has ended"
                with contextlib.suppress(aiohttp.ClientError):
                    if await self._text("/readyz") == "ok" and '"Namespace"' in await self._text(NAMESPACE):
                        return
                await asyncio.sleep(0.2)

    async def kill_server(self) -> None:
        await _killed(self._server)

    async def stop(self) -> None:
        await _killed(self._server)
        await _killed(self._etcd)

    async def _begun(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        with (self._folder / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(program(name), *arguments, stdout=log, stderr=log)

    # -- its API, as the administrator

    async def _text(self, path: str) -> str:
        async with self._session() as session, session.get(self.url + path) as answer:
            return await answer.text()

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=False)
        return aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {ADMIN}"})

    async def send(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": kind}
        async with self._session() as session, session.request(method, self.url + path, data=data, headers=headers) as answer:
            found: Object = await answer.json()
            assert answer.status < 300, found
            return found

    async def patch(self, path: str, body: Object) -> Object:
        return await self.send("PATCH", path, body, "application/merge-patch+json")

    async def put_slice(self, name: str, *addresses: str, service: str = "vllm", port: int = 8000) -> None:
        """Creates or changes an EndpointSlice."""
        about = {"name": name, "labels": {"kubernetes.io/service-name": service}}
        endpoints = [{"addresses": [each], "conditions": {"ready": True}} for each in addresses]
        ports = [{"name": "http", "port": port, "protocol": "TCP"}]
        whole = {"metadata": about, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}
        listed = await self.send("GET", SLICES)
        if name in [each["metadata"]["name"] for each in listed["items"]]:
            await self.patch(f"{SLICES}/{name}", {"endpoints": endpoints, "ports": ports})
        else:
            await self.send("POST", SLICES, whole)

    async def run_pod(
        self, name: str, address: str, port: int, annotations: dict[str, str] | None = None, *, ready: bool = True
    ) -> Object:
        container = {"name": "vllm", "image": "none", "ports": [{"containerPort": port, "name": "http"}]}
        about = {"name": name, "labels": {"app": "vllm"}, "annotations": annotations or {}}
        made = await self.send("POST", PODS, {"metadata": about, "spec": {"containers": [container]}})
        binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}}
        await self.send("POST", f"{PODS}/{name}/binding", binding)
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        await self.patch(f"{PODS}/{name}/status", {"status": status})
        return made

    async def set_ready(self, name: str, *, ready: bool) -> None:
        await self.patch(f"{PODS}/{name}/status", {"status": {"conditions": [{"type": "Ready", "status": str(ready)}]}})

    async def finish_pod(self, name: str) -> None:
        await self.send("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


async def _killed(process: asyncio.subprocess.Process | None) -> None:
    if process and process.returncode is None:
        process.send_signal(signal.SIGKILL)
        await process.wait()


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    for name in ("etcd", "kube-apiserver"):
        program(name)
    made = Cluster(folder)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
