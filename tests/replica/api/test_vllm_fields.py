"""Every field of vLLM 0.32's answers is in ours, with the same type, for the same request; or it is listed here, and why not.

The table has names and types only. Where vLLM's recorded answers lie beside the checkout, it is compared with them.
"""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from tests.support.paths import CAPTURES as RECORDED

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.replica.tiny import serving, spoken_model

pytestmark = pytest.mark.model
CAPTURES = RECORDED / "vllm"

FRAME = "id=str object=str created=int model=str"
USAGE = "usage.prompt_tokens=int usage.completion_tokens=int usage.total_tokens=int"
CACHED = f"{USAGE} usage.prompt_tokens_details.cached_tokens=int"
EMPTY = (
    "service_tier=null kv_transfer_params=null ec_transfer_params=null metrics=null choices[].routed_experts=null "
    "usage.completion_tokens_details=null usage.prompt_tokens_details.multimodal_tokens=null"
)
CHAT = (
    f"{FRAME} {CACHED} {EMPTY} system_fingerprint=str usage.prompt_tokens_details.created_cache_tokens=int "
    "choices[].index=int choices[].finish_reason=str choices[].stop_reason=null choices[].logprobs=null "
    "choices[].message.role=str choices[].message.content=str choices[].message.refusal=null "
    "choices[].message.annotations=null choices[].message.audio=null choices[].message.function_call=null "
    "choices[].message.reasoning=null prompt_logprobs=null prompt_text=null"
)
TEXT = (
    f"{FRAME} {CACHED} {EMPTY} system_fingerprint=str usage.prompt_tokens_details.created_cache_tokens=null "
    "choices[].index=int choices[].text=str choices[].finish_reason=str choices[].stop_reason=null choices[].logprobs=null "
    "choices[].token_ids=null choices[].prompt_token_ids=null choices[].prompt_logprobs=null"
)
RIGHTS = "create_engine sampling logprobs search_indices view fine_tuning"
PERMISSION = re.sub(
    r"(\S+)",
    r"data[].permission[].\1",
    "id=str object=str created=int organization=str group=null is_blocking=bool " + re.sub(r"(\w+)", r"allow_\1=bool", RIGHTS),
)
DELTA = "choices[].index=int choices[].delta.content=str choices[].logprobs=null"
# In a stream: the chunk with the role, those with text, the one that ends the choice, the one with usage.
HEAD = f"{FRAME} {DELTA} choices[].delta.role=str choices[].finish_reason=null prompt_token_ids=null prompt_text=null"
PIECE = f"{FRAME} {DELTA} choices[].finish_reason=null choices[].token_ids=null"
END = f"{FRAME} {DELTA} choices[].finish_reason=str choices[].stop_reason=null choices[].token_ids=null"
LAST = f"{FRAME} choices=[] system_fingerprint=str {CACHED}"
SO_FAR = f"{USAGE} usage.completion_tokens_details=null"
TEXT_PIECE = (
    f"{FRAME} choices[].index=int choices[].text=str choices[].logprobs=null choices[].token_ids=null "
    "choices[].prompt_token_ids=null choices[].stop_reason=null"
)

HI = {"messages": [{"role": "user", "content": "Hi"}]}
ANSWERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat_1_cold": (
        "/v1/chat/completions",
        HI | {"max_tokens": 5},
        f"{CHAT} prompt_token_ids=null choices[].token_ids=null",
    ),
    "chat_8_return_token_ids": (
        "/v1/chat/completions",
        HI | {"max_tokens": 5, "return_token_ids": True},
        f"{CHAT} prompt_token_ids[]=int choices[].token_ids[]=int",
    ),
    "completions_text": ("/v1/completions", {"prompt": "abc", "max_tokens": 5}, TEXT),
    "completions_token_ids": ("/v1/completions", {"prompt": [1, 2], "max_tokens": 5}, TEXT),
    "tokenize_chat": (
        "/tokenize",
        HI | {"return_token_strs": True},
        "count=int max_model_len=int tokens[]=int token_strs[]=str",
    ),
    "tokenize_prompt": ("/tokenize", {"prompt": "abc"}, "count=int max_model_len=int tokens[]=int token_strs=null"),
    "detokenize": ("/detokenize", {"tokens": [1, 2]}, "prompt=str"),
    "models": (
        "/v1/models",
        {},
        "object=str data[].id=str data[].object=str data[].created=int data[].owned_by=str data[].root=str data[].parent=null "
        f"data[].max_model_len=int {PERMISSION}",
    ),
    "load": ("/load", {}, "server_load=int"),
    "reset_prefix_cache": ("/reset_prefix_cache", {}, "success=bool"),
} | {
    name: ("/v1/chat/completions", HI | body, "error.message=str error.type=str error.param=str error.code=int")
    for name, body in {
        "error_unknown_model": {"model": "nope"},
        "error_too_long": {"messages": [{"role": "user", "content": "word " * 300}]},
        "error_bad_json_type": {"messages": "hi"},
        "error_max_tokens_zero": {"max_tokens": -1},
    }.items()
}
STREAMS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat_5_stream_usage": (
        "/v1/chat/completions",
        HI | {"stream_options": {"include_usage": True}},
        {
            "head": HEAD,
            "piece": PIECE,
            "end": END,
            "usage": f"{LAST} usage.prompt_tokens_details.created_cache_tokens=int",
        },
    ),
    "chat_6_stream_plain": (
        "/v1/chat/completions",
        HI,
        {"head": HEAD, "piece": PIECE, "end": f"{END} system_fingerprint=str"},
    ),
    "chat_7_stream_continuous_usage": (
        "/v1/chat/completions",
        HI | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {
            "head": f"{HEAD} {SO_FAR}",
            "piece": f"{PIECE} {SO_FAR}",
            "end": f"{END} {SO_FAR}",
            "usage": f"{LAST} usage.prompt_tokens_details.created_cache_tokens=int",
        },
    ),
    "completions_stream": (
        "/v1/completions",
        {"prompt": "abc", "stream_options": {"include_usage": True}},
        {
            "piece": f"{TEXT_PIECE} choices[].finish_reason=null",
            "end": f"{TEXT_PIECE} choices[].finish_reason=str",
            "usage": LAST,
        },
    ),
}

NOT_ASKED = "null unless it was asked for; ours is there when it was"
NEVER = "null for what is not served here: a client reads null for a field that is not there"
LEFT_OUT = {
    "choices[].token_ids": NOT_ASKED,
    "choices[].prompt_token_ids": NOT_ASKED,
    "prompt_token_ids": NOT_ASKED,
    "piece: choices[].stop_reason": "null in the chunks of a completion that do not end it",
    "prompt_text": NEVER,
    "prompt_logprobs": NEVER,
    "choices[].prompt_logprobs": NEVER,
    "choices[].routed_experts": NEVER,
    "choices[].message.refusal": NEVER,
    "choices[].message.annotations": NEVER,
    "choices[].message.audio": NEVER,
    "choices[].message.function_call": NEVER,
    "choices[].message.reasoning": NEVER,
    "service_tier": NEVER,
    "kv_transfer_params": NEVER,
    "ec_transfer_params": NEVER,
    "metrics": NEVER,
    "usage.completion_tokens_details": NEVER,
    "usage.prompt_tokens_details.multimodal_tokens": NEVER,
    "usage.prompt_tokens_details.created_cache_tokens": "vLLM's alone: how many tokens were newly cached; OpenAI has no such",
    "system_fingerprint": "the build of vLLM; OpenAI has deprecated it",
} | {
    field.partition("=")[0]: "a list of permissions that OpenAI gave up in 2023; always the same in vLLM"
    for field in PERMISSION.split()
}
DIFFERENT = {"error.code=int"}  # OpenAI's code is a word or null; vLLM's is the status again


def flat(value: object, at: str = "") -> Iterator[str]:
    """`path=type` of everything in a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from flat(inner, f"{at}[]")
    else:
        yield f"{at}={'null' if value is None else '[]' if value == [] else type(value).__name__}"


def chunks(stream: bytes) -> dict[str, set[str]]:
    """The fields of a stream, by what a chunk is for."""
    found: dict[str, set[str]] = {}
    for frame in stream.split(b"\n\n"):
        if frame.startswith(b"data: {"):
            chunk = orjson.loads(frame.removeprefix(b"data: "))
            choice = chunk["choices"][0] if chunk["choices"] else {"usage": True}
            kind = "usage" if "usage" in choice else "head" if "role" in choice.get("delta", {}) else "piece"
            found.setdefault("end" if choice.get("finish_reason") else kind, set()).update(flat(chunk))
    return found


def missing(theirs: str, ours: set[str]) -> set[str]:
    """Paths of theirs that ours does not have, or has with another type; null may be anything."""
    paths = {field.partition("=")[0] for field in ours}
    wanted = set(theirs.split()) - ours - DIFFERENT
    return {path for path, _, kind in (field.partition("=") for field in wanted) if kind != "null" or path not in paths}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(model, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") as asking:
        yield asking


async def asked(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> bytes:
    url, gets = str(client.base_url).removesuffix("/v1/") + path, path in ("/v1/models", "/load")
    return (await (client._client.get(url) if gets else client._client.post(url, json=body))).content


async def test_our_answers_have_vllms_fields(client: openai.AsyncOpenAI) -> None:
    left_out: set[str] = set()
    for name, (path, body, theirs) in ANSWERS.items():
        ours = set(flat(orjson.loads(await asked(client, path, body))))
        assert ("error.message=str" in ours) == name.startswith("error"), ours
        gone = missing(theirs, ours)
        assert gone <= set(LEFT_OUT), name
        left_out |= gone
    for name, (path, body, kinds) in STREAMS.items():
        parts = chunks(await asked(client, path, body | {"max_tokens": 30, "stream": True, "logit_bias": {"66": 100}}))
        assert set(parts) == set(kinds), name
        for kind, theirs in kinds.items():
            gone = {path if path in LEFT_OUT else f"{kind}: {path}" for path in missing(theirs, parts[kind])}
            assert gone <= set(LEFT_OUT), name
            left_out |= gone
    assert left_out == set(LEFT_OUT), "a field that is listed as left out is there"


@pytest.mark.skipif(not CAPTURES.exists(), reason="no recorded answers beside the checkout")
def test_the_table_is_what_vllm_answered() -> None:
    for name, (_, _, theirs) in ANSWERS.items():
        capture = orjson.loads((CAPTURES / f"{name}.json").read_bytes())
        assert set(flat(capture["response"])) == set(theirs.split()), name
    for name, (_, _, kinds) in STREAMS.items():
        recorded = chunks((CAPTURES / f"{name}.sse").read_bytes())
        assert recorded == {kind: set(theirs.split()) for kind, theirs in kinds.items()}, name
