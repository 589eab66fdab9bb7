"""The real engine with the real model.

Texts are not compared between cold and cached runs, nor across engines: bfloat16 ties may break differently.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from replica.engine import EngineError, EngineRequest, NewTokens, PromptError
from tests.support.paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from replica.api.server import create_app
from replica.torch_engine.continuous import ContinuousConfig
from replica.torch_engine.model import cache_folder, prepared_smollm2
from tests.replica.tiny import WatchedContinuousEngine, answer, recorded_scores, running
from tests.support.tiers import nightly

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
# Token ids that llama.cpp's /tokenize gave for the GGUF file of the same model, in which each digit is a token.
LLAMA_CPP_TOKENS = {
    "Hello world, 2024": [19556, 905, 28, 216, 34, 32, 34, 36],
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
}
# The ids of this question in the model's chat template, as vLLM's /tokenize gave them.
CHAT_TOKENS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[WatchedContinuousEngine]:
    config = ContinuousConfig(kv_tokens=4100, block_size=BLOCK, max_batch=4, threads=2)
    engine = WatchedContinuousEngine(prepared_smollm2(cache_folder()), config)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(engine: WatchedContinuousEngine) -> AsyncIterator[str]:
    app = create_app(engine, "smollm2")
    app.cleanup_ctx.clear()  # the engine has a fixture of its own
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(100, 40_000) for _ in range(length)]


async def run(engine: WatchedContinuousEngine, request: EngineRequest) -> tuple[list[int], int, str | None]:
    """All tokens, the cached tokens, and the finish reason."""
    sequence, tokens, step = engine.submit(request), [], NewTokens([], None)
    while step.finish is None:
        step = await sequence.next()
        tokens += step.tokens
    return tokens, sequence.cached_tokens, step.finish


async def test_the_tokenizer_agrees_with_llama_cpp_and_vllm(engine: WatchedContinuousEngine) -> None:
    for text, ids in LLAMA_CPP_TOKENS.items():
        assert engine.encode(text) == ids
    assert engine.encode_chat(PARIS, None) == CHAT_TOKENS
    digits = engine.encode("In 1789, 3.14159 of 1,000,000")
    assert all(engine.decode([token]).strip(" 0123456789") or len(engine.decode([token])) == 1 for token in digits)


async def test_a_message_can_be_left_open(engine: WatchedContinuousEngine, url: str) -> None:
    begun = [*PARIS, {"role": "assistant", "content": "The capital of"}]
    assert engine.encode_chat(begun, None, "open") == CHAT_TOKENS + engine.encode("The capital of")
    assert engine.encode_chat(PARIS, None, "none") == CHAT_TOKENS[:-4]
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        options: Any = {"continue_final_message": True, "add_generation_prompt": False}
        rest = await client.chat.completions.create(model="smollm2", messages=begun, max_tokens=30, extra_body=options)
    assert (rest.choices[0].message.content or "").startswith(" France is Paris")


async def test_openais_client_gets_paris_and_then_a_cached_prompt(engine: WatchedContinuousEngine, url: str) -> None:
    assert await engine.reset_prefix_cache()
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="smollm2", messages=PARIS, max_tokens=30)
        stream = await client.chat.completions.create(
            model="smollm2", messages=PARIS, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    for usage, cached in ((whole.usage, 0), (chunks[-1].usage, BLOCK)):
        assert usage is not None
        assert usage.prompt_tokens == len(CHAT_TOKENS)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached


async def test_a_repeated_prompt_hits_all_full_blocks_even_after_a_single_token(engine: WatchedContinuousEngine) -> None:
    for length in (5 * BLOCK, 5 * BLOCK + 1):
        request = EngineRequest(prompt(length, seed=length), max_tokens=1)
        assert (await run(engine, request))[1] == 0
        # The last prompt token is computed in any case, so its block is never a hit.
        assert (await run(engine, request))[1] == (length - 1) // BLOCK * BLOCK


async def test_the_next_turn_finds_the_last_one(engine: WatchedContinuousEngine) -> None:
    first = prompt(100, seed=1)
    answer, _, _ = await run(engine, EngineRequest(first, max_tokens=60, ignore_eos=True))
    turn = [*first, *answer, *prompt(50, seed=2)]
    _, cached, _ = await run(engine, EngineRequest(turn, max_tokens=2))
    assert cached == (100 + 59) // BLOCK * BLOCK  # the last token of an answer is never computed


async def test_more_requests_than_places_all_finish(engine: WatchedContinuousEngine) -> None:
    requests = [EngineRequest(prompt(60 + 10 * at, seed=at), max_tokens=8, ignore_eos=True) for at in range(9)]
    loads: list[tuple[int, int]] = []
    running = [asyncio.create_task(run(engine, request)) for request in requests]
    # Runs when every task has submitted, and before an output is delivered.
    asyncio.get_running_loop().call_soon(lambda: loads.append((engine.load().running, engine.load().waiting)))
    answers = await asyncio.gather(*running)
    assert loads == [(4, 5)]
    assert [(len(tokens), finish) for tokens, _, finish in answers] == [(8, "length")] * 9
    assert engine.load().kv_usage == 0


async def test_requests_wait_when_their_worst_case_does_not_fit(engine: WatchedContinuousEngine) -> None:
    large, small = (
        engine.submit(EngineRequest(prompt(30, seed=3), max_tokens=4000)),
        engine.submit(EngineRequest([5, 6, 7], max_tokens=200)),
    )
    assert (engine.load().running, engine.load().waiting) == (1, 1)
    large.close()  # its room is free with the next step
    assert (await small.next()).tokens
    assert (engine.load().running, engine.load().waiting) == (1, 0)
    small.close()
    assert (engine.load().running, engine.load().waiting) == (0, 0)


async def test_cancelling_frees_memory_and_leaves_others_alone(engine: WatchedContinuousEngine) -> None:
    doomed = engine.submit(EngineRequest(prompt(200, seed=4), max_tokens=1000, ignore_eos=True))
    other = asyncio.create_task(run(engine, EngineRequest(prompt(50, seed=5), max_tokens=12, ignore_eos=True)))
    await doomed.next()
    assert engine.load().kv_usage > 0
    doomed.close()
    assert len((await other)[0]) == 12
    assert (engine.load().running, engine.load().kv_usage) == (0, 0)


async def test_sampling_is_per_request_and_repeatable(engine: WatchedContinuousEngine) -> None:
    def ask(**sampling: Any) -> Any:
        return run(engine, EngineRequest(CHAT_TOKENS, max_tokens=12, ignore_eos=True, **sampling))

    await ask()
    hot = {"temperature": 1.5, "top_p": 0.95}
    alone = [(await ask(seed=seed, **hot))[0] for seed in (1, 1, 2)]
    assert alone[0] == alone[1] != alone[2]
    greedy, _ = await asyncio.gather(ask(temperature=1e-9), ask(seed=3, **hot))
    assert "Paris" in engine.decode(greedy[0])
    assert (await ask(temperature=2.0, top_p=1e-6))[0] == (await ask())[0]  # only the best token is left


async def test_broken_requests_do_not_harm_the_engine(engine: WatchedContinuousEngine, url: str) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": [49_152]},
        {"prompt": [-1]},
        {"prompt": prompt(4096, seed=6)},
        {"prompt": [1], "max_tokens": 4096},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "model": "nope"},
    ]
    async with aiohttp.ClientSession() as http:
        for body in bodies:
            async with http.post(url + "/v1/completions", json=body) as response:
                assert 400 <= response.status < 500, await response.text()
        async with http.post(
            url + "/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2, "seed": -(1 << 63)}
        ) as response:
            assert response.status == 200
        async with http.get(url + "/health") as response:
            assert response.status == 200
    with pytest.raises(PromptError):
        engine.encode_chat([{"role": "user"}], None)


async def test_reset_forgets_when_idle(engine: WatchedContinuousEngine) -> None:
    request = EngineRequest(prompt(100, seed=7), max_tokens=2)
    await run(engine, request)
    busy = engine.submit(EngineRequest([1, 2], max_tokens=500, ignore_eos=True))
    assert not await engine.reset_prefix_cache()
    busy.close()
    assert await engine.reset_prefix_cache()
    assert (await run(engine, request))[1] == 0


async def test_a_full_cache_keeps_serving(engine: WatchedContinuousEngine) -> None:
    for seed in range(6):  # 6 x 700 tokens through a cache of 4096
        tokens, cached, _ = await run(engine, EngineRequest(prompt(700, seed=100 + seed), max_tokens=2, ignore_eos=True))
        assert (len(tokens), cached) == (2, 0)
    assert engine.load().kv_usage == 0


async def test_a_request_as_large_as_the_cache_is_served(engine: WatchedContinuousEngine) -> None:
    assert engine.info.context == 4096  # whole blocks only
    small = engine.submit(EngineRequest(prompt(40, seed=200), max_tokens=300))
    whole = engine.submit(EngineRequest(prompt(500, seed=201), max_tokens=3596))
    await small.next()
    assert engine.load().waiting == 1
    small.close()
    assert (await whole.next()).tokens
    whole.close()


async def test_when_its_thread_dies_requests_and_health_get_the_error(engine: WatchedContinuousEngine, url: str) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("no memory left")

    engine.router.manager.batch_processor.scheduler.schedule_batch = explode
    with pytest.raises(EngineError, match="no memory left"):
        await run(engine, EngineRequest([1, 2, 3], max_tokens=2))
    async with aiohttp.ClientSession() as http, http.get(url + "/health") as response:
        assert response.status == 503
        assert "no memory left" in (await response.json())["error"]["message"]
    with pytest.raises(EngineError):
        await run(engine, EngineRequest([1, 2, 3], max_tokens=2))
    await engine.close()
    await engine.start()
    assert engine.failure() is None


@nightly("test_paged.py: the same with a tiny model")
async def test_a_cached_answer_is_the_uncached_one_in_float32() -> None:
    """On text: random tokens drive the scores up, and with them what rounding does to them."""
    folder = prepared_smollm2(cache_folder())
    text = (ROOT / "LICENSE").read_text("utf-8")
    async with running(folder, kv_tokens=2048, block_size=16, batch_tokens=256, threads=2) as engine:
        scores, tokens = recorded_scores(engine), engine.encode(text)
        for at in range(4):
            request = EngineRequest(tokens[500 * at : 500 * at + 170 + at], 4, ignore_eos=True)
            assert (await answer(engine, request))[0] == (await answer(engine, request))[0]
            cold, warm = (torch.stack(scores[f"r{2 * at + time}"]) for time in range(2))
            assert (cold - warm).abs().max() < 1e-4
        assert engine.cache_counts().hits == 4 * 10
