"""Discovery by a file that lists replicas, read again when it changes. For programs that write files, such as Terraform or a
cron job.

    replicas:
    - http://10.0.0.1:8000
    - {url: http://10.0.0.2:8000, name: b, pool: large, capacity_tokens: 400000, draining: true}
    - {url: http://10.0.0.3:8000, role: prefill}

If the file is invalid or missing, the replicas of the last valid one stay. `replicas: []` removes them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import structs

from gateway.config.parse import ConfigError, Problem, parse
from gateway.config.source import POLL_S, ConfigSource
from gateway.config.yaml_file import YamlFile
from gateway.features.discovery.connecting import connected_as
from gateway.features.discovery.section import DiscoveryConfig, ListedReplica, ReplicaList
from gateway.fleet.membership import DECODE, REPLICA, Member, member_of

log = logging.getLogger("warmroute.discovery")

LOGGED: Final = 3  # problems logged per version


class FileSource:
    """A MemberSource. config: with `file`."""

    def __init__(self, config: DiscoveryConfig, poll_s: float = POLL_S) -> None:
        assert config.file
        self.name = config.source
        self.pool = config.pool
        self.problem = ""
        self.settings = structs.replace(config, pool="")
        self._config = config
        self._path = Path(config.file)
        self._poll_s = poll_s

    async def watch(self, *, expects: bool) -> AsyncIterator[Iterable[Member]]:
        """See MemberSource."""
        file = ConfigSource(self._path, lambda: read_members(self._config), poll_s=self._poll_s)
        file.asked.set()  # makes the first read immediate
        while True:
            try:
                found = await file.next()
            except ConfigError as error:
                self.problem = "; ".join(map(str, error.problems[:LOGGED]))
                log.warning(
                    "list of replicas not read: the last valid one stays in force",
                    extra={"source": self.name, "error": self.problem},
                )
            else:
                self.problem = ""
                yield found


def read_members(config: DiscoveryConfig) -> Iterable[Member]:
    """The members in the file. Raises ConfigError."""
    file = YamlFile(Path(config.file))
    parsed = parse(ReplicaList, file.values)
    wrong = [*parsed.problems, *(_wrong_ports(parsed.value, config) if parsed.value else ())]
    if parsed.value is None or file.problems or wrong:
        raise ConfigError(*file.problems, *map(file.located, wrong))
    return [connected_as(_member(each), config) for each in parsed.value.replicas]


def _wrong_ports(found: ReplicaList, config: DiscoveryConfig) -> Iterator[Problem]:
    for place, replica in enumerate(found.replicas):
        if replica.bootstrap_port and (replica.role or config.role) == DECODE:
            yield Problem(("replicas", place, "bootstrap_port"), "only prefillers have one, and its role is decode")


def _member(replica: ListedReplica) -> Member:
    member = member_of(replica, replica.pool)
    role, port = replica.role or REPLICA, replica.bootstrap_port or 0
    return replace(member, draining=replica.draining, role=role, bootstrap_port=port)
