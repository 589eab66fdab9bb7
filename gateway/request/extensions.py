"""Extensions of a request's life by features: lists of callables and objects, empty in a gateway without features.

    begun ── identify ── parse ── answerers ── preparers ── admit ──────── choose ─────────── attempt ── deliver ── settle
                                                            entering       explainers         fallback   delivered  observers
                                                            upgrading      chosen             decoding   answered
                                                            waited                            forms
                                                                                              substitutes

Each list is called in its order, at the one place in `lifecycle.py` or `phases/` that its name stands for. An empty list costs
a truth test. A GatewayError from one of them ends the request with that answer. A feature keeps its own state in a slot
(`slots.py`), adds notes (`notes.py`) or a tap of the answer (`exchange.py`) to an exchange, and reads them in an observer. The
base classes accept subclasses that are not compiled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from gateway.dialects.usage import Usage
from gateway.errors import GatewayError
from gateway.fleet.directory import Target
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.forms import FormOf
from router import Candidate
from router.native import mypyc_attr

Phase = Callable[[Exchange], None]
Wanted = Callable[[Exchange], bool]
Substitute = Callable[[Exchange, GatewayError], ClientReply | None]
Chosen = Callable[[Exchange, Collection[str], float], None]
Answered = Callable[[Exchange, Usage | None, Usage], None]


class Answerer:
    """A part of the gateway that answers some requests itself.

    claims: True if `answer` may have the answer. answer: None if a replica is to answer. It may raise GatewayError.
    """

    __slots__ = ("answer", "claims")

    def __init__(self, claims: Wanted, answer: Callable[[Exchange], Awaitable[ClientReply | None]]) -> None:
        self.claims = claims
        self.answer = answer


class Preparer:
    """A part of the gateway that changes some requests before they are admitted.

    concerns: True if `prepare` is to be called. Both may raise GatewayError. always: also for a request that gets the answer
    of another one; `prepare` must not suspend then.
    """

    __slots__ = ("always", "concerns", "prepare")

    def __init__(self, concerns: Wanted, prepare: Callable[[Exchange], Awaitable[None]], *, always: bool = False) -> None:
        self.concerns = concerns
        self.prepare = prepare
        self.always = always


@mypyc_attr(allow_interpreted_subclasses=True)
class Explainer:
    """A reader of decisions with the cost of every candidate, which takes a second ranking."""

    def wants(self, exchange: Exchange, now: float) -> bool:
        """True if `explain` is to be called."""
        raise NotImplementedError

    def explain(self, exchange: Exchange, policy: str, ranking: list[Candidate]) -> None:
        """Called once the request is booked. ranking: all candidates, the best first."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class FallbackRoute:
    """The fallback for requests that their own pool cannot serve."""

    def require_well(self, exchange: Exchange) -> None:
        """Raises GatewayError 503 if no replica of the pool is well, but one of a fallback pool is."""
        raise NotImplementedError

    def find(self, exchange: Exchange) -> Target | None:
        """The next pool after all attempts have failed, or None."""
        raise NotImplementedError

    async def after(self, exchange: Exchange, failed: GatewayError) -> Target | None:
        """The target with which the request continues. None: the error is the answer."""
        raise NotImplementedError

    async def foreseen(self, exchange: Exchange, target: Target) -> tuple[str, Target]:
        """The target that a request would get now instead of `target`, and the way there ("big -> small"; "": it stays), with
        the model's name changed for that pool.
        """
        raise NotImplementedError

    async def within(self, exchange: Exchange, target: Target, pool: str) -> Target | None:
        """The target in this pool, which is a fallback of the target's pool, or of that one's fallback; the request then names
        its model. None: there is no such fallback, or the request cannot be renamed. Raises GatewayError.
        """
        raise NotImplementedError

    def taker(self, target: Target) -> Target:
        """The target that would take a request now instead of `target`."""
        raise NotImplementedError


class Extensions:
    """The lists of extensions (see the module).

    begun: a request has arrived; only its head is known. entering: its pool is known, and it does not wait yet. upgrading:
    likewise, for a session (a WebSocket to a replica) only. waited: it has a slot, after a wait. chosen: it is booked, among
    these candidates, at this reading of the clock. forms: asked in turn before each attempt for the form that its replica
    needs; None: another one, or the native form. decoding: likewise, before these, for a replica with the role of decoders.
    answered: in a session, an answer has passed, with this usage, None: it was not readable; and its part that is known in any
    case. A GatewayError ends the session. substitutes: no replica could answer; asked in turn for an answer in place of the
    error, None: another one, or the error. delivered: its answer was sent, complete or not.
    """

    __slots__ = (
        "answered",
        "answerers",
        "begun",
        "chosen",
        "decoding",
        "delivered",
        "entering",
        "explainers",
        "fallback",
        "forms",
        "preparers",
        "substitutes",
        "upgrading",
        "waited",
    )

    def __init__(self) -> None:
        self.begun: list[Phase] = []
        self.answerers: list[Answerer] = []
        self.preparers: list[Preparer] = []
        self.entering: list[Phase] = []
        self.upgrading: list[Phase] = []
        self.waited: list[Phase] = []
        self.explainers: list[Explainer] = []
        self.chosen: list[Chosen] = []
        self.decoding: list[FormOf] = []
        self.forms: list[FormOf] = []
        self.answered: list[Answered] = []
        self.substitutes: list[Substitute] = []
        self.delivered: list[Phase] = []
        self.fallback: FallbackRoute | None = None
