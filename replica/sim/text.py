"""The simulated engine's tokenizer, which needs no vocabulary file, and its answers, which depend only on the prompt. As with
any model, each token depends on all tokens before it: a prompt that ends with the beginning of an answer is continued with
the rest of that answer.

A token is up to four characters with the space before them, or one white space, or a role marker: about four bytes of
English. Splitting restarts at every space and line end, so a prompt that extends another one begins with its tokens (except
for the last), and an answer that is sent as part of the next prompt has the tokens that were generated.

A conversation can request tool calls: each line of the last user's message with `<|call|>NAME {JSON}` (or several of
these) is one step of an agent. The first line is the answer to that message, the next one the answer after that, and so on;
then an ordinary answer follows. This needs tools in the prompt. A call in the prompt or in an answer is written as templates
write it, in tokens that contain their text: so it can be generated without a vocabulary.
"""

import json
import re
import zlib
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import islice
from typing import Any

import xxhash

from replica.engine import Message, PromptEnd, PromptError, PromptTooLong

VOCAB_SIZE = 1 << 32
LONGEST_TOKEN = 16  # characters: a role marker
LONGEST_SPELLED = 5  # characters of a token that contains its text
MEAN_ANSWER_TOKENS = 48
MAX_CALLS = 8192  # tokens of a message that asks for calls: reading them takes ten milliseconds
SHOWN = 64  # characters of a role in an error
_PIECE = re.compile(r"<\|[a-z]{1,12}\|>| ?\S{1,4}|\s")
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


_CALL_MARK = "<|call|>"
_CALL_LINE = re.compile(r"(<\|call\|>[^\n]*)")
_PLAIN_PIECE = re.compile(r" ?\S{1,4}|\s")
_TOOLS, _USER, _ASSISTANT, _CALL, _NEWLINE = map(_id, ("<|tools|>", "<|user|>", "<|assistant|>", _CALL_MARK, "\n"))
_PIECES = {_id(piece): piece for piece in (*_ANSWER, _CALL_MARK, "\n", "\t", " ")}
# A token that contains its text: a tag of three bits, whether there is a space before it, up to four ASCII characters.
_SPELLED, _SPACE = 0b101 << 29, 1 << 28
_BREAKS = frozenset(map(_id, "\n\t "))  # after these, no space before a word
_FIRST = tuple(_id(word) for word in _WORDS)
_NEXT = tuple(_id(" " + word) for word in _WORDS)
DRAWN = frozenset((*_FIRST, *_NEXT))  # the tokens of ordinary answers
# A pseudo-random number from a purpose and a state. A crc32 alone is not enough: similar states have similar values.
_draw = xxhash.xxh32_intdigest
_BYTES = {token: array("I", [token]).tobytes() for token in DRAWN}


def encode(text: str, most: int | None = None) -> list[int]:
    """Token ids of a text. Raises PromptTooLong if there are more than `most`. O(text), or O(most). Other threads run
    meanwhile, unlike with findall, which would hold the interpreter's lock until its end.
    """
    tokens = [_id(found[0]) for found in islice(_PIECE.finditer(text), None if most is None else most + 1)]
    return _checked(tokens, most)


def pieces(text: str) -> list[str]:
    """The texts of the tokens of `encode`."""
    return _PIECE.findall(text)


def _checked(tokens: list[int], most: int | None) -> list[int]:
    if most is not None and len(tokens) > most:
        raise PromptTooLong(most)
    return tokens


def encode_chat(
    messages: list[Message], tools: list[object] | None, end: PromptEnd = "answer", most: int | None = None
) -> list[int]:
    """Token ids of a conversation. Raises PromptError and PromptTooLong."""
    tokens = encode(f"<|tools|>\n{tools}\n", most) if tools else []
    for at, message in enumerate(messages):
        role = message["role"]
        if not role.isalpha() or not role.islower():
            raise PromptError(f"unknown role {role[:SHOWN]!r}: use system, user, assistant or tool")
        tokens += encode(f"<|{role}|>\n") + _content(message, most)
        _checked(tokens, most)
        if end != "open" or at < len(messages) - 1:
            tokens.append(_NEWLINE)
    return tokens + encode("<|assistant|>\n") if end == "answer" else tokens


def _content(message: Message, most: int | None) -> list[int]:
    content: str = message["content"]
    tokens = encode(content, most) if _CALL_MARK not in content else _with_marks(content, most)
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    texts = [call_text(one.get("name"), one.get("arguments")) for one in functions if isinstance(one, dict)]
    if texts and tokens:
        tokens.append(_NEWLINE)
    return tokens + spelled("\n".join(texts), most)


def _with_marks(content: str, most: int | None) -> list[int]:
    tokens: list[int] = []
    if most is not None and content.count("\n") > most:
        raise PromptTooLong(most)
    for at, line in enumerate(content.split("\n")):
        head, *calls = line.split(_CALL_MARK)
        tokens += [*([_NEWLINE] if at else []), *encode(head, most)]
        for call in calls:
            tokens += [_CALL, *spelled(call, most)]
            _checked(tokens, most)
        _checked(tokens, most)
    return tokens


def call_text(name: object, arguments: object) -> str:
    """A call as templates write it, in ASCII."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def spelled(text: str, most: int | None = None) -> list[int]:
    """Tokens that contain their text. Characters beyond ASCII are escaped as in JSON. Raises PromptTooLong."""
    if most is not None and len(text) > LONGEST_SPELLED * most:
        raise PromptTooLong(most)
    ascii_text = "".join(one if one.isascii() else json.dumps(one)[1:-1] for one in text)
    pieces = (found[0] for found in _PLAIN_PIECE.finditer(ascii_text))
    return [_id(piece) if piece.isspace() else _spelled(piece) for piece in pieces]


def _spelled(piece: str) -> int:
    word = piece.removeprefix(" ")
    return _SPELLED | (_SPACE if word != piece else 0) | sum(ord(one) << 7 * at for at, one in enumerate(word))


def _text_of(token: int) -> str:
    if token >> 29 != _SPELLED >> 29:
        return "\ufffd"
    letters = [chr(token >> 7 * at & 127) for at in range(4)]
    word = "".join(letters).rstrip("\0")
    return (" " if token & _SPACE else "") + word if word.isprintable() and word else "\ufffd"


def decode(tokens: Items[int], further: Mapping[int, str] = _PIECES) -> str:
    """Text of generated tokens; ids that this engine never generates become a replacement character. further: texts of more
    tokens.
    """
    return "".join(_PIECES.get(token) or further.get(token) or _text_of(token) for token in tokens)


def requested_calls(prompt: Items[int]) -> list[int]:
    """The tokens of the calls that the last user's message requests at this step; empty if it requests no more calls, or is
    longer than MAX_CALLS. O(prompt).
    """
    if not prompt or prompt[0] != _TOOLS or prompt[-1] != _NEWLINE or prompt[-2] != _ASSISTANT or _CALL not in prompt:
        return []
    turn = list(prompt)
    turn = turn[len(turn) - 1 - turn[::-1].index(_USER) :] if _USER in turn else [_ASSISTANT]
    asked = turn[: turn.index(_ASSISTANT)]
    if len(asked) > MAX_CALLS:
        return []
    lines = _CALL_LINE.findall(decode(asked))
    step = turn.count(_ASSISTANT) - 1
    if step >= len(lines):
        return []
    calls = (call.strip().partition(" ") for call in lines[step].split(_CALL_MARK)[1:])
    return spelled("\n".join(call_text(name, _object(arguments)) for name, _, arguments in calls))


def forced_call(functions: str) -> list[int]:
    """The tokens of a call of the first of these functions (a JSON list), without arguments."""
    return spelled(call_text(json.loads(functions)[0]["name"], {}))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps([[[[value]]]])  # a call has it some levels deeper
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class WordDetokenizer:
    """Each token has its own text, so nothing is held back. further: as for `decode`."""

    def __init__(self, further: Mapping[int, str] = _PIECES) -> None:
        self._further = further

    def push(self, tokens: Items[int]) -> str:
        return decode(tokens, self._further)

    def finish(self) -> str:
        return ""


class TokenDrawer:
    """Draws the tokens that continue a text, one after the other. Its only state is a hash of the tokens before."""

    __slots__ = ("_state", "_words")

    def __init__(self, before: Items[int], seed: int = 0) -> None:
        """O(tokens before)."""
        self._state = zlib.crc32(array("I", before), seed)
        self._words = _FIRST if before and before[-1] in _BREAKS else _NEXT

    def next(self) -> int:
        """The next token. O(1)."""
        token = self._words[_draw(b"word", self._state) % len(self._words)]
        self._state, self._words = zlib.crc32(_BYTES[token], self._state), _NEXT
        return token

    def ends(self) -> bool:
        """Return whether an answer ends here by itself, which happens at one token in 48. O(1)."""
        return _draw(b"end", self._state) % MEAN_ANSWER_TOKENS == 0


def answer(prompt: Items[int], max_tokens: int, *, endless: bool, least: int = 0, seed: int = 0) -> tuple[list[int], bool]:
    """An ordinary answer's tokens, and whether it ended before `max_tokens`: after 48 tokens on average, at least `least`,
    never if it is `endless`. O(prompt + answer). For checks of a replica's answers: the engine draws its own tokens when due.
    """
    drawer, tokens = TokenDrawer(prompt, seed), list[int]()
    while len(tokens) < max_tokens:
        tokens.append(drawer.next())
        if not endless and len(tokens) >= least and drawer.ends():
            return tokens, True
    return tokens, False
