"""A small kubelet: runs containers of rendered pods as processes, with their security contexts.

Each pod has a network namespace with its own address on one bridge, where names are resolved by a hosts file. A container gets
its command, arguments and environment (`$(NAME)` is replaced), its ConfigMaps, an empty /tmp, its user, no capability, no new
privileges, and a read-only root file system. The programs are those of this machine and checkout, because there is no image.
Needs root, unshare, nsenter, setpriv and ip.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

Object = Mapping[str, Any]

PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "chroot", "mount")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/alternatives")
OURS = (ROOT / ".venv", ROOT / "gateway", ROOT / "router", ROOT / "replica", Path(os.path.realpath(sys.executable)).parents[1])
NETWORK = "10.77.0"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def need_namespaces() -> None:
    """Skips the test if containers cannot be run in this way."""
    lacking = [name for name in PROGRAMS if not shutil.which(name)]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"containers as processes need root and {', '.join(lacking or PROGRAMS)}")
    script = "ip link add br0 type bridge && ip link add pod0 type veth && mount -t tmpfs tmpfs /tmp"
    if subprocess.run(["unshare", "-n", "-m", "sh", "-c", script], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces, bridges or mounts here")


@dataclass
class Container:
    """pid: of the program itself. log: its output."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    @property
    def status(self) -> Mapping[str, str]:
        lines = Path(f"/proc/{self.process.pid}/status").read_text("utf-8").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def stopped(self, grace_s: float) -> int:
        """The exit status after SIGTERM. Raises TimeoutExpired."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(grace_s)


class Pod:
    """One address. account: the files of its service account, for containers that mount them. environment: variables added by
    the kubelet.
    """

    def __init__(self, pause: subprocess.Popen[bytes], address: str, folder: Path, hosts: Path) -> None:
        self.account: Mapping[str, str] = {}
        self.environment: Mapping[str, str] = {}
        self._pause, self.address, self._folder, self._hosts = pause, address, folder, hosts
        self._containers: list[Container] = []

    def run(
        self, spec: Object, container: Object, secrets: Mapping[str, str], maps: Mapping[str, Object], *more: Path
    ) -> Container:
        """Starts a container of the pod. secrets: values by `SECRET/KEY`. maps: the data of ConfigMaps, by name. more: folders
        with the programs of its image.
        """
        environment = {each["name"]: _value(each, secrets) for each in container.get("env", ())}
        command = [_filled(word, environment) for word in [*container["command"], *container.get("args", ())]]
        root = Path(tempfile.mkdtemp(prefix="root-", dir=self._folder))
        user = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        script = "\n".join(["set -e", *self._mounts(root, spec, container, maps, more), _entered(root, user, command)])
        path = f"{ROOT / '.venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        log = self._folder / f"{container['name']}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.inside, "unshare", "-m", "--propagation", "private", "bash", "-c", script],
                env={"XDG_STATE_HOME": "/tmp", **self.environment, **environment, "PATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._containers.append(made := Container(process, log))
        return made

    @property
    def inside(self) -> Sequence[str]:
        """The beginning of a command that runs in the pod's network."""
        return ["nsenter", f"--net=/proc/{self._pause.pid}/ns/net", "--"]

    def get(self, port: int, path: str) -> int:
        """The status of an answer at the pod's own address; 0 without an answer."""
        url = f"http://{self.address}:{port}{path}"
        program = (
            "import sys, urllib.request, urllib.error\n"
            "try: print(urllib.request.urlopen(sys.argv[1], timeout=5).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError: print(0)"
        )
        done = subprocess.run([*self.inside, sys.executable, "-c", program, url], capture_output=True, text=True, check=True)
        return int(done.stdout)

    def passes(self, container: Object, probe: str, running: Container) -> bool:
        """True if a probe (httpGet) passes before its failure threshold."""
        wanted = container[probe]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        for _ in range(wanted.get("failureThreshold", 3)):
            if running.process.poll() is not None:
                return False
            if self.get(ports[wanted["httpGet"]["port"]], wanted["httpGet"]["path"]) == 200:
                return True
            time.sleep(wanted.get("periodSeconds", 10))
        return False

    def stop(self) -> None:
        for process in [each.process for each in self._containers] + [self._pause]:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _mounts(
        self, root: Path, spec: Object, container: Object, maps: Mapping[str, Object], more: Sequence[Path]
    ) -> Iterator[str]:
        """The lines of a shell script that set up the container's file system."""
        at = shlex.quote(str(root))
        yield f"mount -t tmpfs -o mode=755 tmpfs {at}; mkdir -p {at}/etc {at}/tmp {at}/proc {at}/dev"
        yield f"mount -t tmpfs -o mode=1777 tmpfs {at}/tmp"
        for path in (*SYSTEM, *map(str, (*OURS, *more))):
            if os.path.islink(path):
                yield f"cp -a {path} {at}{path}"
            elif os.path.isdir(path):
                yield f"mkdir -p {at}{path}; mount --rbind {path} {at}{path}; mount -o remount,bind,ro {at}{path}"
        yield f"cp /etc/ld.so.cache /etc/passwd /etc/group /etc/nsswitch.conf {at}/etc/; cp {self._hosts} {at}/etc/hosts"
        yield f"mount --rbind /proc {at}/proc; mount --rbind /dev {at}/dev"
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            target = f"{at}{mount['mountPath']}"
            if found := volumes[mount["name"]].get("configMap"):
                source = Path(tempfile.mkdtemp(prefix="map-", dir=self._folder))
                for name, text in maps[found["name"]].items():
                    (source / name).write_text(text, "utf-8")
                yield f"mkdir -p {target}; cp {source}/* {target}/"
            elif mount["mountPath"] != "/tmp":
                yield f"mkdir -p {target}; mount -t tmpfs -o mode=1777 tmpfs {target}"
        if spec.get("automountServiceAccountToken"):
            source = Path(tempfile.mkdtemp(prefix="account-", dir=self._folder))
            for name, text in self.account.items():
                (source / name).write_text(text, "utf-8")
            yield f"mkdir -p {at}{ACCOUNT}; cp {source}/* {at}{ACCOUNT}/"
        if container["securityContext"].get("readOnlyRootFilesystem"):
            yield f"mount -o remount,ro {at}"


def _entered(root: Path, user: Object, command: Sequence[str]) -> str:
    """The last line of the shell script: runs the program as its user."""
    assert user["capabilities"] == {"drop": ["ALL"]}
    assert user["allowPrivilegeEscalation"] is False
    uid, gid = user["runAsUser"], user["runAsGroup"]
    rights = f"--reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    return f"exec chroot {shlex.quote(str(root))} setpriv {rights} {shlex.join(command)}"


def _value(each: Object, secrets: Mapping[str, str]) -> str:
    if "value" in each:
        return str(each["value"])
    reference = each["valueFrom"]["secretKeyRef"]
    return secrets[f"{reference['name']}/{reference['key']}"]


def _filled(word: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda match: environment.get(match[1], match[0]), word)


class Node:
    """A bridge between pods. `node` makes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network = _paused()
        self._pods: list[Pod] = []
        self._ip("link", "add", "br0", "type", "bridge")
        self._ip("link", "set", "br0", "up")

    def pod(self, names: Mapping[str, str]) -> Pod:
        """A pod with the next address (see `address`). names: addresses by name."""
        number = len(self._pods)
        pause, folder = _paused(), self._folder / f"pod-{number}"
        folder.mkdir()
        folder.chmod(0o755)
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items()), "utf-8")
        pod = Pod(pause, address(number), folder, hosts)
        self._pods.append(pod)
        self._ip("link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pause.pid))
        self._ip("link", "set", f"pod{number}", "master", "br0", "up")
        for words in (f"addr add {pod.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            subprocess.run([*pod.inside, "ip", *words.split()], check=True)
        return pod

    def stop(self) -> None:
        for pod in self._pods:
            pod.stop()
        self._network.kill()
        self._network.wait()

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--net=/proc/{self._network.pid}/ns/net", "--", "ip", *words], check=True)


def address(number: int) -> str:
    """The address of the pod with this number, from 0 in the order of creation."""
    return f"{NETWORK}.{number + 10}"


def _paused() -> subprocess.Popen[bytes]:
    """A process with its own network namespace, which exists when it has written its line."""
    process = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    return process


@contextlib.contextmanager
def node(folder: Path) -> Iterator[Node]:
    need_namespaces()
    made = Node(folder)
    try:
        yield made
    finally:
        made.stop()
