"""The interface of a member source, which finds replicas and watches for changes.

The configuration and the operators are sources too, but nothing watches them: they change by a reload and by a command, whose
caller waits for the result (`cluster/membership.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol, runtime_checkable

from gateway.fleet.membership import Member


class SourceError(Exception):
    """A source fails for a reason outside of the program; the text is the reason."""


@runtime_checkable
class AnnotatedSource(Protocol):
    """A source that may have a remark although it works."""

    @property
    def note(self) -> str:
        """For operators, such as the reason for having no members; "": no remark."""


class MemberSource(Protocol):
    @property
    def name(self) -> str:
        """Its unique name, for logs, metrics and operators."""

    @property
    def pool(self) -> str:
        """The pool of its members that name no pool."""

    @property
    def settings(self) -> object:
        """Its settings, except for the pool. After a reload, a source of the same name with equal settings keeps running."""

    @property
    def problem(self) -> str:
        """The reason why its members may be out of date; "": they are up to date."""

    def watch(self, *, expects: bool) -> AsyncIterator[Iterable[Member]]:
        """Yields all members each time that they have changed; the first time once they are known, even if there are none.

        expects: there are members at present, so that a first answer without any needs a confirmation. A member's URL has no
        /v1 at its end: `convert(AddedReplica, {"url": ...})` of `config/parse.py` checks and cleans one (on ConfigError, omit
        the member), and `member_of` makes a member of the result. Invalid members (duplicate name, unknown pool) are logged and
        omitted. The source may end or raise: its members then stay, and it is watched again after a pause. With `workers`, each
        of them watches.
        """
