"""Recorded prompts as messages: what is shared stays shared, and messages begin where they began before."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.agents import rendering
from bench.agents.engine import block_keys
from bench.agents.replay import Replayed, Session, message, report, request_body, sample, simulated, text
from router.simulation.workloads import AGENT_BLOCK, SimulatedRequest
from router.types import KEY_BYTES, Prompt


def keys(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(KEY_BYTES, "big") for block in blocks)


def request(prompt: bytes) -> SimulatedRequest:
    return SimulatedRequest(Prompt(prompt, len(prompt) // KEY_BYTES * AGENT_BLOCK, AGENT_BLOCK, "", "s"), 40, "s")


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_messages_begin_where_they_began_before() -> None:
    session = Session()
    assert session.bounds(keys(*range(10)), head=4) == [4]
    assert session.bounds(keys(*range(16)), head=4) == [4, 10, 13], "an answer and the next message"
    assert session.bounds(keys(*range(17)), head=4) == [4, 10, 13], "one block is too little for two"
    assert session.bounds(keys(*range(100, 110)), head=6) == [6], "a sub-agent"
    assert session.bounds(keys(*range(24)), head=4) == [4, 10, 13, 17, 21], "goes on from its own last prompt"
    compacted = keys(*range(12), *range(200, 210))
    assert session.bounds(compacted, head=4) == [4, 10, 12], "cut within an answer"
    assert session.bounds(keys(1), head=4) == [0]


def test_prompts_share_as_many_blocks_as_in_the_trace() -> None:
    session, chance, known = Session(), random.Random(1), list[tuple[list[int], list[bytes]]]()
    path = list(range(8))
    for turn in range(30):
        path = path[: chance.randrange(4, len(path) + 1)] + [1000 * turn + n for n in range(chance.randrange(2, 20))]
        prompt = keys(*path)
        places = session.bounds(prompt, head=4)
        body = request_body(request(prompt), places)
        roles = [one["role"] for one in body["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        rendered = block_keys(rendering.messages(body).prompt())
        assert len(rendered) >= len(path), "a block of the trace is a block"
        for earlier, found in known:
            # A message of the earlier prompt that is cut off or goes on ends differently.
            assert shared(found, rendered) >= shared(earlier, path) - 1
        known = [(list(path), rendered)]  # all that a session is sure to go on from


def test_a_block_s_text_is_as_long_as_a_stand_in_s_block() -> None:
    assert len(text(keys(1))) == AGENT_BLOCK
    assert text(keys(1, 2)) == text(keys(1)) + text(keys(2))
    assert message(2, "x")["content"][0]["tool_use_id"] == message(1, "y")["content"][1]["id"]


def test_a_sample_has_the_heads_of_its_requests_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sub = {"requests": [{"in": 640, "out": 5, "keep": 0, "new": [[50, 10]]}], "tool_tokens": 128, "system_tokens": 64}
    own = [{"in": 1280, "out": 5, "keep": 0, "new": [[0, 20]]}, {"in": 1344, "out": 5, "keep": 20, "new": [[20, 1]]}]
    row = {"block_size": 64, "tool_tokens": 320, "system_tokens": 320, "requests": [own[0], sub, own[1]]}
    (tmp_path / "claude_code_agentic.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    monkeypatch.setenv("WARMROUTE_TRACES", str(tmp_path))
    given = sample(0.1, seed=0)
    assert given.heads == {"1": [10, 3, 10]}
    assert simulated(given, "cost").requests == 3
    monkeypatch.setenv("WARMROUTE_TRACES", str(tmp_path / "none"))
    generated = sample(0.01, seed=0)
    assert (generated.name, generated.heads) == ("gen:agents", {})


def test_the_report_shows_both() -> None:
    given = sample(0.01, seed=0)
    run = Replayed("warmroute", "messages", 10, 0.915, [0.1] * 9 + [3.0], [0.01], {})  # type: ignore[arg-type]
    run.errors = type(Replayed("", "").errors)({"503 no": 1})
    lines = list(report("Made here.", given, 20.0, [simulated(given, "cost")], [run]))
    assert any(line.startswith("| simulator, cost |") for line in lines)
    assert "| warmroute, messages | 10 | 91.5% | 0.39 | 0.10 | 3.00 | 0.01 | 1 |" in lines
    assert "\n- warmroute: 1 × 503 no" in lines
