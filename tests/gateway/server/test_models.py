"""Model aliases and model lists through a whole gateway, with the official clients."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import anthropic
import openai
import pytest

from gateway.dialects.api_request import MAX_MODEL_CHARS
from gateway.parser.parsing import INLINE_BYTES
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import BODY, Running, running
from tests.gateway.request.test_dialects import message, response
from tests.support.fakes import FakeReplica, answers, http, models, streams, writes

ALIASES = {"claude-*": "qwen", "gpt": "llama"}
# No real model: the official client warns of one that its maker has retired, and a warning is an error here.
ASKED: dict[str, Any] = {"model": "claude-test-1", "messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def fleet(*scripts: Any) -> FakeReplica:
    return FakeReplica(script=scripts or (answers(cached=0),), listing=models("qwen", "llama"))


def claude(run: Running) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0)


@pytest.mark.parametrize("model", ["claude-test-1", "claude-", "claude-*"])
async def test_an_alias_goes_upstream_as_its_model_and_is_counted_as_that(model: str, request_lines: Any) -> None:
    async with fleet() as replica, running(replica, model_aliases=ALIASES, prices={"qwen": {"input": 1, "output": 1}}) as run:
        raw = json.dumps({"messages": ASKED["messages"], "x": 1.0, "model": model, "tools": []}, indent=1).encode()
        status, _, answer = await run.post(raw)
        assert (status, answer["model"]) == (200, "m"), "the answer's model stays as the replica says"
        assert replica.requests[-1].body == raw.replace(model.encode(), b"qwen")
        metrics = await run.metrics()
        assert metrics[f'warmroute_prompt_tokens_total{{cache="miss",model="qwen",replica="{replica.name}"}}'] == 100
        assert not any("claude" in name for name in metrics)
        (line,) = request_lines()
        assert (line["model"], line["model_alias"]) == ("qwen", model)
        assert line["cost_usd"] > 0


async def test_the_alias_and_the_model_have_the_same_keys() -> None:
    body = {**BODY, "model": "qwen"}
    async with fleet() as replica, fleet() as other, running(replica, other, model_aliases=ALIASES) as run:
        await run.post(body)
        _, _, dry = await run.post({**body, "model": "claude-x"}, "/warmroute/route")
        assert (dry["model"], dry["model_alias"], dry["reason"]) == ("qwen", "claude-x", "warm")
        assert "model_alias" not in (await run.post(body, "/warmroute/route"))[2]


async def test_the_error_for_an_unknown_model_names_the_alias_that_led_to_it() -> None:
    expected = "The model 'gone', for which 'claude-test-1' stands (model_aliases), does not exist here; "
    aliases = {"claude-*": "gone", "gpt": "gpt"}
    async with fleet() as replica, running(replica, model_aliases=aliases) as run, claude(run) as client:
        assert (await run.post(ASKED))[2]["error"]["message"] == f"{expected}this gateway serves: llama, qwen."
        with pytest.raises(anthropic.NotFoundError, match=re.escape(expected)):
            await client.messages.create(**ASKED, max_tokens=9)
        with pytest.raises(openai.NotFoundError, match=re.escape(expected)):
            await run.client.models.retrieve("claude-test-1")
        assert (await run.post(ASKED, "/warmroute/route"))[2]["error"]["message"].startswith(expected)
        for model in ("gpt", "other"):  # no alias of anything else
            message = (await run.post({**ASKED, "model": model}))[2]["error"]["message"]
            assert message.startswith(f"The model {model!r} does not exist here; ")
        long = (await run.post({**ASKED, "model": "claude-" + "x" * (MAX_MODEL_CHARS - 7)}))[2]["error"]["message"]
        assert len(long) < 300


async def test_of_a_model_that_is_not_known_yet_the_alias_is_named_as_well() -> None:
    async with FakeReplica() as replica:
        replica.refuse()
        async with running(replica, model_aliases={"claude-*": "qwen"}) as run:
            status, _, answer = await run.post(ASKED)
            assert status == 503
            assert answer["error"]["message"].startswith("The model 'qwen', for which 'claude-test-1' stands")


async def test_every_api_takes_an_alias() -> None:
    async with fleet(message()) as replica, running(replica, model_aliases=ALIASES) as run, claude(run) as client:
        await client.messages.create(**ASKED, max_tokens=9)
        replica.script = (writes(http(200, json.dumps(response()).encode())),)
        await run.client.responses.create(model="claude-x", input="hi")
        replica.script = (writes(http(200, b'{"input_tokens": 5}')),)
        assert (await client.messages.count_tokens(**ASKED)).input_tokens == 5
        await run.post({"model": "gpt", "input": "x"}, "/v1/embeddings")
        assert [each.json["model"] for each in replica.requests] == ["qwen", "qwen", "qwen", "llama"]


async def test_a_pool_is_chosen_by_the_model_s_own_name() -> None:
    async with FakeReplica(listing=models("qwen")) as first, FakeReplica(listing=models("llama")) as second:
        pools = [{"models": [name], "replicas": [each.url]} for name, each in (("qwen", first), ("llama", second))]
        async with running(pools=pools, model_aliases=ALIASES) as run:
            for model in ("gpt", "claude-x", "gpt"):
                assert (await run.post({**ASKED, "model": model}))[0] == 200
    assert (len(first.requests), len(second.requests)) == (1, 2)


async def test_a_large_body_is_renamed_by_the_parser_process() -> None:
    async with fleet() as replica, running(replica, model_aliases=ALIASES) as run:
        text = "hello " * (INLINE_BYTES // 5)
        body = {**ASKED, "messages": [{"role": "user", "content": text}], "x": {"model": ASKED["model"]}}
        raw = json.dumps(body).encode()
        assert (await run.post(io.BytesIO(raw)))[0] == 200
        assert replica.requests[-1].body == raw.replace(b'"claude-test-1"', b'"qwen"', 1)
        assert run.gateway.parsing.process.started == 1
        _, _, dry = await run.post(io.BytesIO(raw.replace(b"claude-test-1", b"qwen")), "/warmroute/route")
        assert dry["reason"] == "warm", "the keys are those of the model"


async def test_a_broken_stream_goes_on_under_the_model_s_name() -> None:
    pool = {"resume_streams": True}
    async with fleet(streams("a", "b", die=True)) as first, fleet(streams("a", "b", die=True)) as second:
        pools = [{"replicas": [first.url, second.url], **pool}]
        async with running(pools=pools, model_aliases=ALIASES) as run:
            async with run.session.post(f"{run.url}/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
                await answer.content.read()
            asked = [each.json["model"] for each in (*first.requests, *second.requests)]
            assert asked == ["qwen"] * len(asked)
            assert len(asked) >= 2


async def test_aliases_are_reloaded() -> None:
    async with fleet() as replica, running(replica) as run:
        assert (await run.post(ASKED))[0] == 404
        assert b"claude" not in (await run.get("/v1/models"))[2]
        await reload(run, replica, model_aliases=ALIASES)
        assert (await run.post(ASKED))[0] == 200
        assert b'"claude-*"' in (await run.get("/v1/models"))[2]
        await reload(run, replica, model_aliases={"claude-*": "llama"})
        assert (await run.post(ASKED))[0] == 200
        assert [each.json["model"] for each in replica.requests] == ["qwen", "llama"]
        await reload(run, replica)
        assert (await run.post(ASKED))[0] == 404
        assert b"claude" not in (await run.get("/v1/models"))[2]


async def test_openai_s_client_lists_and_retrieves_aliases() -> None:
    async with fleet() as replica, running(replica, model_aliases=ALIASES) as run:
        listed = [model.id async for model in run.client.models.list()]
        assert listed == ["qwen", "llama", "claude-*", "gpt"]
        one = await run.client.models.retrieve("claude-test-1")
        assert (one.id, one.object, one.model_extra) == ("claude-test-1", "model", {"root": "qwen"})
        assert (await run.client.models.retrieve("qwen")).id == "qwen"
        with pytest.raises(openai.NotFoundError):
            await run.client.models.retrieve("gone")


async def test_anthropic_s_client_lists_and_retrieves_models_and_aliases() -> None:
    async with fleet() as replica, running(replica, model_aliases=ALIASES) as run, claude(run) as client:
        listed = [model.id async for model in client.models.list(limit=3)]  # it asks for the pages one after the other
        assert listed == ["qwen", "llama", "claude-*", "gpt"]
        page = await client.models.list(before_id="gpt", limit=2)
        assert ([each.id for each in page.data], page.has_more) == (["llama", "claude-*"], True)
        one = await client.models.retrieve("claude-test-1")
        assert (one.id, one.type, one.created_at.year) == ("claude-test-1", "model", 1970)
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("gone")
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.models.list(after_id="gone")
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
async def test_a_name_that_no_request_may_have_is_no_model(headers: dict[str, str]) -> None:
    async with fleet() as replica, running(replica, model_aliases={"*": "qwen"}) as run:
        assert (await run.get("/v1/models/" + "x" * MAX_MODEL_CHARS, headers=headers))[0] == 200
        assert (await run.get("/v1/models/" + "x" * (MAX_MODEL_CHARS + 1), headers=headers))[0] == 404


async def test_a_list_of_no_models_has_no_first_one() -> None:
    async with FakeReplica(listing=models()) as replica, running(replica, model_aliases=ALIASES) as run:
        status, _, body = await run.get("/v1/models", headers=ANTHROPIC)
        assert (status, json.loads(body)) == (200, {"data": [], "has_more": False, "first_id": None, "last_id": None})
