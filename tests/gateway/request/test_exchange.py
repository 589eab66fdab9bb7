"""A tenant's salt in a request's body, and answers that are too large to be parsed in the event loop."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.answer import MAX_PARSED_ANSWER
from gateway.dialects.events.sse import MAX_PARSED_EVENT, object_of
from gateway.dialects.salts import require_saltable, salted
from gateway.errors import GatewayError
from tests.gateway.conftest import running
from tests.support.fakes import FakeReplica, answers, http, usage, writes


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [1, {"b": "}"}]}',
        b' \n {"a": 1} \r\n',
        b"{}",
        b"{ }",
        b'{"cache_salt": "mine", "a": 1}',
        b" " * 5000 + b'{"a":1}',
    ],
)
def test_a_salt_is_the_last_member_of_any_object(body: bytes) -> None:
    out = salted(body, b"ours")
    assert out is not None
    assert json.loads(out) == {**json.loads(body), "cache_salt": "ours"}
    assert out.endswith(b'"cache_salt":"ours"}')


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b'"}"', b"}{", b"--boundary\r\n{}\r\n--", b'{"a": 1} x', '{"a": 1}'.encode("utf-16")]
)
def test_what_is_no_object_gets_no_salt(body: bytes) -> None:
    assert salted(body, b"ours") is None


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.text()), min_size=1),
    st.sampled_from(ENCODINGS),
    st.sampled_from(["", codecs.BOM_UTF8.decode()]),
    st.text(" \t\r\n", max_size=3),
    st.booleans(),
)
def test_a_body_that_an_engine_in_python_reads_as_json_is_salted_or_refused(
    body: dict[str, Any], encoding: str, mark: str, space: str, ascii_only: bool
) -> None:
    raw = (mark + space + json.dumps(body, ensure_ascii=ascii_only) + space).encode(encoding)
    out = salted(raw, b"ours")
    if encoding != "utf-8" or mark:
        assert out is None
        with pytest.raises(GatewayError, match="JSON object in UTF-8"):
            require_saltable(raw, "")
        return
    require_saltable(raw, "")
    assert out is not None
    assert json.loads(out) == {**body, "cache_salt": "ours"}, "`json.loads` guesses the encoding of bytes"


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"--boundary\r\n{}\r\n--", b"[1]", b"\x89PNG{}", b'{"a": "\xff\xed\xa0\x80"}']
)
def test_what_no_engine_reads_as_an_object_needs_no_salt(body: bytes) -> None:
    require_saltable(body, "application/octet-stream")


@pytest.mark.parametrize("body", [b"[1]", "{}".encode("cp037"), b"\x28\xb5\x2f\xfd", b'{"a": 1} x'])
def test_what_is_declared_as_json_has_to_be_an_object(body: bytes) -> None:
    with pytest.raises(GatewayError, match="JSON object in UTF-8"):
        require_saltable(body, "Application/JSON; charset=cp037")


async def test_a_large_answer_is_metered_without_being_parsed() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x" * (2 * MAX_PARSED_ANSWER)}, "finish_reason": "stop"}
    large = json.dumps({"id": "c", "choices": [choice], "usage": usage(100, 7, 64)}).encode()
    bomb = b'{"x": [' + b"{}," * MAX_PARSED_ANSWER + b"{}]}"
    script = [writes(http(200, large)), writes(http(200, bomb)), writes(http(200, b"x" * len(bomb))), answers()]
    async with FakeReplica(script) as replica, running(replica) as run:
        async with run.session.post(
            run.url + "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user"}]}
        ) as answer:
            assert await answer.read() == large
        metrics = await run.metrics()
        label = f'model="m",replica="{replica.name}"'
        assert metrics[f'warmroute_prompt_tokens_total{{cache="hit",{label}}}'] == 64
        assert metrics[f"warmroute_completion_tokens_total{{{label}}}"] == 7
        async with run.session.post(
            run.url + "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user"}]}
        ) as answer:
            assert await answer.read() == bomb, "what it holds is the client's business"
        assert (await run.metrics())['warmroute_unmetered_requests_total{endpoint="/v1/chat/completions",model="m"}'] == 1
        assert (await run.post())[0] == 502, "no JSON object at all"


def test_an_event_that_is_too_long_is_not_read() -> None:
    event = b'data: {"usage": {"prompt_tokens": 1}, "x": "%b"}\n\n'
    assert object_of(event % b"")["usage"] == {"prompt_tokens": 1}
    assert object_of(event % (b"x" * MAX_PARSED_EVENT)) == {}
