"""Prompts that clients may ask about: `diagnostics.previous_message_id` of Messages.

Only those of clients that send the field are remembered, for an hour, the last ones first: MAX_PROMPTS with MAX_BYTES together.
By the id of their answer and its owner, so that nobody learns anything about a prompt of another one. Each worker has its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

from gateway.dialects.diagnosis import Diagnosis, Fingerprint
from gateway.dialects.dialect import Dialect
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from router import session_key

TTL_S: Final = 3600.0
MAX_PROMPTS: Final = 4096
MAX_BYTES: Final = 16 << 20
_KIND: Final = "diagnosis"  # a number of one never is that of a session


class Diagnoses:
    """See the top of this file. clock: the gateway's. All of it is O(1) but for the comparison."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_PROMPTS, most_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._most = most
        self._most_bytes = most_bytes
        self._known = OrderedDict[int, tuple[float, Fingerprint]]()  # until when
        self._bytes = 0

    def chosen(self, exchange: Exchange, _live: Collection[str], now: float) -> None:
        """A request that asks has its replica, and the answer to its question."""
        api = exchange.api
        if api.diagnosis and exchange.diagnoses:
            prompt = _fingerprint(exchange, api.diagnosis)
            self.diagnose(exchange.dialect, api.diagnosis, owner(exchange.request, exchange.caller), prompt, now)

    def delivered(self, exchange: Exchange) -> None:
        """Its answer went out."""
        asked, edited = exchange.api.diagnosis, exchange.edited
        if asked and edited and edited.id and not exchange.delivered.error:
            self.remember(edited.id, owner(exchange.request, exchange.caller), _fingerprint(exchange, asked), self._clock())

    def diagnose(self, dialect: Dialect, asked: Diagnosis, whose: str, prompt: Fingerprint, now: float) -> None:
        """Sets what the client is told."""
        if not asked.previous:
            return
        until, before = self._known.get(session_key(asked.previous, _KIND, whose), (0.0, None))
        asked.told = dialect.compared(before if until > now else None, prompt)

    def remember(self, id_: str, whose: str, prompt: Fingerprint, now: float) -> None:
        """An answer with this id went out."""
        number = session_key(id_, _KIND, whose)
        if number in self._known:
            self._forget(number)
        self._known[number] = now + TTL_S, prompt
        self._bytes += prompt.size
        while self._known and (
            len(self._known) > self._most or self._bytes > self._most_bytes or next(iter(self._known.values()))[0] <= now
        ):
            self._forget(next(iter(self._known)))

    def _forget(self, number: int) -> None:
        _, prompt = self._known.pop(number)
        self._bytes -= prompt.size

    def check(self) -> None:
        """For tests: raises AssertionError if its books are wrong."""
        assert self._bytes == sum(prompt.size for _, prompt in self._known.values())
        assert len(self._known) <= self._most
        assert self._bytes <= self._most_bytes

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Diagnoses: {len(self)} prompts, {self._bytes} bytes>"


def _fingerprint(exchange: Exchange, asked: Diagnosis) -> Fingerprint:
    booking, usage = exchange.booking, exchange.delivered.usage
    tokens = usage.prompt if usage else booking.decision.prompt_tokens
    return Fingerprint(exchange.api.model, asked.head, booking.prompt.keys, tokens)
