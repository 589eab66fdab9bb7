"""Real traces as requests of token ids: each block of a trace is TOKENS tokens, which follow from its key.

So prompts share the same parts as in the trace, at a size that two cores can send: a block of the conversation trace has 512
tokens, one of the agents' trace 64.
"""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

from bench.measure.machine import trace_folder
from router.simulation.workloads import agents, mooncake
from router.types import KEY_BYTES, BlockKeys

TOKENS = 16
IDS = 30_000

Session = list[bytes]
"""The bodies of a session's requests, in order."""


def conversation(requests: int) -> list[Session]:
    """Chat requests, in the order of their arrival; without sessions, so each stands alone."""
    chance = random.Random(7)
    arrivals = sorted(mooncake(_rows("mooncake_conversation"), chance), key=lambda arrival: arrival[0])
    return [[_body(request.prompt.keys)] for _, request in arrivals[:requests]]


def agent_sessions(sessions: int, turns: int, max_input: int = 60_000) -> list[Session]:
    found = islice(agents(_rows("claude_code_agentic"), max_input), sessions)
    return [[_body(request.prompt.keys) for _, request in session[:turns]] for session in found]


def _rows(name: str) -> Iterator[Any]:
    with gzip.open(trace_folder() / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _body(keys: BlockKeys) -> bytes:
    ids: list[int] = []
    for at in range(0, len(keys), KEY_BYTES):
        (number,) = struct.unpack("<Q", keys[at : at + KEY_BYTES])
        ids += [(number + place * 7919) % IDS for place in range(TOKENS)]
    return json.dumps({"model": "sim", "prompt": ids or [1], "max_tokens": 4}).encode()


def growing(number: int, turns: int, first_tokens: int = 600, growth: float = 1.18) -> Session:
    """A conversation of its own, whose turns grow at one rate: so of each but the first the same share may be cached."""
    chance = random.Random(f"conversation {number}")
    ids = [chance.randrange(IDS) for _ in range(int(first_tokens * growth**turns))]
    prompts = (ids[: int(first_tokens * growth**turn)] for turn in range(turns))
    return [json.dumps({"model": "sim", "prompt": prompt, "max_tokens": 4}).encode() for prompt in prompts]
