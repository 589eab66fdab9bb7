"""The interface of a member source: something that finds out which replicas there are, and goes on doing so.

The configuration and the operators are sources too, but nothing watches them: they change by a reload and by a command, whose
caller waits for the result (`cluster/membership.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol, runtime_checkable

from gateway.fleet.membership import Member


class SourceError(Exception):
    """A source fails, for a reason outside of the program; the text is the reason."""


@runtime_checkable
class Noting(Protocol):
    """A source that may have something to say although nothing is wrong."""

    @property
    def note(self) -> str:
        """For operators, such as why there are no members; empty: nothing."""


class MemberSource(Protocol):
    @property
    def name(self) -> str:
        """Its unique name, for logs, metrics and operators."""

    @property
    def pool(self) -> str:
        """The pool of its members that name none."""

    @property
    def settings(self) -> object:
        """Its settings but for the pool. After a reload, a source of the same name with equal settings keeps running."""

    @property
    def problem(self) -> str:
        """A reason why its members may be out of date; empty: they are not."""

    def watch(self, *, expects: bool) -> AsyncIterator[Iterable[Member]]:
        """All members, each time that they have changed; the first time as soon as they are known, also if there are none.

        expects: there are members at present, so that a first answer without any is not to be believed at once.
        A member's URL has no /v1 at its end: `convert(AddedReplica, {"url": ...})` of `config/parse.py` checks and cleans one
        (ConfigError: leave it out yourself), and `member_of` makes a member of that. What cannot be a member of this gateway
        (its name is taken, its pool unknown) is logged and left out. The source may end or raise: its members then stay as they
        are, and it is watched again after a pause. With `workers`, each of them watches.
        """
