"""A client's request, parsed as far as routing and metering need it, and its prompt's block keys for the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.dialects.diagnosis import Diagnosis
from gateway.dialects.json_edits import Edit
from gateway.dialects.prompt.segments import Outline
from router import Prompt, seed, text_keys, token_keys

MAX_MODEL_CHARS: Final = 256  # of a model's name, in requests and in model lists
MAX_SESSION_CHARS: Final = 256
TEXT: Final = "text"


class NeedsHelper(Exception):
    """Parsing this body would block the event loop for too long; the parser process can do it."""


class ApiRequest:
    """One request, parsed by its dialect.

    model: "" if the body names none. prompt: canonical text or token ids; None if the body has no known form of prompt. made:
    the block keys of the prompt, which replace the prompt once they are computed. salt: of bounded length; separates this
    prompt from equal prompts of others. stream: the client wants a stream. metered: a generation, whose usage is counted. body:
    sent to the replica once `edits`, each (start, end, new bytes), are applied; then edits is (). strip_usage: the gateway, not
    the client, asked for the stream's usage event. stores: the body's choice to have the server store the answer; None without
    one. harmless: may be sent twice, although it generates nothing. billing: edits of `body` that cut out the billing line
    (`anthropic/billing.py`). countable: the engine's count of prompt tokens is about this one prompt, so the router may learn
    from it; False for a batch of prompts, several answers, or a prompt that the engine cuts or replaces. breakpoints: offsets
    in the canonical prompt up to which the client wants it cached, and for how long (`prompt/marks.py`). images: number in the
    prompt. prewarm: edits of `body` for engines that always generate a token, if the client wants none. diagnosis: the client's
    question where its prompt differs from an earlier one; None without one. session: the conversation that the body names, or
    "". alias: the client's name for the model, "" if that was the model's own. refers: the id of a stored object that the
    request continues, or "". references: some input items are ids of stored items. keeps: the answer is a stored object itself.
    size: bytes or token ids to be computed if they are more than the prompt (a batch), or to be counted only; else 0. answers:
    number of answers. textual: the prompt is text, with at most a token for each byte of the body, apart from the template;
    False: it may have images, sounds, files, parts of unknown types. output: the most tokens of each, 0: no limit. outline: of
    the prompt, () unless a feature needs it. steers: the body has a member that steers engines (`steering.py`). adapter:
    named by the body beside the model, for engines that read `lora_path`; "": none, "*": one for each prompt of a batch.
    """

    __slots__ = (
        "adapter",
        "alias",
        "answers",
        "billing",
        "body",
        "breakpoints",
        "countable",
        "diagnosis",
        "edits",
        "harmless",
        "images",
        "keeps",
        "made",
        "metered",
        "model",
        "outline",
        "output",
        "prewarm",
        "prompt",
        "references",
        "refers",
        "salt",
        "session",
        "size",
        "steers",
        "stores",
        "stream",
        "strip_usage",
        "textual",
    )

    def __init__(
        self,
        model: str,
        prompt: bytes | list[int] | None,
        salt: str,
        *,
        stream: bool,
        metered: bool,
        body: bytes,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.salt = salt
        self.stream = stream
        self.metered = metered
        self.body = body
        self.edits: Sequence[Edit] = ()
        self.strip_usage = False
        self.made: Prompt | None = None
        self.stores: bool | None = None
        self.countable = True
        self.textual = False
        self.harmless = False
        self.session = ""
        self.breakpoints: tuple[tuple[int, int], ...] = ()
        self.billing: list[Edit] = []
        self.prewarm: list[Edit] = []
        self.diagnosis: Diagnosis | None = None
        self.alias = ""
        self.size = 0
        self.images = 0
        self.answers = 1
        self.output = 0
        self.refers = ""
        self.references = False
        self.keeps = False
        self.outline: Outline = ()
        self.steers = False
        self.adapter = ""

    def drop(self) -> None:
        """Release the large fields at the end of the request, even if the object is still referenced."""
        self.body, self.prompt, self.made, self.outline = b"", None, None, ()

    @property
    def demands(self) -> bool:
        """True if the client wants a feature of the answer that not every engine has (`Dialect.editor`)."""
        return bool(self.prewarm) or self.diagnosis is not None

    @property
    def repeatable(self) -> bool:
        """True if sending it twice does no harm, because it computes something from a prompt (unlike a file upload, say)."""
        return self.metered or self.harmless or self.has_prompt

    @property
    def has_prompt(self) -> bool:
        """True if the body has a prompt in a known form."""
        return self.prompt is not None or self.made is not None

    def __repr__(self) -> str:
        return f"<ApiRequest {self.model!r}, {len(self.body)} bytes>"


def router_prompt(
    api: ApiRequest,
    blocks: tuple[int, int],
    scale: str = TEXT,
    session: tuple[str, int] = ("", 0),
    client: int = 0,
    scope: tuple[str, ...] = (),
) -> Prompt:
    """The prompt for the router: its block keys, in units of bytes of its canonical text, or of token ids.

    The keys are seeded, so that different models, cache salts or scopes (names that the caller adds) never match each other.
    blocks: the length of a block in bytes, and in token ids. scale: the name under which bytes per token are learned. session:
    its name and its number, as in `Prompt`.

    O(length of the prompt) the first time. The keys then replace the canonical prompt in the request. If another process parsed
    the request, it has the keys from the start, computed with the blocks and the scope of that time.
    """
    name, number = session
    if (made := api.made) is not None:
        again = Prompt(made.keys, made.units, made.block_units, scale if made.scale else "", name, client, number)
        again.breakpoints, again.tokens = made.breakpoints, made.tokens
        return again
    prompt = api.prompt
    if prompt is None:
        return Prompt(b"", 0, blocks[0], scale, name, client, number)
    first = seed((api.model, api.salt) + scope)  # noqa: RUF005  (compiled, a star would make a list first)
    if isinstance(prompt, bytes):
        made = Prompt(text_keys(prompt, blocks[0], first), max(len(prompt), api.size), blocks[0], scale, name, client, number)
        if api.breakpoints:
            made.breakpoints = _in_blocks(api.breakpoints, blocks[0])
    else:
        made = Prompt(token_keys(prompt, blocks[1], first), max(len(prompt), api.size), blocks[1], "", name, client, number)
    api.made, api.prompt = made, None
    return made


def _in_blocks(breakpoints: tuple[tuple[int, int], ...], block: int) -> tuple[tuple[int, int], ...]:
    """The breakpoints in full blocks instead of offsets; within one block the longest time counts."""
    longest = dict[int, int]()
    for offset, seconds in breakpoints:
        blocks = offset // block
        if blocks:
            longest[blocks] = max(seconds, longest.get(blocks, 0))
    return tuple(longest.items())
