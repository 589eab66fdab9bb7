"""Each engine behind a gateway, used by OpenAI's and Anthropic's own clients. What is expected of which is a table here; what
was found is one in build/engines.md.

`make test-engines` installs them first (vLLM's CPU build has 3.4 GB). An engine that is not installed is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import anthropic
import openai
import pytest

from tests.engines.live import KEY, KEY_VARIABLE, KINDS, Kind, Live
from tests.engines.table import Table
from tests.gateway.conftest import Running, eventually, running

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

LONG = "Here are the rules of the house. " * 40
LLAMAS, STAND_IN, VLLM = ("llama.cpp", "llama.cpp with a key"), "Distributed-Llama", "vLLM"
ENGINE = {"llama.cpp": "llamacpp", "llama.cpp with a key": "llamacpp", "vLLM": "vllm", STAND_IN: "distributed-llama"}


class Refused(Exception):
    """The engine, or the gateway for it, says that it cannot do this."""


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    found = Table()
    yield found
    text = found.write(list(CHECKS))
    print(f"\n{text}")  # noqa: T201  (it is what `make test-engines` is for)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    kind: Kind = request.param
    if not kind.installed:
        pytest.skip(f"{kind.name} is not installed: scripts/peers.sh .peers engines")
    os.environ[KEY_VARIABLE] = KEY
    with Live(kind) as engine:
        yield engine


@asynccontextmanager
async def behind(engine: Live) -> AsyncIterator[Running]:
    with TemporaryDirectory() as folder:
        state = {"url": f"sqlite:///{folder}/state.db"}
        async with running(engine.replica, health={"interval_s": 0.2, "timeout_s": 5}, state=state) as run:
            await eventually(lambda: next(iter(run.gateway.fleet.replicas)).up)
            yield run


async def row(run: Running) -> dict[str, Any]:
    listed: dict[str, Any] = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"][0]
    return listed


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def asked(making: Awaitable[Any]) -> Any:
    """Raises Refused for an error that says so."""
    try:
        return await making
    except (openai.BadRequestError, openai.NotFoundError, anthropic.BadRequestError, anthropic.NotFoundError) as error:
        raise Refused(str(error)) from error
    except openai.InternalServerError as error:
        if error.status_code == 501:
            raise Refused(str(error)) from error
        raise


# -- what is looked at


async def recognised(engine: Live, run: Running) -> str:
    listed = await row(run)
    assert listed["engine"] == ENGINE[engine.kind.name]
    return f"as {listed['engine']}" + (" (named)" if engine.kind.config else "")


async def plain(engine: Live, run: Running) -> str:
    answer = await asked(run.client.chat.completions.create(model=engine.kind.model, messages=user("say hello"), max_tokens=8))
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    return "yes" if answer.usage else "yes, no usage"


async def streamed(engine: Live, run: Running) -> str:
    create = run.client.chat.completions.create
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [
        chunk
        async for chunk in await asked(create(model=engine.kind.model, messages=user("say hello"), max_tokens=8, **options))
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    return "yes" if chunks[-1].usage else "yes, no usage"


async def stop_strings(engine: Live, run: Running) -> str:
    body: Any = {
        "model": engine.kind.model,
        "temperature": 0,
        "max_tokens": 24,
        "messages": user("say one two three four five"),
    }
    whole = (await asked(run.client.chat.completions.create(**body))).choices[0].message.content
    stop = whole[6:9]
    cut = (await asked(run.client.chat.completions.create(**body, stop=[stop]))).choices[0]
    assert stop not in cut.message.content
    assert cut.finish_reason == "stop"
    texts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await asked(run.client.chat.completions.create(**body, stop=stop, stream=True))
        if chunk.choices
    ]
    assert stop not in "".join(texts)
    return "yes, by the gateway" if engine.kind.name == STAND_IN else "yes"


async def tools(engine: Live, run: Running) -> str:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris"]}}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": parameters}}
    create = run.client.chat.completions.create
    answer = await asked(
        create(
            model=engine.kind.model,
            messages=user("What is the weather in Paris?"),
            tools=[tool],
            tool_choice="required",
            max_tokens=200,
            temperature=0,
        )
    )
    calls = answer.choices[0].message.tool_calls
    if (
        not calls and engine.kind.name in LLAMAS
    ):  # its grammar for calls comes from the chat template, and this model's has none
        return "accepted; no call by this model"
    (call, *_) = calls
    assert (call.function.name, "Paris" in str(json.loads(call.function.arguments))) == ("weather", True)
    return "yes (tool_choice: required)"


async def schema(engine: Live, run: Running) -> str:
    form = {"type": "object", "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}}, "required": ["answer"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": form, "strict": True}}
    create = run.client.chat.completions.create
    answer = await asked(
        create(model=engine.kind.model, messages=user("Is water wet?"), response_format=wanted, max_tokens=60, temperature=0)
    )
    assert json.loads(answer.choices[0].message.content)["answer"] in ("yes", "no")
    return "yes"


async def completions(engine: Live, run: Running) -> str:
    answer = await asked(run.client.completions.create(model=engine.kind.model, prompt="One, two,", max_tokens=4))
    assert answer.choices[0].text
    return "yes"


async def embeddings(engine: Live, run: Running) -> str:
    answer = await asked(run.client.embeddings.create(model=engine.kind.model, input="hello"))
    assert answer.data[0].embedding
    return "yes"


async def messages(engine: Live, run: Running) -> str:
    """llama.cpp's stream has no message_start where the first token is half a character: Anthropic's client fails on it."""
    lacking, streams = 0, 6
    async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0) as claude:
        for number in range(streams):
            body: Any = {"model": engine.kind.model, "max_tokens": 8, "messages": user(f"say the number {number}")}
            answer = await asked(claude.messages.create(**body))
            assert answer.content[0].text
            async with claude.messages.stream(**body) as stream:
                try:
                    assert await stream.get_final_text()
                except AssertionError:
                    if engine.kind.name not in LLAMAS:
                        raise
                    lacking += 1
    assert lacking < streams
    about = await _translated(run, "messages")
    return f"{about}; {lacking} of {streams} streams lacked message_start" if lacking else about


async def rendered(engine: Live, run: Running) -> str:
    """The text and the tokens of a kept log are those that the engine has counted."""
    create, said = (
        run.client.chat.completions.with_raw_response.create,
        user(f"{LONG}Say hello, \u00fcn\u00efc\u00f6d\u00e9 <|im_end|>."),
    )
    keeps, mine = {"Prompt-Log": "keep"}, {"Authorization": f"Bearer {run.client.api_key}"}
    answer = await asked(create(model=engine.kind.model, messages=said, max_tokens=4, extra_headers=keeps))
    told = dict(re.findall(r'([a-z]+)="([^"]*)"', answer.headers["Prompt-Log"]))
    counted = answer.parse().usage
    status, _, raw = await run.get(f"/v1/logs/{told['input']}/render?model={engine.kind.model}", headers=mine)
    if status == 501:
        raise Refused(raw.decode())
    found = json.loads(raw)
    assert status == 200, found
    assert found["count"] == len(found["tokens"]) == counted.prompt_tokens
    assert said[0]["content"] in found["text"]
    status, _, raw = await run.get(f"/v1/logs/{told['head']}/render?model={engine.kind.model}", headers=mine)
    whole = json.loads(raw)
    assert (status, answer.parse().choices[0].message.content.strip() in whole["text"]) == (200, True)
    assert whole["tokens"][: found["count"] - 8] == found["tokens"][:-8]
    return f"yes: {found['count']} tokens, as counted"


async def responses(engine: Live, run: Running) -> str:
    answer = await asked(run.client.responses.create(model=engine.kind.model, input="say hello", max_output_tokens=16))
    assert answer.output_text
    return await _translated(run, "responses")


async def _translated(run: Running, dialect: str) -> str:
    (state,) = run.gateway.fleet.replicas
    return "yes" if state.speaks(dialect, run.gateway.clock()) else "yes, translated"


async def cached_tokens(engine: Live, run: Running) -> str:
    """They grow with the conversation."""
    talk, cached, predicted = user(LONG), list[int | None](), list[int]()
    for turn in range(3):
        _, headers, answer = await run.post({"model": engine.kind.model, "messages": talk, "max_tokens": 8})
        usage = answer.get("usage") or {}
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        predicted.append(int(headers["X-Warmroute-Cached-Tokens"]))
        talk += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            *user(f"Say more: {turn}. {LONG}"),
        ]
    assert predicted[0] < predicted[1] < predicted[2], "as the gateway predicts them"
    if cached[-1] is None:
        return "predicted, not reported"
    assert cached[1] is not None
    assert 100 < cached[1] < cached[2], "as the engine reports them"
    return f"reported: {', '.join(map(str, cached))}"


async def metrics(engine: Live, run: Running) -> str:
    (state,) = run.gateway.fleet.replicas
    if not state.engine.pages:
        raise Refused("it has none")
    await eventually(lambda: state.facts.running is not None)
    listed = await row(run)
    assert listed["engine_waiting"] is not None
    size = listed["engine_kv_tokens"]
    assert size
    return f"running, waiting, KV size ({size} tokens)"


async def error_shapes(engine: Live, run: Running) -> str:
    """What is too long for the engine."""
    too_long: Any = {"model": engine.kind.model, "messages": user("word " * 9000), "max_tokens": 4}
    try:
        await run.client.chat.completions.create(**too_long)
    except openai.BadRequestError as error:
        return f"400 {error.code}"
    return "cut by the engine"


async def hang_up(engine: Live, run: Running) -> str:
    """A client that leaves ends the engine's work: the next one is served at once."""
    stream = await asked(
        run.client.chat.completions.create(model=engine.kind.model, messages=user("tell me all"), max_tokens=300, stream=True)
    )
    await anext(aiter(stream))
    await stream.close()
    await asked(run.client.chat.completions.create(model=engine.kind.model, messages=user("say hi"), max_tokens=2))
    (state,) = run.gateway.fleet.replicas
    if state.engine.pages:
        await eventually(lambda: state.facts.running == 0)
    return "yes"


async def restart(engine: Live, run: Running) -> str:
    """Noticed, and what was cached is forgotten."""
    (state,) = run.gateway.fleet.replicas
    body = {"model": engine.kind.model, "messages": user(LONG * 2), "max_tokens": 2}
    await run.post(body)
    assert run.gateway.router.held_tokens(state.name) > 0
    await asyncio.to_thread(engine.stop)
    await eventually(lambda: not state.up)
    await asyncio.to_thread(engine.start)
    await eventually(lambda: state.up and run.gateway.router.held_tokens(state.name) == 0)
    code, headers, _ = await run.post(body)
    assert (code, headers["X-Warmroute-Cached-Tokens"]) == (200, "0")
    page = await run.metrics()
    signs = [name for name, value in page.items() if name.startswith("warmroute_replica_restarts_total") and value]
    return ", ".join(sorted(name.partition('reason="')[2].partition('"')[0] for name in signs))


async def wrong_key(engine: Live, run: Running) -> str:
    """A gateway with another key for it: operators are told, clients are not blamed."""
    if not engine.kind.keyed:
        return "wants none"
    os.environ["WARMROUTE_TEST_WRONG_KEY"] = "wrong"
    replica = {**engine.replica, "key": {"env": "WARMROUTE_TEST_WRONG_KEY"}}
    async with running(replica, health={"interval_s": 0.1, "failures": 1}) as other:
        (state,) = other.gateway.fleet.replicas
        if state.up:  # its model list needs no key: requests find out
            code, _, _ = await other.post(
                {"model": engine.kind.model, "messages": user("hi")}, headers={"Authorization": f"Bearer {KEY}"}
            )
            assert code in (502, 503)
            return "refused at requests"
        assert "refuses the key" in state.error
    return "refused at probes"


Check = Callable[[Live, Running], Awaitable[str]]
CHECKS: Mapping[str, Check] = {
    "recognised": recognised,
    "chat": plain,
    "chat, streamed": streamed,
    "stop strings": stop_strings,
    "tools": tools,
    "JSON schema": schema,
    "completions": completions,
    "embeddings": embeddings,
    "Messages": messages,
    "Responses": responses,
    "a prompt log as the model sees it": rendered,
    "cached tokens in a conversation": cached_tokens,
    "its metrics": metrics,
    "a prompt that is too long": error_shapes,
    "a client that leaves": hang_up,
    "a wrong key": wrong_key,
    "a restart": restart,
}
CANNOT = {
    ("tools", STAND_IN),
    ("JSON schema", STAND_IN),
    ("completions", STAND_IN),
    ("its metrics", STAND_IN),
    ("a prompt log as the model sees it", STAND_IN),
    *(("embeddings", kind.name) for kind in KINDS),
}


@pytest.mark.parametrize("what", CHECKS)
async def test_what_works(what: str, live: Live, table: Table) -> None:
    async with behind(live) as run:
        try:
            found = await CHECKS[what](live, run)
        except Refused:
            table.found(live.kind, what, "no")
            assert (what, live.kind.name) in CANNOT
        except BaseException:
            table.found(live.kind, what, "FAILED")
            raise
        else:
            table.found(live.kind, what, found)
            assert (what, live.kind.name) not in CANNOT, "it can do more than was expected"


async def test_two_llama_cpps_share_the_load_and_keep_conversations() -> None:
    kind = KINDS[0]
    if not kind.installed:
        pytest.skip("llama.cpp is not installed: scripts/peers.sh .peers engines")
    with Live(kind) as one, Live(kind) as two:
        async with running(one.replica, two.replica) as run:
            talks = [user(f"Story {number}. {LONG}") for number in range(4)]
            places: list[list[str]] = [[] for _ in talks]
            for _ in range(3):

                async def turn(number: int) -> None:
                    code, headers, answer = await run.post({"model": "smollm2", "messages": talks[number], "max_tokens": 4})
                    assert code == 200
                    places[number].append(headers["X-Warmroute-Replica"])
                    talks[number] += [answer["choices"][0]["message"], *user("Go on.")]

                await asyncio.gather(*map(turn, range(4)))
            assert all(len(set(each)) == 1 for each in places), "each stays where it began"
            assert len({each[0] for each in places}) == 2, "both have some"
