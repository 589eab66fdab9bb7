"""A process in which several threads read the first body of each API at the same moment. It ends with a status other than 0 if
that goes wrong. The interpreter goes from one thread to another as often as it can.

python -m tests.replica.api.first_bodies
"""

from __future__ import annotations

import json
import sys
import threading

from replica.api.completions.requests import parse
from replica.api.messages.requests import parse_messages
from replica.api.responses.requests import parse_responses

THREADS = 4
BODIES = {"prompt": "a", "max_tokens": 2}, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, {"input": "a"}
COMPLETION, CHAT, RESPONSE = (json.dumps(body).encode() for body in BODIES)


def main() -> None:
    sys.setswitchinterval(1e-6)
    together, done = threading.Barrier(THREADS), []

    def read() -> None:
        together.wait()
        parse("completion", COMPLETION, "sim")
        parse("chat", CHAT, "sim")
        parse_messages(CHAT, "sim")
        parse_responses(RESPONSE, "sim")
        done.append(True)

    threads = [threading.Thread(target=read) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(len(done) != THREADS)


if __name__ == "__main__":
    main()
