"""A short run of the fuzzer (`python -m tests.replica.fuzz`) against both engines, and that it finds what is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from yarl import URL

from tests.replica.conftest import Replica
from tests.replica.fuzz import bodies, run
from tests.replica.fuzz.bodies import KINDS, LARGEST, Sent
from tests.replica.fuzz.replies import Reply
from tests.replica.fuzz.run import Found, fuzz, judge, options, received
from tests.support.tiers import nightly

SECONDS = 6.0
SILENT_S = 1.0  # of a machine that runs other tests meanwhile
CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TURN = [{"role": "user", "content": "Hi"}]


async def test_the_simulated_engine(tmp_path: Path) -> None:
    with run.replica(tmp_path / "log", *options("sim", [])) as server:
        found = await fuzz(server, SECONDS, seed=1)
    assert not [wrong for wrong in found.wrong if "MB at the end" not in wrong and "silent" not in wrong], found.report()
    assert found.silent_s < SILENT_S, found.report()
    assert found.outcomes.total() > 10


@pytest.mark.model
@nightly("the simulated engine has the same API; values that the real one sees: api/test_bad_input.py")
async def test_the_real_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.replica.tiny import spoken_model

    model = str(spoken_model(tmp_path / "model"))
    with run.replica(tmp_path / "log", *options("transformers", ["--model", model, "--dtype", "float32"])) as server:
        found = await fuzz(server, SECONDS, seed=1)
    assert not [wrong for wrong in found.wrong if "MB at the end" not in wrong and "silent" not in wrong], found.report()
    assert found.silent_s < SILENT_S, found.report()
    assert found.outcomes.total() > 10


async def test_memory_that_does_not_come_back_is_noticed_beside_much_more_that_does(tmp_path: Path) -> None:
    with run.replica(tmp_path / "log", module="tests.replica.fuzz.leaking") as server:
        found = await fuzz(server, 3.0, seed=1)
    assert any("MB at the end" in wrong for wrong in found.wrong), found.report()


def test_the_same_seed_gives_the_same_bodies() -> None:
    first, again = ([bodies.request(chance) for _ in range(40)] for chance in (Random(5), Random(5)))
    assert first == again
    assert all(len(one.body) <= LARGEST for one in first)
    assert len({one.kind for one in first}) > len(KINDS) / 2


def test_long_answers_without_an_end_of_their_own_are_asked_for() -> None:
    chance = Random(5)
    made = [KINDS["long"](chance, bodies.size(chance)) for _ in range(300)]
    asked = [body for _, body in made if isinstance(body, dict)]
    assert max(body.get("n", 1) * body["max_tokens"] for body in asked if "max_tokens" in body) > 10_000_000
    assert {path for path, _ in made} == {CHAT, COMPLETION, MESSAGES, RESPONSES}
    long = (one for one in (bodies.request(chance) for _ in range(1000)) if one.kind == "long")
    assert next(long).leave_s, "they would take minutes"


@pytest.mark.parametrize(
    ("path", "status", "body", "wrong"),
    [
        (COMPLETION, 0, b"", "no answer"),
        (COMPLETION, 500, b'{"error":{"message":"x","type":"server_error"}}', "500"),
        (COMPLETION, 500, b"the answer cannot follow this format any further: x", ""),
        (COMPLETION, 400, b"Bad Request", "in no API's shape"),
        (COMPLETION, 400, b'{"error":{"message":"x","type":"y"}}', "in another API's shape"),
        (MESSAGES, 400, b'{"error":{"message":"x","type":"y"}}', ""),
        (MESSAGES, 400, json.dumps({"error": {"message": "x" * 3000, "type": "y"}}).encode(), "an error of 30"),
        (COMPLETION, 200, b"{}", "a 200 that lacks its API's form"),
        (COMPLETION, 200, b'{"choices":[{"index":0,"finish_reason":null}]}', "a 200 that lacks something"),
        (COMPLETION, 200, b'{"choices":[', "a 200 that lacks its API's form"),
        ("/tokenize", 200, b'{"count":2,"tokens":[1]}', "a 200 that lacks something"),
        ("/tokenize", 200, b'{"count":1,"tokens":[1]}', ""),
    ],
)
def test_what_is_wrong(path: str, status: int, body: bytes, wrong: str) -> None:
    found = Found()
    judge(found, Sent("kind", path, b"{}"), Reply(status, body))
    assert len(found.wrong) == bool(wrong)
    assert wrong in "".join(found.wrong)


def chunk(reason: str | None, index: int = 0) -> str:
    return json.dumps({"choices": [{"index": index, "finish_reason": reason}]})


FAILED = '{"error":{"message":"x","type":"server_error"}}'
UNFOLLOWED = '{"error":{"message":"cannot follow this format any further","type":"server_error"}}'


@pytest.mark.parametrize(
    ("path", "events", "wrong"),
    [
        (CHAT, [chunk(None), chunk("stop"), "[DONE]"], ""),
        (CHAT, [chunk(None), chunk("stop")], "lacks its end"),
        (CHAT, [chunk(None), "[DONE]"], "lacks its end"),
        (CHAT, [chunk("stop"), chunk(None, 1), "[DONE]"], "lacks its end"),
        (CHAT, ["[DONE]"], "lacks its end"),
        (CHAT, [], "lacks its API's form"),
        (CHAT, [chunk(None), UNFOLLOWED, "[DONE]"], ""),
        (CHAT, [chunk(None), UNFOLLOWED], "lacks its end"),
        (CHAT, [chunk(None), FAILED, "[DONE]"], "200"),
        (MESSAGES, ['{"type":"message_start"}', '{"type":"message_stop"}'], ""),
        (MESSAGES, ['{"type":"message_start"}', '{"type":"error"}'], ""),
        (MESSAGES, ['{"type":"message_start"}', '{"type":"message_delta"}'], "lacks its end"),
        (RESPONSES, ['{"type":"response.created"}', '{"type":"response.incomplete"}'], ""),
        (RESPONSES, ['{"type":"response.created"}', '{"type":"error"}'], "lacks its end"),
    ],
)
def test_how_a_stream_must_end(path: str, events: list[str], wrong: str) -> None:
    found = Found()
    judge(found, Sent("kind", path, b"{}"), Reply(200, "".join(f"data: {one}\n\n" for one in events).encode(), events=True))
    assert len(found.wrong) == bool(wrong)
    assert wrong in "".join(found.wrong)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURN, "max_tokens": 2, "n": 2, "temperature": 1.0}),
        (COMPLETION, {"prompt": "Hi", "max_tokens": 2, "stream_options": {"include_usage": True}}),
        (MESSAGES, {"messages": TURN, "max_tokens": 2}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 2}),
    ],
)
async def test_a_200_that_is_cut_anywhere_is_noticed(replica: Replica, path: str, body: dict[str, Any], stream: bool) -> None:
    if not stream:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    sent = Sent("kind", path, json.dumps(body | {"stream": stream}).encode())
    port = URL(replica.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(sent.body)}\r\n\r\n"
    writer.write(head.encode() + sent.body)
    data = await received(reader)
    writer.close()
    whole = Found()
    judge(whole, sent, Reply.of(data))
    assert whole.outcomes == {"kind: 200": 1}
    assert not whole.wrong
    for end in (*range(0, len(data) - 40, 11), *range(len(data) - 40, len(data))):
        found = Found()
        judge(found, sent, Reply.of(data[:end]))
        assert found.wrong, data[:end]
