"""Remembers prompts for Anthropic's `diagnostics.previous_message_id`.

Only prompts of clients that send the field are remembered, for an hour, at most MAX_PROMPTS with MAX_BYTES together; the oldest
are dropped. They are stored by the id of their answer and its owner, so that a client learns nothing about another's prompt.
Each worker has its own.
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
_KIND: Final = "diagnosis"  # keeps these hashes distinct from session hashes


class Diagnoses:
    """The remembered prompts of one process. clock: of the gateway. All operations are O(1), except for the comparison."""

    def __init__(self, clock: Callable[[], float], max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._known = OrderedDict[int, tuple[float, Fingerprint]]()  # (expiry, prompt) by hash
        self._bytes = 0

    def chosen(self, exchange: Exchange, _live: Collection[str], now: float) -> None:
        """A replica is chosen: answers the question of the request."""
        api = exchange.api
        if api.diagnosis and exchange.diagnoses:
            prompt = _fingerprint(exchange, api.diagnosis)
            self.diagnose(exchange.dialect, api.diagnosis, owner(exchange.request, exchange.caller), prompt, now)

    def delivered(self, exchange: Exchange) -> None:
        """The answer was sent: remembers the prompt."""
        asked, edited = exchange.api.diagnosis, exchange.edited
        if asked and edited and edited.id and not exchange.delivered.error:
            self.remember(edited.id, owner(exchange.request, exchange.caller), _fingerprint(exchange, asked), self._clock())

    def diagnose(self, dialect: Dialect, asked: Diagnosis, owner_: str, prompt: Fingerprint, now: float) -> None:
        """Sets the diagnosis for the client."""
        if not asked.previous:
            return
        until, before = self._known.get(session_key(asked.previous, _KIND, owner_), (0.0, None))
        asked.told = dialect.compared(before if until > now else None, prompt)

    def remember(self, id_: str, owner_: str, prompt: Fingerprint, now: float) -> None:
        """Remembers the prompt of an answer with this id."""
        number = session_key(id_, _KIND, owner_)
        if number in self._known:
            self._forget(number)
        self._known[number] = now + TTL_S, prompt
        self._bytes += prompt.size
        while self._known and (
            len(self._known) > self._max_prompts or self._bytes > self._max_bytes or next(iter(self._known.values()))[0] <= now
        ):
            self._forget(next(iter(self._known)))

    def _forget(self, number: int) -> None:
        _, prompt = self._known.pop(number)
        self._bytes -= prompt.size

    def check(self) -> None:
        """For tests. Raises AssertionError if an invariant is broken."""
        assert self._bytes == sum(prompt.size for _, prompt in self._known.values())
        assert len(self._known) <= self._max_prompts
        assert self._bytes <= self._max_bytes

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Diagnoses: {len(self)} prompts, {self._bytes} bytes>"


def _fingerprint(exchange: Exchange, asked: Diagnosis) -> Fingerprint:
    booking, usage = exchange.booking, exchange.delivered.usage
    tokens = usage.prompt if usage else booking.decision.prompt_tokens
    return Fingerprint(exchange.api.model, asked.head, booking.prompt.keys, tokens)
