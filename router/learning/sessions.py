"""Sessions: beliefs about a replica's cache beyond the block keys, from the conversation that a request names.

A client may name the conversation of a request. Mostly that adds nothing, because the block keys find the replica that holds
the conversation's prefix. It helps if the keys differ and the engine's cache does not: at a line that changes with every
request and that the engine drops (a nonce of an unknown kind), or with prompts too short to have a key. So a session's holder
is expected to have more of the prompt than the longest match:

    unseen(r) = min(the session's last prompt on r, this prompt) - the longest match of all replicas
    expected(r) = share * unseen(r)

The share is learned from the cached tokens that engines report for unseen parts, for each session, and for all sessions of a
client as the prior of its new ones (`ClientShares`). If the keys differ because the prompt really changed (a compaction, a
sub-agent, one id for a whole company), the reports bring it down to zero. So does each turn whose keys show all of the previous
turn: blocks missing in the index then are missing in the cache, too (evicted, say). Without reports and without any match of
keys, it stays at PRIOR.

A client may also name the agent that has started this one. The first prompt of an agent has no holder of its own: it should
share something with the last prompt of its parent, by a share that is learned for all such first prompts of a client together
(`kin`). What its keys show needs no belief: sub-agents with one system prompt match each other's.

It is a belief about one replica's cache, priced in seconds like matched blocks (`pricing/quotes.py`): a busy holder may cost
more than it saves, and a dead one is no candidate.

Bounds: MAX_NEW sessions that were answered once, and MAX_RETURNED others; of each kind the least recently answered are
forgotten, so that ids that never return displace none that do. MAX_HOLDERS replicas of a session.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from router.learning.losses import Losses

MAX_NEW: Final = 8192
MAX_RETURNED: Final = 32768
MAX_HOLDERS: Final = 4  # a conversation, and its sub-agents on other replicas
COINCIDENCE_BLOCKS: Final = 2  # fewer unseen blocks are only the session's last, partial block, and rounding

PRIOR: Final = 0.5  # the share before any report
PRIOR_TOKENS: Final = 16_384  # its weight
SESSION_PRIOR_TOKENS: Final = 4_096  # the weight of other sessions' share
MAX_CLIENTS: Final = 64  # with shares of their own
QUORUM: Final = 3  # clients whose median is believed of others
RECENT_TOKENS: Final = 1_048_576  # older reports fade: they count half with every doubling beyond it


def session_key(session: str, *scope: str) -> int:
    """The number of a session; 0 without one. scope: names that separate equal sessions (a model, a tenant)."""
    return xxhash.xxh3_64_intdigest("\0".join((session, *scope)).encode("utf-8", "surrogatepass")) if session else 0


def _when(holder: tuple[str, tuple[int, float]]) -> float:
    return holder[1][1]


class Share:
    """A learned share: `found` of `unseen` tokens. O(1)."""

    __slots__ = ("found", "unseen")

    def __init__(self) -> None:
        self.found = 0.0
        self.unseen = 0.0

    def learn(self, unseen: float, found: float) -> None:
        self.unseen += unseen
        self.found += found
        if self.unseen > RECENT_TOKENS:
            self.unseen /= 2
            self.found /= 2

    @property
    def sums(self) -> tuple[float, float]:
        return self.unseen, self.found

    def restore(self, sums: tuple[float, float]) -> None:
        """Take over the sums of another one."""
        self.unseen, self.found = sums[0], min(sums)

    def value(self, prior: float, weight: float) -> float:
        return (prior * weight + self.found) / (weight + self.unseen)


class ClientShares:
    """Shares by client. A client without reports has the median of the others, once there are QUORUM of them: a single
    client moves it no further than to the next share of another one. Beyond MAX_CLIENTS the least recently reported one is
    forgotten.
    """

    __slots__ = ("_clients", "median")

    def __init__(self) -> None:
        self._clients: OrderedDict[int, Share] = OrderedDict()
        self.median = PRIOR

    def learn(self, client: int, unseen: float, found: float) -> None:
        """A report about a prompt of this client. O(MAX_CLIENTS log MAX_CLIENTS)."""
        share = self._clients.get(client)
        if share is None:
            share = self._clients[client] = Share()
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        share.learn(unseen, found)
        self._settle()

    def value(self, client: int) -> float:
        """The share that is expected of this client's prompts. O(1)."""
        share = self._clients.get(client)
        return self.median if share is None else share.value(self.median, PRIOR_TOKENS)

    @property
    def sums(self) -> tuple[tuple[int, float, float], ...]:
        """(client, unseen, found) of each."""
        return tuple([(client, *share.sums) for client, share in self._clients.items()])

    def restore(self, sums: Sequence[tuple[int, float, float]]) -> None:
        """Take over the shares of another router, at most MAX_CLIENTS, where none are known."""
        if not self._clients:
            for client, unseen, found in sums[-MAX_CLIENTS:]:
                self._clients[client] = Share()
                self._clients[client].restore((unseen, found))
            self._settle()

    def _settle(self) -> None:
        """Compute the median."""
        shares = sorted([share.value(PRIOR, PRIOR_TOKENS) for share in self._clients.values()])
        middle = len(shares) // 2
        self.median = (shares[middle] + shares[~middle]) / 2 if len(shares) >= QUORUM else PRIOR

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self._clients) <= MAX_CLIENTS
        assert all(0.0 <= self.value(client) <= 1.0 for client in self._clients)

    def __repr__(self) -> str:
        return f"<ClientShares of {len(self._clients)}, median {self.median:.2f}>"


class Session:
    """holders: replica -> (units of the last prompt that it answered, time), ordered by time."""

    __slots__ = ("holders", "share")

    def __init__(self) -> None:
        self.holders: dict[str, tuple[int, float]] = {}
        self.share: Share | None = None  # None: nothing reported yet


class Sessions:
    """The sessions (see the module), by number (`session_key`). All operations O(1), except `lost`, `entries`.

    clients: the shares of all sessions of each client. kin: of first prompts of agents, in what their parents' holders have.
    """

    def __init__(self) -> None:
        self._new: OrderedDict[int, Session] = OrderedDict()
        self._returned: OrderedDict[int, Session] = OrderedDict()
        self.clients = ClientShares()
        self.kin = ClientShares()
        self._losses = Losses()

    def __len__(self) -> int:
        return len(self._new) + len(self._returned)

    def find(self, number: int) -> Session | None:
        """The session; None: it has not been answered yet, or is forgotten."""
        return self._returned.get(number) or self._new.get(number)

    def held(self, session: Session, replica: str, since: float) -> int:
        """Units of the session's last prompt there, if it was after `since` and the replica has not lost its cache; else 0."""
        holder = session.holders.get(replica)
        if holder is None or holder[1] < since or self._losses.after(replica, holder[1]):
            return 0
        return holder[0]

    def share(self, session: Session, client: int) -> float:
        """The share of unseen units of this client's prompt that its holders are expected to have cached."""
        prior = self.clients.value(client)
        return prior if session.share is None else session.share.value(prior, SESSION_PRIOR_TOKENS)

    def learn(self, number: int, client: int, unseen: float, found: float) -> None:
        """The engine has reported `found` of `unseen` tokens as cached. found: 0 to unseen."""
        self.clients.learn(client, unseen, found)
        if session := self.find(number):
            if session.share is None:
                session.share = Share()
            session.share.learn(unseen, found)

    def matched(self, number: int, units: int, blocks: int, block_units: int, tokens: int) -> None:
        """A prompt of the session was matched by its keys. If they cover all of the session's last prompt, they count as
        reliable.

        units: of the prompt. blocks, tokens: of the match.
        """
        session = self.find(number)
        if session is None:
            return
        last = next(reversed(session.holders.values()))[0]
        if (blocks + COINCIDENCE_BLOCKS) * block_units >= min(last, units):
            if session.share is None:
                session.share = Share()
            session.share.learn(tokens, 0.0)

    def answered(self, number: int, replica: str, units: int, now: float) -> None:
        """The replica has computed a prompt of this session."""
        session = self._place(number)
        session.holders.pop(replica, None)
        session.holders[replica] = units, now
        if len(session.holders) > MAX_HOLDERS:
            del session.holders[next(iter(session.holders))]

    def entries(self) -> Iterator[tuple[int, Session, bool]]:
        """(number, session, True if it was answered more than once), for another router's `restore`. Sessions may change
        meanwhile. O(1) each, after one copy of their numbers.
        """
        for number in [*self._new, *self._returned]:
            session = self.find(number)
            if session is not None:
                yield number, session, number in self._returned

    def restore(
        self, number: int, holders: dict[str, tuple[int, float]], share: tuple[float, float] | None, *, returned: bool
    ) -> bool:
        """Add a session of another router, unless it is known here. holders: at most MAX_HOLDERS. Returns True if it
        was added.
        """
        known, most = (self._returned, MAX_RETURNED) if returned else (self._new, MAX_NEW)
        if not number or not holders or self.find(number) is not None or len(known) >= most:
            return False
        session = known[number] = Session()
        session.holders = holders
        if share is not None:
            session.share = Share()
            session.share.restore(share)
        return True

    def restore_more(self, number: int, holders: dict[str, tuple[int, float]]) -> None:
        """Add holders to a restored session, in addition to its present ones. The latest ones, if there are too many."""
        session = self.find(number)
        if session is None:
            return
        more = sorted(((name, last) for name, last in holders.items() if name not in session.holders), key=_when)
        room = MAX_HOLDERS - len(session.holders)
        session.holders = dict(sorted([*more[max(0, len(more) - room) :], *session.holders.items()], key=_when))

    def lost(self, replica: str, now: float, ttl_s: float) -> None:
        """The replica has lost its cache. ttl_s: older holders are not used. O(replicas that lost theirs within ttl_s)."""
        self._losses.add(replica, now, ttl_s)

    def _place(self, number: int) -> Session:
        """The session, moved to the most recently answered place."""
        session = self._returned.get(number)
        if session is not None:
            self._returned.move_to_end(number)
            return session
        session = self._new.pop(number, None)
        if session is None:
            session = self._new[number] = Session()
            if len(self._new) > MAX_NEW:
                self._new.popitem(last=False)
            return session
        self._returned[number] = session
        if len(self._returned) > MAX_RETURNED:
            self._returned.popitem(last=False)
        return session

    def check(self) -> None:
        """Raises AssertionError if a bound is broken. O(sessions)."""
        self.clients.check()
        self.kin.check()
        assert len(self._new) <= MAX_NEW
        assert len(self._returned) <= MAX_RETURNED
        assert not self._new.keys() & self._returned.keys()
        for session in (*self._new.values(), *self._returned.values()):
            assert 0 < len(session.holders) <= MAX_HOLDERS
            assert 0.0 <= self.share(session, 0) <= 1.0

    def __repr__(self) -> str:
        return f"<Sessions: {len(self)}, {self.clients!r}>"
