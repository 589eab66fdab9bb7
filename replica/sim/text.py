"""The simulated engine's tokenizer, which needs no vocabulary file, and its answers, which depend only on the prompt. As with
any model, each token depends on all tokens before it, whoever wrote them: a prompt that ends with the beginning of an answer
is continued with the rest of that answer.

A token is up to four characters with the space before them, or one white space, or a role marker: about four bytes of
English. Splitting restarts at every space and line end, so a prompt that extends another one begins with its tokens (except
for the last), and an answer sent back as part of the next prompt has the tokens that were generated.
"""

import re
import zlib
from array import array
from collections.abc import Sequence as Items

import xxhash

from replica.engine import Message, PromptEnd, PromptError

VOCAB_SIZE = 1 << 32
MEAN_ANSWER_TOKENS = 48
_PIECE = re.compile(r"<\|[a-z]+\|>| ?\S{1,4}|\s")
_WORDS = tuple(
    re.findall(
        r"\w+",
        "warm cold path node rate load pool ring tree leaf edge hash time word line page disk core slot step task unit "
        "hand door bird lake rain snow wind wave moon star tide sand rock hill tea map key bell song note drum oak elm fig",
    )
)
_ANSWER = (*_WORDS, *(" " + word for word in _WORDS))


def _id(piece: str) -> int:
    return zlib.crc32(piece.encode())


_PIECES = {_id(piece): piece for piece in _ANSWER}
_BREAKS = frozenset(map(_id, "\n\t "))  # after these, no space before a word
_FIRST = tuple(_id(word) for word in _WORDS)
_NEXT = tuple(_id(" " + word) for word in _WORDS)


def encode(text: str) -> list[int]:
    """Token ids of a text. O(text)."""
    return [_id(piece) for piece in _PIECE.findall(text)]


def encode_chat(messages: list[Message], tools: list[object] | None, end: PromptEnd = "answer") -> list[int]:
    """Token ids of a conversation."""
    lines = [f"<|tools|>\n{tools}\n"] if tools else []
    for message in messages:
        role = message["role"]
        if not role.isalpha() or not role.islower():
            raise PromptError(f"unknown role {role!r}: use system, user, assistant or tool")
        lines.append(f"<|{role}|>\n{message['content']}\n")
    if end == "open":
        lines[-1] = lines[-1][:-1]
    return encode("".join(lines) + ("<|assistant|>\n" if end == "answer" else ""))


def decode(tokens: Items[int]) -> str:
    """Text of generated tokens; ids that this engine never generates become a replacement character."""
    return "".join(_PIECES.get(token, "\ufffd") for token in tokens)


class WordDetokenizer:
    """Each token has a text of its own, so nothing is held back."""

    def push(self, tokens: Items[int]) -> str:
        return decode(tokens)

    def finish(self) -> str:
        return ""


def answer(prompt: Items[int], max_tokens: int, *, endless: bool, least: int = 0, seed: int = 0) -> tuple[list[int], bool]:
    """The answer's tokens, and whether it ended before `max_tokens`: after 48 tokens on average, at least `least`, never if it
    is `endless`. O(prompt + answer)."""
    state = zlib.crc32(array("I", prompt), seed)
    words = _FIRST if prompt and prompt[-1] in _BREAKS else _NEXT
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = words[_draw(state, b"word") % len(words)]
        tokens.append(token)
        state, words = zlib.crc32(array("I", [token]), state), _NEXT
        if not endless and len(tokens) >= least and _draw(state, b"end") % MEAN_ANSWER_TOKENS == 0:
            return tokens, True
    return tokens, False


def _draw(state: int, what: bytes) -> int:
    """A pseudo-random number. A crc32 alone is not enough: similar states have similar ones."""
    return int(xxhash.xxh32_intdigest(what, state))
