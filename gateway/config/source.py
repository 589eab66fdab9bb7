"""Sources of the configuration: flags override environment variables, which override the YAML file.

`read` reads all three and reports all problems, with file and line. `ConfigSource` watches a running gateway's file by polling
its path, so that a retargeted symbolic link (as Kubernetes updates a ConfigMap) is a change; it is read, in a thread, once two
polls in a row find the same state, because it may be half written.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from gateway.config.checks import clashes
from gateway.config.hints import SOURCES
from gateway.config.parse import MAX_PROBLEMS, ConfigError, NotReadable, Problem, parse
from gateway.config.schema import Config
from gateway.config.sections import marked
from gateway.config.yaml_file import YamlFile

log = logging.getLogger("warmroute.reload")

POLL_S = 1.0

T = TypeVar("T")

SECRETS: Final[Mapping[str, str]] = {"admin_key": "WARMROUTE_ADMIN_KEY", "read_key": "WARMROUTE_READ_KEY"}
_VARIABLES: Mapping[str, str] = {"listen": "WARMROUTE_LISTEN", **SECRETS}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and its file.

    replaced: keys whose values come from the environment or from flags. empty: variables of the environment that are set to an
    empty text; they count as not set.
    """

    config: Config
    file: YamlFile | None = None
    replaced: Collection[str] = ()
    empty: Collection[str] = ()

    def at(self, problem: Problem) -> Problem:
        """The problem with its file and line."""
        return _located(problem, self.file, self.replaced)


def read(
    kind: type[Config], path: Path | None, overrides: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> LoadedConfig:
    """The configuration from a YAML file (None: no file), then the environment, then `overrides` (raw values by key).

    kind: the type of the whole file. Raises ConfigError with all problems.
    """
    file = YamlFile(path) if path else None
    raw: dict[str, Any] = dict(file.values) if file else {}
    problems = list(file.problems[:MAX_PROBLEMS]) if file else []
    for key in SECRETS.keys() & raw.keys():
        del raw[key]
        secret = Problem((key,), f"a secret does not belong in the file; set {SECRETS[key]}")
        problems.append(_located(secret, file, ()))
    environment = {key: value for key, name in _VARIABLES.items() if (value := env.get(name))}
    replacing = {**environment, **overrides}
    if raw.get("pools") in (None, []):
        finders = [name for name, _ in marked(kind, SOURCES)]
        raw["pools"] = [{}] if any(map(raw.get, finders)) else []  # a pool needs no entry if sources find all replicas
    parsed = parse(kind, {**raw, **replacing})
    found = [
        _attributed(each, environment.keys() - overrides.keys()) for each in (*parsed.problems, *clashes(kind, parsed.good))
    ]
    problems += [_located(problem, file, replacing) for problem in found[:MAX_PROBLEMS]]
    if problems or parsed.value is None:
        more = (_more(file.problems, " in the YAML") if file else "", _more(found))
        raise ConfigError(*sorted(problems, key=lambda problem: problem.line), *filter(None, more))
    return LoadedConfig(parsed.value, file, replacing.keys(), [name for name in _VARIABLES.values() if env.get(name) == ""])


def _more(problems: Collection[Problem], where: str = "") -> str:
    """A line with the number of problems beyond the shown ones; "" if all are shown."""
    return f"and {len(problems) - MAX_PROBLEMS} more problems{where}" if len(problems) > MAX_PROBLEMS else ""


def _attributed(problem: Problem, environment: Collection[str]) -> Problem:
    """The problem, with the variable's name if its value comes from the environment. environment: the keys set there."""
    if problem.key and problem.key[0] in environment:
        return replace(problem, text=f"{problem.text} (from the environment variable {_VARIABLES[str(problem.key[0])]})")
    return problem


def _located(problem: Problem, file: YamlFile | None, replaced: Collection[str]) -> Problem:
    if file is None or (problem.key and problem.key[0] in replaced):
        return problem
    return file.located(problem)


# -- the file of a running gateway

FileState = tuple[int, ...] | None
MOST_CHANGING: Final = 3  # polls that wait for the end of a change
_NEVER_READ: FileState = (-1,)  # differs from every state of a file


class ConfigSource(Generic[T]):
    """The configuration of a running gateway, or another watched file. path: the file, or None. read: reads all of it, raises
    ConfigError.

    asked: set it to trigger a reload. Create it before the first reading, so that no change is missed.
    """

    def __init__(self, path: Path | None, read: Callable[[], T], *, poll_s: float = POLL_S) -> None:
        self.read = read
        self.asked = asyncio.Event()
        self.poll_s = poll_s
        self._path = path
        self._seen = self._read = self._state()
        self._changing = 0  # polls in a row that found another state
        self._timer: asyncio.TimerHandle | None = None  # of the next poll

    async def next(self) -> T:
        """Wait for a change of the file, or for `asked`, and read it. Raises ConfigError if it is invalid.

        For lack of file descriptors or memory, reading is retried after each poll.
        """
        while True:
            self._poll_later()
            try:
                await self.asked.wait()
            finally:
                self._stop_polls()
            self.asked.clear()
            self.taken()
            try:
                return await asyncio.to_thread(self._read_uncollected)
            except NotReadable as error:
                log.warning("configuration not read, to be tried again", extra={"error": str(error)})
                self._read = _NEVER_READ

    def _poll_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.poll_s, self._poll)

    def _poll(self) -> None:
        if self.differs():
            self.asked.set()
        else:
            self._poll_later()

    def _stop_polls(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_uncollected(self) -> T:
        """Read without garbage collection: a collection with the many objects of parsing blocks all threads for 0.1 s
        and more.
        """
        if self._path is not None and self._path.exists() and not self._path.is_file():
            raise ConfigError(f"{self._path} is not a regular file")  # opening a pipe would block this thread for good
        gc.disable()
        try:
            return self.read()
        finally:
            gc.enable()

    def differs(self) -> bool:
        """True if the file differs from the last `taken`, and has not changed since the last call of `differs`, or changes all
        the time: a removed key must not stay valid.
        """
        seen, self._seen = self._seen, self._state()
        if self._seen == self._read:
            self._changing = 0
            return False
        self._changing += 1
        return self._seen == seen or self._changing > MOST_CHANGING

    def taken(self) -> None:
        """Note the state of the file, which is about to be read."""
        self._read = self._seen = self._state()
        self._changing = 0

    def _state(self) -> FileState:
        """Identifies a version of the file; None: it cannot be read."""
        if self._path is None:
            return None
        try:
            seen = os.stat(self._path)
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino, seen.st_dev  # ctime: of its permissions
