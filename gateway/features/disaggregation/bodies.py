"""The bodies of the two legs, as bytes: pure.

Sources: vLLM 0.32, the module `distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler` and its proxies; SGLang's
`mini_lb`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.dialects.dialect import Answers
from gateway.dialects.json_edits import Members, apply, read_object
from gateway.dialects.usage import token_count
from gateway.errors import ReplicaFailure

PARAMS: Final = "kv_transfer_params"
ASKED: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'
MAX_ROOM: Final = (1 << 63) - 1
_NULL: Final = b"null"
# vLLM's scheduler fails an assertion without the blocks, and may wait for ever without one of the others.
_NEEDED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_CACHED: Final = "remote_prefill_cached_tokens"
# The limit of the answer's length on the paths that generate; where two are possible, the client decides by using one.
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def prefill_body(members: Members, path: str) -> bytes:
    """The body of the prefill leg (vLLM): not streamed, one token, and the wish for transfer parameters. path: of the
    request.
    """
    spans, edits = members.spans, dict[str, bytes]()
    if "stream" in spans:
        edits["stream"] = b"false"
    if "stream_options" in spans:
        edits["stream_options"] = _NULL
    if "min_tokens" in spans:
        edits["min_tokens"] = b"0"
    used = [name for name in _LIMITS if name in spans and not _is_null(members.raw, *spans[name])]
    default = "max_output_tokens" if path.partition("?")[0].endswith("/responses") else "max_tokens"
    edits[used[0] if used else default] = b"1"
    for other in used[1:]:
        edits[other] = b"1"
    edits[PARAMS] = ASKED
    return apply(members.raw, members.put_all(edits))


def _is_null(raw: bytes, begin: int, end: int) -> bool:
    return raw[begin:end] == _NULL


def decode_body(members: Members, params: bytes) -> bytes:
    """The body of the decode leg (vLLM). params: as the prefiller has written them, whole."""
    return apply(members.raw, [members.put(PARAMS, params)])


def batch_size(members: Members) -> int:
    """The number of prompts in a batch of completions; 0: the body has one prompt, and no list of them."""
    start, end = members.spans.get("prompt", (0, 0))
    prompt = orjson.loads(members.raw[start:end]) if members.raw[start : start + 1] == b"[" else None
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 0


def bootstrap_body(members: Members, host: str, port: int, rooms: int | Sequence[int]) -> bytes:
    """The body of both legs (SGLang). rooms: one for each prompt of a batch."""
    values: Mapping[str, Any] = {
        "bootstrap_host": host if isinstance(rooms, int) else [host] * len(rooms),
        "bootstrap_port": port if isinstance(rooms, int) else [port] * len(rooms),
        "bootstrap_room": rooms,
    }
    edits = members.put_all({name: orjson.dumps(value) for name, value in values.items()})
    return apply(members.raw, edits)


class PrefillAnswer:
    """The answer of a prefiller (vLLM). params: for the decoder, b"" if there are none that it can use. prompt, cached: its
    counts, None without a report.
    """

    __slots__ = ("cached", "params", "prompt")

    def __init__(self, params: bytes, prompt: int | None, cached: int | None) -> None:
        self.params = params
        self.prompt = prompt
        self.cached = cached


def read_answer(body: bytes, answers: Answers) -> PrefillAnswer:
    """Read the whole answer of a prefiller. answers: reads its usage. Raises ReplicaFailure for an answer that no engine gives.
    O(length).
    """
    usage = answers.usage_of(body)
    try:
        members = read_object(body)
        start, end = members.spans.get(PARAMS, (0, 0))
        params = orjson.loads(body[start:end]) if end else None
    except ValueError as error:
        raise ReplicaFailure("garbage", "its answer is no JSON object") from error
    prompt, cached = (usage.prompt, usage.cached) if usage is not None else (None, None)
    if not isinstance(params, dict) or (params.get("do_remote_prefill") and not all(params.get(name) for name in _NEEDED)):
        return PrefillAnswer(b"", prompt, cached)
    told = token_count(params.get(_CACHED))
    if told is not None and (prompt is None or told <= prompt):
        cached = told
    return PrefillAnswer(body[start:end], prompt, cached)
