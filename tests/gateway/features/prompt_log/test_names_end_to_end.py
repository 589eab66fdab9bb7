"""The header through a whole gateway: names of a request and of its answer, in each API, plain and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest

from gateway.features.prompt_log.naming.chain import EMPTY, extended, head_name
from gateway.features.prompt_log.naming.forms import log_in, names_in
from tests.gateway.conftest import Running, running
from tests.gateway.features.prompt_log.kept import (
    CHAT,
    FORMS,
    MESSAGES,
    RESPONSES,
    USER,
    engine,
    in_turn,
    kept_in,
    told_in,
    told_in_stream,
)
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.request.test_dialects import BEGUN, COMPLETED, CREATED, DELTA, ENDS, SAYS, counted, events, message, response
from tests.support.continuing_engine import TEXT, chat, generates
from tests.support.fakes import Behaviour, FakeReplica, answers, event, http, status, streams, writes
from tests.support.tiers import nightly

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": [USER]},
    RESPONSES: {"model": "m", "input": [USER]},
}
HELLO = {"role": "assistant", "content": [{"text": "hello"}]}
NATIVE = [
    (CHAT, answers(), False),
    (CHAT, streams("hel", "lo"), True),
    (MESSAGES, message(), False),
    (MESSAGES, events(BEGUN + SAYS, ENDS), True),
    (RESPONSES, writes(http(200, json.dumps(response()).encode())), False),
    (RESPONSES, events(CREATED, DELTA, COMPLETED), True),
]
ENGINES = [*NATIVE, *((path, chat_only(streams("hello") if stream else answers()), stream) for path, _, stream in NATIVE[2:])]


def names_of(path: str, body: dict[str, Any]) -> tuple[str, str, str, int]:
    """(input head, frame, head with the answer, length with it)."""
    names = names_in(json.dumps(body).encode(), FORMS[path])
    return head_name(names.chain), names.frame, head_name(extended(names.chain, [HELLO])), names.length + 1


async def asked(run: Running, path: str, header: str | None, **more: Any) -> tuple[int, Any, bytes]:
    headers = {} if header is None else {"Prompt-Log": header}
    body = {**BODIES[path], **more}
    async with run.session.post(run.url + path, json=body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize(("path", "engine", "stream"), ENGINES)
async def test_the_answer_has_the_names_of_the_request_and_its_own(path: str, engine: Behaviour, stream: bool) -> None:
    input_, frame, head, length = names_of(path, BODIES[path])
    async with FakeReplica([engine]) as replica, running(replica) as run:
        code, headers, raw = await asked(run, path, f'name, expect="{input_}"', stream=stream)
        assert code == 200
        assert "prompt-log" not in {name.lower() for name in replica.requests[-1].headers}
        if not stream:
            assert told_in(headers) == {"input": input_, "frame": frame, "head": head, "length": length}
            assert b"prompt_log" not in raw
        else:
            assert told_in(headers) == {"input": input_, "frame": frame, "length": length - 1}
            place = {CHAT: -2, MESSAGES: -2, RESPONSES: -1}[path]
            assert told_in_stream(path, raw) == (place, {"head": head, "length": length})
        assert counted(await run.metrics(), "prompt_log_requests_total") == 1


@pytest.mark.parametrize(("path", "engine", "stream"), NATIVE)
@pytest.mark.parametrize("header", [None, "", "of_tomorrow=1", "name=?0"])
async def test_an_answer_without_a_wish_is_as_ever(header: str | None, path: str, engine: Behaviour, stream: bool) -> None:
    async with FakeReplica([engine]) as replica, running(replica) as run, running(replica, prompt_log=False) as off:
        code, headers, raw = await asked(run, path, header, stream=stream)
        assert "Prompt-Log" not in headers
        assert (code, raw) == ((same := await asked(off, path, header, stream=stream))[0], same[2])


async def test_the_next_request_has_the_head_of_the_answer() -> None:
    """The client's history with the answer as it got it."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"line": 1.0}'}}]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls, "refusal": None}
    body = {"id": "c", "choices": [{"index": 0, "message": said, "finish_reason": "tool_calls"}]}
    deltas = [
        {"role": "assistant", "reasoning_content": "Hm."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "read", "arguments": '{"line"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1.0}"}}]},
    ]
    chunks = [event(choices=[{"index": 0, "delta": delta}]) for delta in deltas]
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]) + b"data: [DONE]\n\n"
    engines = [writes(http(200, json.dumps(body).encode())), events(*chunks, end)]
    log = log_in(json.dumps({"messages": [USER, said]}).encode(), "chat")
    async with FakeReplica(engines) as replica, running(replica) as run:
        _, headers, _ = await asked(run, CHAT, "name")
        _, _, raw = await asked(run, CHAT, "name", stream=True)
        expected = head_name(extended(EMPTY, log.entries))
        assert told_in(headers)["head"] == told_in_stream(CHAT, raw)[1]["head"] == expected
        code, _, _ = await asked(run, CHAT, f'expect="{expected}"', messages=[USER, said])
        assert code == 200


@pytest.mark.parametrize("keep", ["name", "keep"])
async def test_of_two_members_with_reasoning_one_counts_plain_and_streamed(keep: str, tmp_path: Any) -> None:
    """An engine writes both, here with other texts."""
    thought = {"reasoning": "Hm.", "reasoning_content": "Hm, hm."}
    said = {"role": "assistant", "content": "hello", **thought}
    body = {"id": "c", "choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}
    deltas = [{"role": "assistant", **thought}, {"content": "hello"}]
    chunks = [event(choices=[{"index": 0, "delta": delta}]) for delta in deltas]
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]) + b"data: [DONE]\n\n"
    engines = [writes(http(200, json.dumps(body).encode())), events(*chunks, end)]
    log = log_in(json.dumps({"messages": [USER, said]}).encode(), "chat")
    state = {"url": f"sqlite:///{tmp_path}/state.db"}
    async with FakeReplica(engines) as replica, running(replica, state=state) as run:
        _, headers, _ = await asked(run, CHAT, keep)
        _, _, raw = await asked(run, CHAT, keep, stream=True)
        heads = told_in(headers)["head"], told_in_stream(CHAT, raw)[1]["head"]
        assert heads == (head_name(extended(EMPTY, log.entries)),) * 2


@pytest.mark.parametrize("path", FORMS)
async def test_a_diverged_log_is_refused_before_anything_is_generated(path: str) -> None:
    other = head_name(extended(EMPTY, [HELLO]))
    input_, *_ = names_of(path, BODIES[path])
    async with FakeReplica([status(500)]) as replica, running(replica) as run:
        code, headers, raw = await asked(run, path, f'expect="{other}"')
        error = json.loads(raw)["error"]
        assert (code, error["code"], error["length"], error["heads"]) == (409, "prompt_log_diverged", 1, [input_])
        assert "pl1_" not in error["message"]
        assert "Prompt-Log" not in headers
        assert not replica.requests
        assert counted(await run.metrics(), "prompt_log_refused_total") == 1


@pytest.mark.parametrize(
    "positions", [[0, 44, 255, 299], pytest.param(range(300), marks=nightly("four positions are in the gate"))], ids=len
)
async def test_the_heads_of_an_error_locate_the_difference(positions: Sequence[int]) -> None:
    messages = [{"role": ("user", "assistant")[number % 2], "content": f"turn {number}"} for number in range(300)]
    own = names_in(json.dumps({"messages": messages}).encode(), "chat")
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        for at in positions:
            changed = [*messages[:at], {**messages[at], "content": "another"}, *messages[at + 1 :]]
            _, _, raw = await asked(run, CHAT, f'expect="{head_name(own.chain)}"', messages=changed)
            error, heads = json.loads(raw)["error"], [head_name(chain) for chain in own.latest]
            assert (error["length"], len(error["heads"])) == (300, 256)
            first = next(place for place, (one, two) in enumerate(zip(error["heads"], heads, strict=True)) if one != two)
            assert first == max(0, at - 44)
        assert not replica.requests


HOSTILE = {
    "x" * 1025: "Prompt-Log",
    "name,": "Prompt-Log",
    'expect="pl1_': "Prompt-Log",
    "expect": "expect",
    "expect=pl1_": "expect",
    'expect="pl1_x"': "expect",
    'expect=("pl1_x")': "expect",
    'base="pl1_x"': "base",
    "base=?1": "base",
    'frame="pl1_x"': "frame",
    "keep, ttl=0": "ttl",
    "keep, ttl=1.5": "ttl",
    'keep, ttl="5"': "ttl",
    "keep, ttl=?0": "ttl",
    "keep, frame=?0": "frame",
    "expect=?0": "expect",
    "keep=1": "keep",
    'keep="no"': "keep",
    "keep=no": "keep",
    "name=0": "name",
    "name, keep=?1.5": "Prompt-Log",
    "keep, ref": "ref",
    "keep, ref=?0": "ref",
    'keep, ref="a b"': "ref",
    'keep, ref=""': "ref",
    'keep, ref=".."': "ref",
    f'keep, ref="{"a" * 65}"': "ref",
    "once": "once",
    "once=?0": "once",
    "once=5": "once",
    'once="short"': "once",
    "once=c0ffee-0001": "once",
    f'once="{"x" * 65}"': "once",
    "na\u00efve": "Prompt-Log",
}


@pytest.mark.parametrize("path", FORMS)
async def test_a_hostile_header_is_a_400(path: str, tmp_path: Any) -> None:
    async with FakeReplica([engine(path, stream=False)]) as replica, running(replica, **kept_in(tmp_path)) as run:
        for header, param in HOSTILE.items():
            code, _, raw = await asked(run, path, header)
            error = json.loads(raw)["error"]
            assert (code, error["code"], error.get("param", param)) == (400, "prompt_log_invalid", param), header
        assert not replica.requests
        code, headers, _ = await asked(run, path, "name, keep=?0")
        assert (code, "kept" in told_in(headers)) == (200, False)


NEEDS_STORE = {"base": head_name(EMPTY), "frame": f"pf1_{'x' * 43}", "once": "a-token-of-mine"}


@pytest.mark.parametrize("member", NEEDS_STORE)
async def test_a_log_is_not_kept_here(member: str) -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        code, _, raw = await asked(run, CHAT, f'{member}="{NEEDS_STORE[member]}"')
        error = json.loads(raw)["error"]
        assert (code, error["code"], error["param"]) == (400, "prompt_logs_off", member)
        assert not replica.requests


@pytest.mark.parametrize(("path", "engine", "stream"), NATIVE)
async def test_a_turn_that_is_not_kept_is_said_to_be_none(path: str, engine: Behaviour, stream: bool) -> None:
    _, _, head, length = names_of(path, BODIES[path])
    async with FakeReplica([engine]) as replica, running(replica) as run:
        _, headers, raw = await asked(run, path, 'keep, ttl=5, ref="main"', stream=stream)
        told = told_in(headers)
        assert (told["kept"], told["ref"]) == (False, False)
        if stream:
            assert told_in_stream(path, raw)[1] == {"head": head, "length": length, "kept": False, "ref": False}


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "n": 10**400}]}, "messages"),
        (CHAT, {"tools": [1]}, "tools"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
async def test_a_body_without_a_name_is_a_400(path: str, more: dict[str, Any], param: str) -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        code, _, raw = await asked(run, path, "name", **more)
        error = json.loads(raw)["error"]
        assert code == 400
        if error["code"] == "prompt_log_invalid":
            assert error["param"] == param
        assert not replica.requests


async def test_several_lines_are_one_header() -> None:
    input_, *_ = names_of(CHAT, BODIES[CHAT])
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        headers = [("Prompt-Log", "name"), ("Prompt-Log", f'expect="{head_name(EMPTY)}"')]
        async with run.session.post(run.url + CHAT, json=BODIES[CHAT], headers=headers) as answer:
            assert answer.status == 409
        assert input_


async def test_other_paths_ignore_the_header() -> None:
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        body = {"model": "m", "prompt": "x"}
        code, headers, _ = await run.post(body, "/v1/completions", headers={"Prompt-Log": "name,"})
        assert (code, "Prompt-Log" in headers) == (200, False)
        assert "prompt-log" not in {name.lower() for name in replica.requests[-1].headers}


async def test_an_answer_that_breaks_has_no_head() -> None:
    async with FakeReplica([streams("hel", "lo", die=True)]) as replica, running(replica) as run:
        code, headers, raw = await asked(run, CHAT, "name", stream=True)
        assert (code, b"prompt_log" in raw, b"error" in raw) == (200, False, True)
        assert told_in(headers)["length"] == 1


async def test_a_replica_does_not_set_the_header() -> None:
    body = json.dumps({"id": "c", "choices": []}).encode()
    engine = writes(http(200, body, "application/json", 'Prompt-Log: head="pl1_x"'))
    async with FakeReplica([engine]) as replica, running(replica) as run:
        assert "Prompt-Log" not in (await asked(run, CHAT, None))[1]
        assert "head" not in told_in((await asked(run, CHAT, "name"))[1])


async def test_a_large_body_is_named_elsewhere() -> None:
    messages = [{"role": "user", "content": "x" * 400_000}, {"role": "assistant", "content": "y" * 400_000}, USER]
    input_, frame, head, length = names_of(CHAT, {"messages": messages})
    async with FakeReplica([answers()]) as replica, running(replica) as run:
        _, headers, _ = await asked(run, CHAT, "name", messages=messages)
        assert told_in(headers) == {"input": input_, "frame": frame, "head": head, "length": length}
        code, _, raw = await asked(run, CHAT, f'expect="{head}"', messages=messages)
        assert (code, json.loads(raw)["error"]["heads"][-1]) == (409, input_)
        code, _, raw = await asked(run, CHAT, "name", messages=messages, n=1, tools=[7])
        assert (code, json.loads(raw)["error"]["param"]) == (400, "tools")
        assert run.gateway.parsing.process.started >= 1


async def test_pages_may_read_the_header() -> None:
    async with FakeReplica([answers()]) as replica, running(replica, cors_origins=["https://a.example"]) as run:
        headers = {"Origin": "https://a.example", "Prompt-Log": "name"}
        _, told, _ = await run.post(BODIES[CHAT], headers=headers)
        assert "Prompt-Log" in told["Access-Control-Expose-Headers"]


async def test_a_stored_response_has_the_names_of_its_whole_history(tmp_path: Any) -> None:
    second = response(id="resp_2")
    engines = [writes(http(200, json.dumps(each).encode())) for each in (response(), second)]
    state = {"url": f"sqlite:///{tmp_path}/state.db"}
    async with FakeReplica(engines) as replica, running(replica, state=state) as run:
        await asked(run, RESPONSES, "name")
        said = {"role": "assistant", "content": "hello"}
        whole = names_in(json.dumps({"input": [USER, said, USER]}).encode(), "responses")
        _, headers, raw = await asked(run, RESPONSES, "name", previous_response_id="resp_1")
        told = told_in(headers)
        assert told["input"] == head_name(whole.chain)
        assert told["head"] == head_name(extended(whole.chain, [HELLO]))
        assert json.loads(raw)["store"] is True


async def test_a_stored_stream_is_named_and_kept(tmp_path: Any) -> None:
    state = {"url": f"sqlite:///{tmp_path}/state.db"}
    _, _, head, length = names_of(RESPONSES, BODIES[RESPONSES])
    async with FakeReplica([events(CREATED, DELTA, COMPLETED)]) as replica, running(replica, state=state) as run:
        _, _, raw = await asked(run, RESPONSES, "name", stream=True)
        assert told_in_stream(RESPONSES, raw) == (-1, {"head": head, "length": length})
        code, _, kept = await run.get("/v1/responses/resp_1")
        assert (code, b"prompt_log" in kept) == (200, False)


async def test_a_stream_that_begins_again_elsewhere_has_its_name() -> None:
    """Its first replica dies after a role; a request with the header is as safe as another one."""
    choices = [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
    _, _, head, length = names_of(CHAT, BODIES[CHAT])
    engine = in_turn(events(event(choices=choices), end=b""), streams("hel", "lo"))
    async with FakeReplica([engine]) as one, FakeReplica([engine]) as other, running(one, other) as run:
        _, _, raw = await asked(run, CHAT, "name", stream=True)
        assert told_in_stream(CHAT, raw) == (-2, {"head": head, "length": length})
        assert (len(one.requests), len(other.requests)) == (1, 1)


async def test_a_stream_that_is_continued_elsewhere_has_its_name() -> None:
    engine, body = in_turn(generates(until=5), generates()), chat()
    async with FakeReplica([engine]) as one, FakeReplica([engine]) as other:
        pools = [{"replicas": [one.url, other.url], "resume_streams": True}]
        async with running(pools=pools) as run:
            _, _, raw = await asked(run, CHAT, "name", **body)
            whole = {"messages": [*body["messages"], {"role": "assistant", "content": TEXT}]}
            head = head_name(names_in(json.dumps(whole).encode(), "chat").chain)
            assert told_in_stream(CHAT, raw) == (-2, {"head": head, "length": 2})
            assert (len(one.requests), len(other.requests)) == (1, 1)


async def test_official_clients_read_streams_with_names() -> None:
    header = {"Prompt-Log": "name"}
    engines = [streams("hel", "lo"), events(CREATED, DELTA, COMPLETED), events(BEGUN + SAYS, ENDS)]
    async with FakeReplica(engines) as replica, running(replica) as run:
        openai: Any = run.client
        chunks = [
            each async for each in await openai.chat.completions.create(**BODIES[CHAT], stream=True, extra_headers=header)
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
        assert chunks[-1].model_extra["prompt_log"]["length"] == 2
        told = [each async for each in await openai.responses.create(**BODIES[RESPONSES], stream=True, extra_headers=header)]
        assert told[-1].response.output_text == "hello"
        assert told[-1].response.model_extra["prompt_log"]["length"] == 2
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        client: Any = anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0, http_client=http)
        async with client, client.messages.stream(**BODIES[MESSAGES], extra_headers=header) as stream:
            assert (await stream.get_final_message()).content[0].text == "hello"
