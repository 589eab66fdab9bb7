"""OpenAI's own client against the real engine with a model of random weights: one test for each thing that it can ask for and
that no other test asks it for (those are in test_server, test_api, test_sampled, test_grammar and test_continuous)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.replica.tiny import serving, spoken_model

pytestmark = pytest.mark.model
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "find_it", "parameters": {"type": "object"}}}]
ENDLESS = {"ignore_eos": True}
SPECIAL = 290  # a token of its own that is no end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(model, chat_template=TEMPLATE) as asking:
        yield asking


async def text_of(client: openai.AsyncOpenAI, tokens: list[int]) -> str:
    base = str(client.base_url).removesuffix("v1/")
    return (await client._client.post(base + "detokenize", json={"tokens": tokens})).json()["prompt"]  # type: ignore[no-any-return]


async def tokens_of(client: openai.AsyncOpenAI, text: str) -> list[int]:
    base = str(client.base_url).removesuffix("v1/")
    return (await client._client.post(base + "tokenize", json={"prompt": text})).json()["tokens"]  # type: ignore[no-any-return]


async def test_many_tokens_are_made_a_text_in_parts(client: openai.AsyncOpenAI) -> None:
    text = "Wärmflasche 🔥, " * 700
    assert await text_of(client, await tokens_of(client, text)) == text
    base = str(client.base_url).removesuffix("v1/")
    refused = await client._client.post(base + "detokenize", json={"tokens": [7] * ((1 << 17) + 1)})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "tokens has 131,073 tokens; at most 131,072 are made a text at once."


@pytest.mark.parametrize("prompts", [["abc", "xyz"], [[1, 2, 3], [4, 5, 6]]])
async def test_several_prompts_with_several_answers_each(client: openai.AsyncOpenAI, prompts: Any) -> None:
    asked: Any = {"model": "tiny", "n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 5, "extra_body": ENDLESS}
    alone = [choice.text for one in prompts for choice in (await client.completions.create(prompt=one, **asked)).choices]
    whole = await client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == alone
    streamed = ["", "", "", ""]
    stream = await client.completions.create(prompt=prompts, stream=True, stream_options={"include_usage": True}, **asked)
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 20, 26)


async def test_one_bad_prompt_of_several_is_an_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token ids outside"):
        await client.completions.create(model="tiny", prompt=[[1], [-1]])


@pytest.mark.parametrize("prompt", ["abc", [65, 66, 67]])
async def test_echo_puts_the_prompt_first(client: openai.AsyncOpenAI, prompt: Any) -> None:
    asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "extra_body": ENDLESS}
    plain = (await client.completions.create(**asked)).choices[0].text
    head = prompt if isinstance(prompt, str) else await text_of(client, prompt)
    echoed = await client.completions.create(echo=True, **asked)
    assert echoed.choices[0].text == head + plain
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 4
    stream = await client.completions.create(echo=True, stream=True, **asked)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == head + plain
    assert pieces[0].startswith(head)


async def test_an_answer_has_the_tokens_that_it_must_have(client: openai.AsyncOpenAI) -> None:
    async def made(bias: int, **extra: Any) -> Any:
        body = {"logit_bias": {str(bias): 100}} | extra
        return await client.completions.create(model="tiny", prompt="abc", max_tokens=8, extra_body=body)

    assert (await made(299)).usage.completion_tokens == 1
    longer = await made(299, min_tokens=4)
    assert (longer.usage.completion_tokens, longer.choices[0].finish_reason) == (5, "stop")
    assert (await made(66, min_tokens=8, stop_token_ids=[66])).choices[0].finish_reason == "length"
    letter = (await made(66)).choices[0].text[0]
    assert (await made(66, stop=letter * 2)).choices[0].text == ""
    assert (await made(66, stop=letter * 2, min_tokens=3)).choices[0].text == letter * 3
    assert (await made(66, stop=letter * 2, min_tokens=3, logprobs=0)).choices[0].text == letter * 3
    with pytest.raises(openai.BadRequestError, match="at most 8 tokens"):
        await made(66, min_tokens=9)


async def test_special_tokens_are_text_only_if_asked_for(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 3, "logit_bias": {str(SPECIAL): 100}}
    assert (await client.chat.completions.create(**asked)).choices[0].message.content == ""
    spelled = await client.chat.completions.create(extra_body={"skip_special_tokens": False}, **asked)
    assert spelled.choices[0].message.content == await text_of(client, [SPECIAL] * 3) != ""


async def test_token_ids_of_prompt_and_answer(client: openai.AsyncOpenAI) -> None:
    ids = {"return_token_ids": True, "logit_bias": {str(SPECIAL): 100}}
    asked: Any = {"model": "tiny", "max_tokens": 3, "extra_body": ids}
    chat: Any = await client.chat.completions.create(messages=HI, **asked)
    assert await text_of(client, chat.prompt_token_ids) == "[user]Hi[assistant]"
    assert chat.choices[0].token_ids == [SPECIAL] * 3
    stream = await client.chat.completions.create(messages=HI, stream=True, **asked)
    chunks: list[Any] = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == chat.prompt_token_ids
    assert [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids] == [SPECIAL] * 3
    text: Any = await client.completions.create(prompt=[[1], [2]], **asked)
    assert [choice.prompt_token_ids for choice in text.choices] == [[1], [2]]
    stream_of_texts = await client.completions.create(prompt=[1], stream=True, **asked)
    chunks = [chunk async for chunk in stream_of_texts]
    assert chunks[0].choices[0].prompt_token_ids == [1]
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == [SPECIAL] * 3
    ended: Any = await client.completions.create(
        model="tiny", prompt=[1], logit_bias={"299": 100}, extra_body={"return_token_ids": True}
    )
    assert ended.choices[0].token_ids == [299]  # the end is one of them, as in vLLM


async def test_usage_in_every_chunk(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=5, stream=True, stream_options=options, extra_body=ENDLESS
    )
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]
    first, last = usages[0], usages[-1]
    assert first is not None
    assert last is not None
    assert first.prompt_tokens == last.prompt_tokens
    assert first.prompt_tokens_details is None
    assert last.prompt_tokens_details is not None


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_tools_are_in_the_prompt(client: openai.AsyncOpenAI, choice: Any) -> None:
    picked = {"tool_choice": choice} if choice else {}
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 1, "extra_body": {"return_token_ids": True}}
    answer: Any = await client.chat.completions.create(tools=TOOLS, **picked, **asked)
    prompt = await text_of(client, answer.prompt_token_ids)
    assert json.loads(prompt.removesuffix("[user]Hi[assistant]")) == TOOLS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "seek"}}])
async def test_a_call_can_be_forced_streamed_or_not(client: openai.AsyncOpenAI, choice: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("find", "seek")]
    asked: Any = {"model": "tiny", "messages": HI, "tools": tools, "tool_choice": choice, "temperature": 1.0, "seed": 4}
    whole = (await client.chat.completions.create(max_tokens=300, **asked)).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in (("find", "seek") if choice == "required" else ("seek",))
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    async with client.chat.completions.stream(max_tokens=300, **asked) as stream:
        (choice_,) = (await stream.get_final_completion()).choices
    assert choice_.finish_reason == "tool_calls"
    (streamed,) = choice_.message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    cut = (await client.chat.completions.create(max_tokens=5, **asked)).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content
    assert "<tool_call>".startswith(cut.message.content)


async def test_the_last_message_goes_on(client: openai.AsyncOpenAI) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "I sa"}]
    answer: Any = await client.chat.completions.create(
        model="tiny", messages=begun, max_tokens=1, extra_body={"continue_final_message": True, "return_token_ids": True}
    )
    assert await text_of(client, answer.prompt_token_ids) == "[user]Hi[assistant]I sa"


async def test_truncation_is_reported_to_the_client(client: openai.AsyncOpenAI) -> None:
    turns: Any = [{"role": role, "content": word * 300} for word in "abc" for role in ("user", "assistant")]
    asked: Any = {"model": "tiny", "messages": [*turns, *HI], "max_tokens": 8}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**asked)
    assert refused.value.code == "context_length_exceeded"
    raw = await client.chat.completions.with_raw_response.create(extra_body={"truncation": "auto"}, **asked)
    answer: Any = raw.parse()
    assert raw.headers["x-warmroute-dropped-messages"] == "4"
    assert answer.truncation == {"dropped_messages": 4}


async def test_penalties_change_the_text(client: openai.AsyncOpenAI) -> None:
    async def generated(**asked: Any) -> str:
        extra = {"extra_body": ENDLESS | asked.pop("extra", {})}
        return (await client.completions.create(model="tiny", prompt="abc", max_tokens=30, **extra, **asked)).choices[0].text

    bias = {"66": 100, "67": 95}
    assert len(set(await generated(logit_bias=bias))) == 1
    assert len(set(await generated(logit_bias=bias, frequency_penalty=2.0))) == 2
    assert await generated(extra={"repetition_penalty": 3.0}) != await generated()


async def test_a_seed_repeats_an_answer_streamed_or_not(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 12, "temperature": 1.5, "extra_body": ENDLESS}

    async def generated(seed: int) -> str | None:
        return (await client.chat.completions.create(seed=seed, **asked)).choices[0].message.content

    stream = await client.chat.completions.create(seed=7, stream=True, **asked)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert await generated(7) == await generated(7) == streamed != await generated(8)


async def test_suffix_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        await client.completions.create(model="tiny", prompt="a", suffix="b")
