"""A separate Postgres server: in a temporary folder, on a free port of 127.0.0.1, not as root, which Postgres refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from bench.measure.ports import free_port
from tests.support.tools import ROOT, missing

PASSWORD = "right-one"
_SETTINGS = {
    "fsync": "off",
    "jit": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "deadlock_timeout": "50ms",
    "log_min_messages": "fatal",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
}


class Postgres:
    """user: with a password. Databases are named `t1`, `t2`, ..."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._data = folder / "data"
        self._password = folder / "password"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count(1)
        self.port = free_port()

    def initialize(self) -> None:
        self._password.write_text(PASSWORD)
        own(self._password.parent)
        own(self._password)
        arguments = ["-D", str(self._data), "-U", "t", "--auth", "scram-sha-256", "--pwfile", str(self._password), "--no-sync"]
        done = self._run([str(self._programs / "initdb"), *arguments, "--encoding=UTF8", "--locale=C"])
        if done.returncode:
            missing(f"initdb does not run here: {done.stderr.decode()[-500:]}")

    def start(self) -> None:
        """Returns when it accepts connections."""
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port), *settings]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, **_unprivileged()
        )
        done = self._run([str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)], until=0)
        assert done.returncode == 0, "the server does not come up"

    def stop(self) -> None:
        """Stops at once and cuts its connections, like a crash. Idempotent."""
        if self._process:
            self.go_on()
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Suspends all its processes; the kernel still accepts connections for it."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def url(self, name: str, password: str = PASSWORD) -> str:
        return f"postgresql://t:{password}@127.0.0.1:{self.port}/{name}"

    def new(self) -> str:
        """The URL of a new database."""
        name = f"t{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Executes as the superuser."""

        async def work() -> None:
            import asyncpg

            connection = await asyncpg.connect(self.url(database))
            try:
                await connection.execute(statement)
            finally:
                await connection.close()

        _apart(work)

    def _signal(self, number: signal.Signals) -> None:
        """Signals the server and its children, each of which leads its own session."""
        assert self._process
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text("ascii").split()
        for pid in (self._process.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _run(self, command: list[str], until: int | None = None) -> subprocess.CompletedProcess[bytes]:
        """until: repeats until the output ends with this, some hundred times."""
        for _ in range(600):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False, **_unprivileged()
            )
            if until is None or done.returncode == until:
                break
        return done


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Skips or fails the test without Postgres."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="warmroute-postgres-"))  # not below pytest's, which is root's alone
    server = Postgres(programs, folder)
    try:
        try:
            server.initialize()
        except PermissionError:
            missing(f"the user nobody may not run {programs}")
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def own(path: Path) -> None:
    """Makes the server's user the owner."""
    if user := _user():
        os.chown(path, user.pw_uid, user.pw_gid)


def _programs() -> Path:
    """The folder with initdb and postgres. Debian does not have it on PATH."""
    folders = [ROOT / ".tools" / "bin", *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("postgres"):
        folders.append(Path(found).resolve().parent)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres", "pg_isready")):
            return folder
    return missing("Postgres is missing: run scripts/tools.sh")


def _user() -> pwd.struct_passwd | None:
    return None if os.getuid() else pwd.getpwnam("nobody")


def _unprivileged() -> dict[str, Any]:
    user = _user()
    return {"cwd": "/", "user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {"cwd": "/"}


def _apart(work: Callable[[], Awaitable[None]]) -> None:
    """Runs in a thread, because this thread may have a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(work())).result()  # type: ignore[arg-type]
