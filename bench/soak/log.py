"""Reads the gateway's log from standard input, in a process of its own so that nothing else can make the gateway wait.

    python -m bench.soak.log LINES < log

Request lines are counted; of the others the first `MAX_LINES` are written to the file LINES as they come. At the end the counts
are printed as one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

MAX_LINES = 5000


def counted(lines: Iterable[bytes], file: Any) -> dict[str, Any]:
    """Counts by message; `requests`: request lines; `tracebacks`; `unreadable`: lines that are not objects."""
    messages, found = Counter[str](), Counter[str]()
    for line in lines:
        try:
            event = orjson.loads(line)
            message, level = event["message"], event["level"]
        except (ValueError, TypeError, KeyError):
            found["unreadable"] += 1
            event, message, level = {}, line.decode("utf-8", "replace")[:200], "error"
        found["tracebacks"] += "traceback" in event
        if message == "request":
            found["requests"] += 1
            continue
        messages[f"{level}: {message}"] += 1
        if messages.total() <= MAX_LINES:
            file.write(line)
            file.flush()
    return {**found, "messages": dict(messages)}


def main() -> None:
    with Path(sys.argv[1]).open("wb") as file:
        print(json.dumps(counted(sys.stdin.buffer, file)))


if __name__ == "__main__":
    main()
