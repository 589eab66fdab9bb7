from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.json_edits import apply
from gateway.dialects.openai import request as openai
from gateway.dialects.openai.errors import error_body, event_error_of
from gateway.dialects.passthrough import parse_leniently, scan
from gateway.errors import GatewayError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def parse(body: Any, kind: str = openai.CHAT, most: int = 0) -> ApiRequest:
    """The request, with its body as it goes to a replica."""
    api = openai.parse(kind, body if isinstance(body, bytes) else orjson.dumps(body), most)
    api.body = apply(api.body, api.edits)
    return api


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b"{", None, "invalid_json"),
        (b"\xff\xfe", None, "invalid_json"),
        (b'{"model": "\xff"}', None, "invalid_json"),
        (b'{"model": "\\ud800"}', None, "invalid_json"),
        (b"[" * 5000, None, "invalid_json"),
        (b"[1]", None, "invalid_json"),
        ({"messages": []}, "model", "invalid_request"),
        ({**CHAT, "model": ""}, "model", "invalid_request"),
        ({**CHAT, "model": 7}, "model", "invalid_request"),
        ({**CHAT, "Model": "m"}, "model", "invalid_request"),
        ({"MODEL": "m", "messages": []}, "model", "invalid_request"),
        ({**CHAT, "model": "m" * 300}, "model", "invalid_request"),
        ({**CHAT, "stream": "yes"}, "stream", "invalid_request"),
        ({**CHAT, "stream": True, "stream_options": 5}, "stream_options", "invalid_request"),
        ({"model": "m"}, "messages", "invalid_request"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(body: Any, param: str | None, code: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    shaped = orjson.loads(error_body(caught.value))["error"]
    assert set(shaped) == {"message", "type", "param", "code"}
    assert shaped["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, "queue_timeout", "rate_limit_error"),
        (429, "rate_limit_exceeded", "rate_limit_error"),
        (429, "insufficient_quota", "insufficient_quota"),
        (404, "model_not_found", "invalid_request_error"),
        (503, "no_replica", "server_error"),
    ],
)
def test_the_type_of_an_error(status: int, code: str, kind: str) -> None:
    """The same in the head's answer and in a stream's event."""
    error = GatewayError(status, code, "the message")
    assert orjson.loads(error_body(error))["error"]["type"] == event_error_of(error)["error"]["type"] == kind
    given = GatewayError(status, code, "the message", members={"type": "of_its_own"})
    assert orjson.loads(error_body(given))["error"]["type"] == "of_its_own"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(
    st.sampled_from(["model", "messages", "prompt", "stream", "stream_options", "tools", "cache_salt", "input"]), json_values
)


@given(bodies, st.sampled_from([openai.CHAT, openai.COMPLETION]))
def test_any_json_gives_a_request_or_a_400(body: dict[str, Any], kind: str) -> None:
    raw = orjson.dumps(body)
    parse_leniently(raw)
    try:
        model = openai.parse(kind, raw).model
    except GatewayError as error:
        status = error.status
    else:
        status = 200
        assert model == body["model"]
    assert status in (200, 400)


@given(st.binary(max_size=50))
def test_any_bytes_pass_through_unread(raw: bytes) -> None:
    assert parse_leniently(raw).body == raw


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None, "x": 1}])
@pytest.mark.parametrize("tail", [b"", b" \n\t"])
def test_a_stream_is_asked_for_usage(options: Any, tail: bytes) -> None:
    for body in ({**CHAT, "stream": True}, {**CHAT, "stream": True, "stream_options": options}):
        api = parse(orjson.dumps(body) + tail)
        assert api.strip_usage
        sent = orjson.loads(api.body)
        assert sent["stream_options"]["include_usage"] is True
        assert {key: value for key, value in sent.items() if key != "stream_options"} == {**CHAT, "stream": True}
    assert orjson.loads(parse({**CHAT, "stream": True, "stream_options": {"x": 1}}).body)["stream_options"]["x"] == 1


def test_a_body_that_needs_nothing_is_sent_as_it_came() -> None:
    for body in (CHAT, {**CHAT, "stream": False}, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}):
        raw = b"  " + orjson.dumps(body, option=orjson.OPT_INDENT_2)
        api = parse(raw)
        assert api.body is raw
        assert not api.strip_usage


@pytest.mark.parametrize("read", [parse_leniently, scan])
def test_where_a_model_is_named_in_two_spellings_none_is_known(read: Callable[[bytes], ApiRequest]) -> None:
    """Else a key for some models would be taken for what it may use, and the engine would serve the other one."""
    assert read(b'{"model": "a", "Model": "b", "input": "x"}').model == ""
    assert read(b'{"model": "a", "modes": "b", "input": "x"}').model == "a"


def test_a_salt_separates_and_a_model_does() -> None:
    assert parse({**CHAT, "cache_salt": "tenant-1"}).salt == "tenant-1"
    assert parse({**CHAT, "cache_salt": 5}).salt == ""


def test_a_long_salt_is_known_by_its_digest() -> None:
    """Whatever keeps salts keeps little."""
    salts = {parse({**CHAT, "cache_salt": text}).salt for text in ("a" * 100_000, "a" * 100_001, "a" * 65)}
    assert len(salts) == 3
    assert max(map(len, salts)) <= 64
    assert parse({**CHAT, "cache_salt": "a" * 64}).salt == "a" * 64


def test_no_salt_reads_as_the_digest_of_another_one() -> None:
    for long in ("a" * 65, "a\x1cb"):
        digest = parse({**CHAT, "cache_salt": long}).salt
        assert parse({**CHAT, "cache_salt": digest}).salt != digest
    headed = parse({"model": "m", "prompt": "x", "cache_salt": "s", "tools": [1]}, openai.COMPLETION).salt
    assert parse({"model": "m", "prompt": "x", "cache_salt": headed}, openai.COMPLETION).salt != headed


def test_salts_on_other_paths_count_whether_the_body_can_be_parsed_or_not() -> None:
    """With tenants isolated the engine gets a salt of ours, which has to keep the client's own salts apart."""
    for raw in (b'{"cache_salt":"%b"}', b'{"cache_salt":"%b","x":NaN}', b'{"cache_salt":"%b","x":"\\ud800"}'):
        assert parse_leniently(raw % b"a").salt != parse_leniently(raw % b"b").salt
        assert scan(raw % b"a").salt != scan(raw % b"b").salt


def test_what_shapes_a_prompt_without_a_head_is_in_its_salt() -> None:
    """A completion's text or token ids have no head: there the fields keep requests apart as salts do."""
    for prompt in ("text", [1, 2, 3]):
        body = {"model": "m", "prompt": prompt, "cache_salt": "s" * 100}
        fields: list[dict[str, Any]] = [
            {},
            {"add_special_tokens": False},
            {"truncate_prompt_tokens": 5},
            {"suffix": "end"},
            {"echo": True},
        ]
        requests = [parse({**body, **more}, openai.COMPLETION) for more in fields]
        assert len({request.salt for request in requests}) == len(fields)
        assert {len(request.salt) for request in requests} <= {40, 40 + 33}
        assert [request.prompt for request in requests] == [requests[0].prompt] * len(fields)
    assert parse({"model": "m", "prompt": "x", "echo": False}, openai.COMPLETION).salt == ""
    responses = [parse_leniently(orjson.dumps({"input": "x", **more})).salt for more in ({}, {"instructions": "Be nice."})]
    assert responses[0] != responses[1]


@pytest.mark.parametrize(
    ("fields", "countable"),
    [
        ({}, True),
        ({"n": 1, "best_of": None, "truncation": "disabled", "truncate_prompt_tokens": None}, True),
        ({"prompt": ["text"]}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": [[1, 2, 3]]}, True),
        ({"prompt": ["text", "another"]}, False),
        ({"prompt": [[1, 2, 3], [4]]}, False),
        ({"n": 2}, False),
        ({"n": "2"}, False),
        ({"best_of": 3}, False),
        ({"truncate_prompt_tokens": 100}, False),
        ({"truncation": "auto"}, False),
        ({"input_ids": [1]}, False),
        ({"prompt_embeds": "AAAA"}, False),
    ],
)
def test_a_count_of_other_prompt_tokens_is_not_about_the_prompt(fields: dict[str, Any], countable: bool) -> None:
    assert parse({"model": "m", "prompt": "text", **fields}, openai.COMPLETION).countable is countable
    if "prompt" not in fields:
        assert parse({**CHAT, **fields}).countable is countable


def test_a_body_too_large_for_the_loop_needs_the_helper() -> None:
    body = {**CHAT, "stream": True, "stream_options": {}}
    raw = orjson.dumps({**body, "x": "x" * openai.SCANNED_AT_ONCE})
    assert b'"include_usage":true' in parse(raw).body
    with pytest.raises(NeedsHelper):
        parse(raw, most=100)
    assert parse(body, most=100).strip_usage


def test_of_what_is_too_large_to_parse_the_model_is_found() -> None:
    api = scan(b' {"input": [[1, 2], [3]], "model": "m\\u00e9", "stream": true, "messages": [{}]} ')
    assert (api.metered, api.model, api.prompt, api.stream) == (False, "mé", None, True)
    for raw in (b"", b"[1]", b"{", b'{"model"', b"\xff\xfe", b'{"model": "\xff"}', b'{"model": nope}'):
        assert scan(raw).model == ""


def test_other_paths_are_read_as_far_as_possible() -> None:
    api = parse_leniently(orjson.dumps({"model": "m", "input": "text", "stream": True}))
    assert (api.model, api.prompt, api.stream, api.metered) == ("m", b"", True, False)
    assert api.size == 4
    assert parse_leniently(b'{"model": "m", "messages": 5}').prompt is None
    assert parse_leniently(b"not json").model == ""
