"""The simulated engine's answer to one request: tokens that are drawn when they are due, and how many these will be.

Theory of operation. A drawn token depends on a hash of all before it (`sim_text.Drawing`), so an answer needs no memory before
its first token, however long it gets; afterwards its tokens are kept, for their blocks become cached. How long it gets has to
be known earlier, for it is admitted with room for all of it: an answer that never ends by itself has `max_tokens`, any other
one is drawn up to LOOKAHEAD tokens, which are forgotten. An answer that does not end within these (less than one in a billion,
and any whose `min_tokens` are more) is admitted with room for `max_tokens`.

What follows from the prompt alone is there once for all answers to it (`Task`): the keys of its blocks, and a call.
"""

from array import array
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass
from typing import Self

from replica.cache.prefix import Prefix
from replica.engine import EngineRequest, FinishReason
from replica.sim import text as sim_text

LOOKAHEAD = 1024  # tokens; drawing them takes a millisecond


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Task:
    """What the answers to one prompt have in common. `request`: that of one of them. `prefix`: the prompt's blocks. `call`: the
    tokens of the call that it asks for, none for an ordinary answer. `stops`: the stop tokens that an answer can have."""

    request: EngineRequest
    prefix: Prefix
    call: Items[int]
    stops: frozenset[int]

    @classmethod
    def of(cls, request: EngineRequest, block_size: int) -> Self:
        """O(prompt)."""
        grammar = request.grammar
        call = sim_text.forced_call(grammar.text) if grammar else sim_text.requested_calls(request.prompt)
        possible = frozenset(call) if call else sim_text.DRAWN
        return cls(request, request.prefix(block_size), array("I", call), possible.intersection(request.stop_tokens))

    def covers(self, request: EngineRequest) -> bool:
        """Whether it is this request's task, too. O(1) for the n answers to one prompt: what is compared is the same there."""
        own = self.request
        same = (own.scope, own.grammar, own.stop_tokens) == (request.scope, request.grammar, request.stop_tokens)
        return own.prompt is request.prompt and same

    def prefix_of(self, answer: Items[int]) -> Prefix:
        """The blocks of the prompt with these tokens behind it. O(prompt + answer)."""
        whole = self.prefix.copy()
        whole.extend(answer)
        return whole


class Answer:
    """One answer; O(1) memory until its first token.

    tokens: those taken so far. finish: why it has ended, None while it has not; stopped: its last token is a stop token, which
    is not part of its text. least, most: how many tokens it will have; the same unless that is not known (see the module).
    """

    __slots__ = ("_drawing", "_request", "_task", "finish", "least", "most", "stopped", "tokens")

    def __init__(self, task: Task, request: EngineRequest) -> None:
        """O(prompt + LOOKAHEAD)."""
        self._task, self._request = task, request
        self._drawing = sim_text.Drawing(task.prefix.tokens, _seed(request))
        self.tokens = array("I")
        self.finish: FinishReason | None = None
        self.stopped = False
        self.least, self.most = self._length()

    def take(self, count: int) -> list[int]:
        """The next tokens, fewer at the answer's end. O(count)."""
        fresh: list[int] = []
        while len(fresh) < count and self.finish is None:
            call, at = self._task.call, len(self.tokens)
            token = call[at] if call else self._drawing.next()
            fresh.append(token)
            self.tokens.append(token)
            self.finish = self._finish(token)
        return fresh

    def _finish(self, token: int) -> FinishReason | None:
        """Why the answer ends with this token, the last one."""
        request, call, length = self._request, self._task.call, len(self.tokens)
        if token in self._task.stops and length > request.min_tokens:
            self.stopped = True
            return "stop"
        if call:
            ended = length == len(call)
        else:
            ended = not request.ignore_eos and length >= request.min_tokens and self._drawing.ends()
        return "stop" if ended else "length" if length == request.max_tokens else None

    def _length(self) -> tuple[int, int]:
        """The least and the most tokens that this answer, of which none is taken yet, will have."""
        request, call, stops = self._request, self._task.call, self._task.stops
        bound = min(len(call) or request.max_tokens, request.max_tokens)
        if not stops and (call or request.ignore_eos):
            return bound, bound
        ahead = copy(self)
        ahead.tokens, ahead._drawing = array("I"), copy(self._drawing)
        known = len(ahead.take(LOOKAHEAD)) if request.min_tokens < LOOKAHEAD else 0
        return (known, known) if ahead.finish else (min(bound, max(known + 1, request.min_tokens)), bound)


def _seed(request: EngineRequest) -> int:
    """A greedy answer depends only on its prompt; so does one without a seed, since nothing here is random."""
    return 0 if request.greedy else (request.seed or 0) % (1 << 32)
