"""The interface of a member source: something that finds out which replicas there are, and goes on doing so.

The configuration and the operators are sources too, but nothing watches them: they change by a reload and by a command, whose
caller waits for the result (`cluster/membership.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from gateway.fleet.membership import Member


class MemberSource(Protocol):
    @property
    def name(self) -> str:
        """For logs and operators, and unique."""

    def watch(self) -> AsyncIterator[Iterable[Member]]:
        """All members, each time that they have changed; the first time as soon as they are known.

        A member's URL has no /v1 at its end: `convert(ReplicaConfig, {"url": ...})` of `config/parse.py` checks and cleans one
        (ConfigError: leave it out yourself), and `member_of` makes a member of that. What cannot be a member of this gateway
        (its name is taken, its pool unknown) is logged and left out. The source may end or raise: its members then stay as they
        are, and it is watched again after a pause. With `workers`, each of them watches.
        """
