"""The simulated engine's answer to one request: tokens that are drawn when they are due, and their number.

Theory of operation. A drawn token depends on a hash of all tokens before it (`sim_text.TokenDrawer`), so an answer needs no
memory before its first token, even a long one; afterwards its tokens are kept, because their blocks become cached. The
length has to be known earlier, because a request is admitted with room for its whole answer: an answer that never ends by
itself has `max_tokens`, any other is drawn up to LOOKAHEAD tokens, which are discarded. An answer that does not end within
these (less than one in a billion, and any with more `min_tokens`) is admitted with room for `max_tokens`.

A `Task` has the values that depend on the prompt alone, once for all answers to it: the keys of its blocks, and a call.
"""

from array import array
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass
from typing import Self

from replica.cache.prefix import Prefix
from replica.engine import EngineRequest, FinishReason
from replica.sim import text as sim_text
from replica.sim.example import example_of

LOOKAHEAD = 1024  # tokens; drawing them takes a millisecond


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Task:
    """The values that all answers to one prompt share. `request`: the request of one of them. `prefix`: the prompt's blocks.
    `call`: the tokens of the call that the prompt asks for, of a text that its grammar wants, or of a scripted answer; empty
    for an ordinary answer. `stops`: the stop tokens that an answer can contain.
    """

    request: EngineRequest
    prefix: Prefix
    call: Items[int]
    stops: frozenset[int]

    @classmethod
    def of(cls, request: EngineRequest, block_size: int, scripted: Items[int] = ()) -> Self:
        """The task of a request. scripted: its answer. O(prompt)."""
        grammar = request.grammar
        call: Items[int]
        if scripted:
            call = scripted
        elif grammar is None:
            call = sim_text.requested_calls(request.prompt)
        elif grammar.kind == "calls":
            call = sim_text.forced_call(grammar.text)
        else:
            call = sim_text.spelled(grammar.compiled or example_of(grammar.text))
        possible = frozenset(call) if call else sim_text.DRAWN
        return cls(request, request.prefix(block_size), array("I", call), possible.intersection(request.stop_tokens))

    def covers(self, request: EngineRequest) -> bool:
        """Return whether this is also the task of this request. O(1) for the n answers to one prompt, which share the compared
        objects.
        """
        own = self.request
        same = (own.scope, own.grammar, own.stop_tokens) == (request.scope, request.grammar, request.stop_tokens)
        return own.prompt is request.prompt and same

    def prefix_of(self, answer: Items[int]) -> Prefix:
        """The blocks of the prompt followed by these tokens. O(prompt + answer)."""
        whole = self.prefix.copy()
        whole.extend(answer)
        return whole


class Answer:
    """One answer; O(1) memory until its first token.

    tokens: the tokens taken so far. finish: the reason of the end, None before it; stopped: its last token is a stop token,
    which is not part of its text. least, most: bounds of its number of tokens, equal except for a very long answer (see the
    module).
    """

    __slots__ = ("_drawing", "_request", "_task", "finish", "least", "most", "stopped", "tokens")

    def __init__(self, task: Task, request: EngineRequest) -> None:
        """O(prompt + LOOKAHEAD)."""
        self._task, self._request = task, request
        self._drawing = sim_text.TokenDrawer(task.prefix.tokens, _seed(request))
        self.tokens = array("I")
        self.finish: FinishReason | None = None
        self.stopped = False
        self.least, self.most = self._length()

    def take(self, count: int) -> list[int]:
        """The next tokens; fewer at the answer's end. O(count)."""
        fresh: list[int] = []
        while len(fresh) < count and self.finish is None:
            call, at = self._task.call, len(self.tokens)
            token = call[at] if call else self._drawing.next()
            fresh.append(token)
            self.tokens.append(token)
            self.finish = self._finish(token)
        return fresh

    def _finish(self, token: int) -> FinishReason | None:
        """The reason if the answer ends with this token, the last one; None if it continues."""
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
        """The least and the most tokens of this answer, from which no token has been taken yet."""
        request, call, stops = self._request, self._task.call, self._task.stops
        bound = min(len(call) or request.max_tokens, request.max_tokens)
        if not stops and (call or request.ignore_eos):
            return bound, bound
        ahead = copy(self)
        ahead.tokens, ahead._drawing = array("I"), copy(self._drawing)
        known = len(ahead.take(LOOKAHEAD)) if request.min_tokens < LOOKAHEAD else 0
        return (known, known) if ahead.finish else (min(bound, max(known + 1, request.min_tokens)), bound)


def _seed(request: EngineRequest) -> int:
    """The seed of an answer. A greedy answer depends only on its prompt; so does an answer without a seed, for
    reproducibility.
    """
    return 0 if request.greedy else (request.seed or 0) % (1 << 32)
