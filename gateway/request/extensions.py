"""What features add to the life of a request: lists of callables, empty in a gateway without features.

    begun ── identify ── parse ── answerers ── preparers ── admit ──────── choose ─────────── attempt ── deliver ── settle
                                                            entering       explainers         elsewhere  delivered  observers
                                                            waited         chosen             forms

Each list is called in its order, at the one place in `lifecycle.py` or `phases/` that its name stands for. An empty one costs a
truth test. What of it raises GatewayError ends the request with that answer. A feature keeps its own state in a slot
(`slots.py`), adds notes (`notes.py`) or a tap of the answer (`exchange.py`) to an exchange, and reads them in an observer. The
base classes take subclasses that are not compiled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from gateway.errors import GatewayError
from gateway.fleet.directory import Target
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.forms import FormOf
from router import Candidate
from router.native import mypyc_attr

Phase = Callable[[Exchange], None]
Wanted = Callable[[Exchange], bool]
Chosen = Callable[[Exchange, Collection[str], float], None]


class Answerer:
    """A part of the gateway that answers some requests itself.

    claims: whether `answer` may have the answer. answer: None: a replica answers. It raises GatewayError.
    """

    __slots__ = ("answer", "claims")

    def __init__(self, claims: Wanted, answer: Callable[[Exchange], Awaitable[ClientReply | None]]) -> None:
        self.claims = claims
        self.answer = answer


class Preparer:
    """A part of the gateway that changes some requests before they are admitted.

    concerns: whether `prepare` is to be called. Both raise GatewayError.
    """

    __slots__ = ("concerns", "prepare")

    def __init__(self, concerns: Wanted, prepare: Callable[[Exchange], Awaitable[None]]) -> None:
        self.concerns = concerns
        self.prepare = prepare


@mypyc_attr(allow_interpreted_subclasses=True)
class Explainer:
    """A reader of decisions with the price of every candidate, which costs a second ranking."""

    def wants(self, exchange: Exchange, now: float) -> bool:
        """Whether `explain` is to be called."""
        raise NotImplementedError

    def explain(self, exchange: Exchange, policy: str, ranking: list[Candidate]) -> None:
        """The request is booked. ranking: all candidates, the best first."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Elsewhere:
    """Where requests go that their own pool cannot serve."""

    def require_well(self, exchange: Exchange) -> None:
        """Raises GatewayError 503 if no replica of the pool is well, and one elsewhere is."""
        raise NotImplementedError

    def find(self, exchange: Exchange) -> Target | None:
        """The next pool, after all attempts have failed; None: there is none."""
        raise NotImplementedError

    async def after(self, exchange: Exchange, failed: GatewayError) -> Target | None:
        """Where the request goes on. None: the error is the answer."""
        raise NotImplementedError

    async def foreseen(self, exchange: Exchange, target: Target) -> tuple[str, Target]:
        """Where a request would go now whose own place is `target`, and the way there ("big -> small"; "": it stays), with its
        name changed for that pool.
        """
        raise NotImplementedError

    def taker(self, target: Target) -> Target:
        """The place that would take a request now whose own place is `target`."""
        raise NotImplementedError


class Extensions:
    """See the top of this file.

    begun: a request has come; nothing is known of it but its head. entering: its pool is known, and it does not wait yet.
    waited: it has waited for a slot, and has one. chosen: it is booked, among these candidates, at this reading of the clock.
    forms: asked in turn before each attempt for the form that its replica needs; None: another one, or the native form.
    delivered: its answer went out, whole or not.
    """

    __slots__ = (
        "answerers",
        "begun",
        "chosen",
        "delivered",
        "elsewhere",
        "entering",
        "explainers",
        "forms",
        "preparers",
        "waited",
    )

    def __init__(self) -> None:
        self.begun: list[Phase] = []
        self.answerers: list[Answerer] = []
        self.preparers: list[Preparer] = []
        self.entering: list[Phase] = []
        self.waited: list[Phase] = []
        self.explainers: list[Explainer] = []
        self.chosen: list[Chosen] = []
        self.forms: list[FormOf] = []
        self.delivered: list[Phase] = []
        self.elsewhere: Elsewhere | None = None
