"""The simulated engine's language: a tokenizer without a vocabulary file, and answers that depend on nothing but the
prompt.

A token is up to four characters, with the space before them, or one white space, or a role marker: about four bytes
of English. Cutting restarts at every space and line end, so a prompt that extends another has the other's tokens (but
for its last), and an answer sent back as part of the next prompt has the tokens that were generated.
"""

import random
import re
import zlib
from collections.abc import Sequence as Items

from replica.engine import Message, PromptError

VOCAB_SIZE = 1 << 32
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
_FIRST = tuple(_id(word) for word in _WORDS)
_NEXT = tuple(_id(" " + word) for word in _WORDS)


def encode(text: str) -> list[int]:
    """Token ids of a text. O(text)."""
    return [_id(piece) for piece in _PIECE.findall(text)]


def encode_chat(messages: list[Message], tools: list[object] | None) -> list[int]:
    """Token ids of a conversation, with the head of the answer at its end."""
    lines = [f"<|tools|>\n{tools}\n"] if tools else []
    for message in messages:
        role = message["role"]
        if not role.isalpha() or not role.islower():
            raise PromptError(f"unknown role {role!r}: use system, user, assistant or tool")
        lines.append(f"<|{role}|>\n{message['content']}\n")
    return encode("".join(lines) + "<|assistant|>\n")


def decode(tokens: list[int]) -> str:
    """Text of generated tokens; ids that this engine never generates become a replacement character."""
    return "".join(_PIECES.get(token, "\ufffd") for token in tokens)


def answer(prompt: Items[int], max_tokens: int, *, endless: bool) -> tuple[list[int], bool]:
    """The answer's tokens, and whether it ended by itself: after 16 to 79 tokens, unless it is endless. O(prompt + answer)."""
    chance = random.Random(zlib.crc32(repr(prompt).encode()))
    length = 16 + chance.getrandbits(6)
    ended = not endless and length <= max_tokens
    length = max_tokens if endless else min(length, max_tokens)
    return [chance.choice(_FIRST), *(chance.choice(_NEXT) for _ in range(length - 1))], ended
