"""The messages of one publisher, in order and without gaps, as far as its replay socket allows.

    starts ─► replay from 0 ─► live ──► next number: applied
                  ▲             │ ───► a gap, or silence: replay from the last applied number on, which shows by its content
                  │             │                         that the publisher is still the same
                  └─ a restart ─┴──► a lower number, or other content

A publisher numbers its messages from 0 on, and keeps the last ones for replay. During a replay live messages are held back.
Messages that are lost for good end the belief: all blocks are forgotten, and the engine may hold more than the known ones.
A publisher that seems to restart again and again is several publishers at one port: nothing of it is believed for REST_S.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import xxhash

MAX_HELD_BYTES: Final = 64 << 20  # of live messages during a replay
MESSAGE_BYTES: Final = 128  # of a held message, beside its payload
REPLAY_S: Final = 3.0  # without a message of it, a replay counts as unanswered
QUIET_S: Final = 15.0  # then it is asked whether a message was missed
TRIES: Final = 3  # replays in a row without any progress
RESTARTS: Final = 4  # within RESTARTS_S
RESTARTS_S: Final = 60.0
REST_S: Final = 60.0

START, LIVE, REPLAY, CHECK, REST = "start", "live", "replay", "check", "rest"


class MessageSink(Protocol):
    """A follower of a publisher."""

    def apply(self, payload: bytes, now: float) -> None:
        """Take in the next message."""

    def forget(self, reason: str) -> None:
        """Forget everything, because of a "restart", a "gap" or an "unstable" publisher. It may hold anything now."""

    def known(self) -> None:
        """From here on everything that the publisher's engine holds is known."""

    def ask(self, number: int) -> None:
        """Ask for a replay from this number on. Answers to earlier questions must not arrive any more."""


class MessageOrder:
    """The order of one publisher's messages (see the module). state: START, LIVE, REPLAY, CHECK or REST. number: of the last
    applied message, -1: none. gaps, restarts, replays: their numbers so far. now: seconds.
    """

    def __init__(self, follower: MessageSink, *, replays: bool) -> None:
        """replays: the publisher has a replay socket."""
        self._follower = follower
        self._replays = replays
        self.state = START
        self.number = -1
        self.gaps = self.restarts = self.replays = 0
        self._digest = 0  # of the last applied message
        self._at = 0.0  # time of the last message, or of the beginning of the state
        self._verified = True  # the replay has shown that the publisher is the same
        self._asked = -1  # the number at the last question
        self._tries = 0  # questions since the last progress
        self._hole = False  # messages are missing within the replay
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._recent: deque[float] = deque(maxlen=RESTARTS)

    @property
    def asks(self) -> bool:
        """True if it awaits a replay."""
        return self.state in (REPLAY, CHECK)

    # -- events

    def start(self, now: float) -> None:
        """The subscription begins, or begins again."""
        self.number, self._digest, self._tries = -1, 0, 0
        self._drop_held()
        self.state, self._at = START, now
        if self._replays:
            self._ask(REPLAY, now)

    def live(self, number: int, payload: bytes, now: float) -> None:
        """A message arrives from the subscription."""
        if self.state == REST:
            return
        if self.asks:
            self._hold(number, payload)
            return
        self._at = now
        if self.state == START:
            self.state = LIVE
            self._begin(number, payload, now)
        elif number == self.number + 1:
            self._take(number, payload, now)
        elif number > self.number:
            self._missed(number, payload, now)
        elif number < self.number or xxhash.xxh3_64_intdigest(payload) != self._digest:
            self._restarted(now)
            self.live(number, payload, now)

    def replayed(self, number: int, payload: bytes, now: float) -> None:
        """A message of a replay arrives."""
        if not self.asks:
            return
        if number > self.number or not self._verified:  # else it repeats itself
            self._at = now
        if not self._verified:
            if number < self.number or (number == self.number and xxhash.xxh3_64_intdigest(payload) != self._digest):
                self._restarted(now)
                return
            self._verified = True
            if number > self.number:  # the missed messages are no longer kept
                self._jump(number, payload, now)
        elif number == self.number + 1 and number:
            self._take(number, payload, now)
        elif self.number < 0:
            self._begin(number, payload, now)
        elif number > self.number:
            self._hole = True

    def replay_ended(self, now: float) -> None:
        """The end of a replay arrives."""
        if not self.asks:
            return
        if not self._verified:  # it has not even the last applied message
            self._restarted(now)
            return
        if self.number < 0:
            self._follower.known()  # it has published nothing yet
        while self._held and self._held[0][0] <= self.number:
            self._let_go()
        if self._hole or (self._held and self._held[0][0] > self.number + 1 >= 1):
            self._tries = 1 if self.number > self._asked else self._tries + 1
            if self._tries < TRIES:
                self._ask(REPLAY, now)
                return
        self._release(now)

    def tick(self, now: float) -> None:
        """To be called every second or so."""
        silent_s = now - self._at
        if self.asks:
            if silent_s > REPLAY_S:
                self._unanswered(now)
        elif self.state == REST:
            if silent_s > REST_S:
                self._recent.clear()
                self.start(now)
        elif self._replays and silent_s > QUIET_S:
            if self.state == START:
                self.start(now)
            else:
                self._ask(CHECK, now)

    # -- steps

    def _begin(self, number: int, payload: bytes, now: float) -> None:
        """The first message."""
        if number == 0:
            self._follower.known()
        else:  # also if nothing had been published when it was asked
            self._follower.forget("gap")
        self._take(number, payload, now)

    def _take(self, number: int, payload: bytes, now: float) -> None:
        self._follower.apply(payload, now)
        self.number, self._digest = number, xxhash.xxh3_64_intdigest(payload)

    def _jump(self, number: int, payload: bytes, now: float) -> None:
        """Messages are lost for good."""
        self._follower.forget("gap")
        self._take(number, payload, now)

    def _missed(self, number: int, payload: bytes, now: float) -> None:
        self.gaps += 1
        if self._replays:
            self._hold(number, payload)
            self._tries = 0
            self._ask(REPLAY, now)
        else:
            self._jump(number, payload, now)

    def _restarted(self, now: float) -> None:
        self.restarts += 1
        self._recent.append(now)
        if len(self._recent) == RESTARTS and now - self._recent[0] < RESTARTS_S:
            self._follower.forget("unstable")
            self._drop_held()
            self.state, self._at = REST, now
            return
        self._follower.forget("restart")
        self.start(now)

    def _unanswered(self, now: float) -> None:
        """A replay is not answered. After a gap the belief ends; if it was only a check, nothing is known to be missing."""
        if self.state == REPLAY and not self._held:  # a start
            self.state, self._at = START, now
        else:
            self._release(now, checked=self.state == REPLAY, answered=False)

    def _ask(self, state: str, now: float) -> None:
        self.replays += 1
        self.state, self._at = state, now
        self._asked, self._verified, self._hole = self.number, self.number < 0, False
        self._follower.ask(max(0, self.number))

    def _hold(self, number: int, payload: bytes) -> None:
        self._held.append((number, payload))
        self._held_bytes += len(payload) + MESSAGE_BYTES
        while self._held_bytes > MAX_HELD_BYTES:
            self._let_go()

    def _let_go(self) -> None:
        """Drop the first message held back."""
        self._held_bytes -= len(self._held.popleft()[1]) + MESSAGE_BYTES

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _release(self, now: float, *, checked: bool = True, answered: bool = True) -> None:
        """Continue live, with the messages held back. checked: messages missing before the first of them are lost. answered:
        messages missing between them may be asked for; else they are lost, too.
        """
        held = list(self._held)
        self._drop_held()
        self.state, self._at, self._verified = LIVE, now, True
        if self.number < 0 and held:
            self.state = START
        elif checked and held and held[0][0] > self.number + 1:
            self._jump(*held.pop(0), now)
        for number, payload in held:
            if not answered and self.state == LIVE and number > self.number + 1:
                self.gaps += 1
                self._jump(number, payload, now)
            elif number != self.number or self.state != LIVE:
                self.live(number, payload, now)

    def __repr__(self) -> str:
        return f"<MessageOrder, {self.state} at {self.number}, {self.gaps} gaps, {self.restarts} restarts>"
