"""Scripted answers of the simulated engine: the first line whose piece is in the last message says the answer.

    - {contains: "violate the policy", say: "No"}
    - {contains: "", say: "An answer to anything else."}

The last message of a chat counts, of a text its last line. An engine sees tokens only, so the answer to a prompt is noted when
the prompt is encoded. An answer has the tokens of its text in later prompts, so that it is found in the cache.
"""

import threading
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, Final

import xxhash
import yaml

from replica.engine import Message, SetupError
from replica.sim import text as sim_text

MAX_NOTED: Final = 4096  # prompts
_LINE: Final = ("contains", "say")


class Script:
    """lines: (piece, answer) each. Thread-safe: prompts are encoded in other threads. texts: by token."""

    def __init__(self, lines: Items[tuple[str, str]]) -> None:
        self._lines = [(piece, array("I", sim_text.encode(answer))) for piece, answer in lines]
        self._noted: dict[int, array[int]] = {}
        self._lock = threading.Lock()
        pairs = (zip(sim_text.encode(answer), sim_text.pieces(answer), strict=True) for _, answer in lines)
        self.texts: Mapping[int, str] = {token: text for each in pairs for token, text in each}

    @classmethod
    def read(cls, path: Path) -> "Script":
        """A script file, YAML or JSON. Raises SetupError."""
        try:
            lines: Any = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SetupError(f"--script: {path} cannot be read: {error}") from None
        if not isinstance(lines, list) or not all(map(_is_line, lines)):
            raise SetupError(f"--script: {path} must be a list of {{contains: TEXT, say: TEXT}}, and no answer empty")
        return cls([(line["contains"], line["say"]) for line in lines])

    def note(self, tokens: list[int], text: str) -> None:
        """Note the answer to a prompt. text: its last message. O(tokens + text)."""
        answer = next((answer for piece, answer in self._lines if piece in text), None)
        if answer is None:
            return
        with self._lock:
            self._noted.pop(digest := _digest(tokens), None)
            self._noted[digest] = answer
            if len(self._noted) > MAX_NOTED:
                del self._noted[next(iter(self._noted))]

    def answer(self, prompt: Items[int]) -> Items[int]:
        """The tokens of the answer to an encoded prompt; empty: none is noted. O(prompt)."""
        with self._lock:
            return self._noted.get(_digest(prompt), ())


def last_message(messages: list[Message]) -> str:
    content = messages[-1]["content"] if messages else ""
    return content if isinstance(content, str) else ""


def _digest(tokens: Items[int]) -> int:
    return xxhash.xxh3_64_intdigest(array("I", tokens))


def _is_line(line: object) -> bool:
    if not isinstance(line, dict) or line.keys() != set(_LINE):
        return False
    return all(isinstance(line[name], str) for name in _LINE) and line["say"] != ""
