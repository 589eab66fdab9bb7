"""A model of random weights that computes in no time, in a folder as the real engine takes it, and an engine around it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import torch
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from replica.api.server import ServerConfig, create_app
from replica.cache.blocks import CacheListener
from replica.engine import EngineRequest, NewTokens
from replica.torch_engine.continuous import ContinuousConfig, ContinuousEngine
from replica.torch_engine.loading import RandomWeights
from replica.torch_engine.patches import OutputRouter

VOCABULARY = 300


def tiny_model(folder: Path, seed: int = 0, kind: Any = LlamaForCausalLM, config: PretrainedConfig | None = None) -> Path:
    """Two layers of random weights, and a tokenizer of bytes."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 299}
    torch.manual_seed(seed)
    # Weights ten times the usual: else the scores hardly differ, and a wrong cache would not show.
    model = kind(config or LlamaConfig(**shape, **heads, initializer_range=0.2, bos_token_id=298, pad_token_id=297))
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def spoken_model(folder: Path) -> Path:
    """The same, with a tokenizer that has a special token for each of the model's that are no bytes, the end among them."""
    tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{at}|>" for at in range(len(tokenizer), VOCABULARY)]})
    tokenizer.save_pretrained(folder)
    return folder


class WatchedRouter(OutputRouter):
    """Records the scores of every token that is drawn, by transformers' id of the request, after `spoil` could change them.
    `manager` is transformers' own, parts of which a test may break. `together`: rows are drawn as on a GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scores: dict[str, list[torch.Tensor]] = {}
        self.spoil: Callable[[list[str], torch.Tensor], None] = lambda ids, scores: None
        self.manager: Any = None
        self.together = False

    def draws_together(self, scores: torch.Tensor) -> bool:
        return self.together or super().draws_together(scores)

    def install(self, manager: Any) -> None:
        super().install(manager)
        self.manager = manager

    def sample(self, batch: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        ids = [future.state.request_id for future in batch.requests_in_batch if future.has_new_token]
        self.spoil(ids, scores)
        for row, name in enumerate(ids):
            self.scores.setdefault(name, []).append(scores[0, row].float().clone())
        super().sample(batch, scores, output_ids)


class WatchedContinuousEngine(ContinuousEngine):
    """With a `router` that can be watched, from its start on."""

    router: WatchedRouter

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, router=self._watched, **named)

    def _watched(self, *args: Any) -> WatchedRouter:
        self.router = WatchedRouter(*args)
        return self.router


@asynccontextmanager
async def running(
    model: Path | RandomWeights, listeners: Sequence[CacheListener] = (), **options: Any
) -> AsyncIterator[WatchedContinuousEngine]:
    config = {"device": "cpu", "dtype": "float32", "kv_tokens": 1024, "block_size": 4, "max_batch": 4, "batch_tokens": 64}
    parts = {name: options.pop(name) for name in ("grammars", "forward") if name in options}
    engine = WatchedContinuousEngine(model, ContinuousConfig(**({"threads": 1} | config | options)), listeners, **parts)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def serving(model: Path, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a server around such an engine."""
    async with running(model, **options) as engine:
        app = create_app(engine, "tiny", ServerConfig(trust_templates=True))
        app.cleanup_ctx.clear()  # the engine has a lifetime of its own
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as asking:
            yield asking
        await runner.cleanup()


async def answer(engine: ContinuousEngine, request: EngineRequest) -> tuple[list[int], int]:
    """All tokens, and how many of the prompt's were cached."""
    sequence, tokens, step = engine.submit(request), list[int](), NewTokens([], None)
    while step.finish is None:
        step = await sequence.next()
        tokens += step.tokens
    return tokens, sequence.cached_tokens


def recorded_scores(engine: WatchedContinuousEngine) -> dict[str, list[torch.Tensor]]:
    """The scores of every token that the engine draws from now on, by transformers' id of the request: r0, r1, ..."""
    engine.router.scores = {}
    return engine.router.scores
