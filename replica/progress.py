"""Progress bars for a file: a line now and then instead of a bar that is redrawn continuously."""

import io
import re
import time
from collections.abc import Callable
from typing import Final, TextIO

EVERY_S: Final = 5.0
_UP: Final = "\x1b[A"  # tqdm goes there and back to draw one bar below another
_COUNT: Final = re.compile(r"[\s\d%]+")


class BarLines(io.TextIOBase):
    """A text stream that replaces `out`. A text that begins with a carriage return is a state of a bar: it is written as a line
    if the last line of the same bar is `EVERY_S` old. A bar's name is the text before its first "|", without numbers. Other
    text is written unchanged.
    """

    encoding = "utf-8"

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._shown: dict[str, float] = {}  # by name of a bar: the time of its last line

    def write(self, text: str) -> int:
        state = text.replace(_UP, "").strip()
        if not state:
            return len(text)
        if not text.startswith("\r"):
            self._out.write(text)
            return len(text)
        name, now = _COUNT.sub("", state.partition("|")[0]), self._clock()
        if now - self._shown.get(name, float("-inf")) >= EVERY_S:
            self._shown[name] = now
            self._out.write(state + "\n")
            self._out.flush()
        return len(text)

    def flush(self) -> None:
        self._out.flush()
