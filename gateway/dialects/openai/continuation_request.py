"""The request for the rest of a broken answer, and the rules for requests that cannot be continued.

The next replica gets the same request with the text so far as the beginning of the answer: as an open assistant message
(`continue_final_message`), or as the end of the prompt. Token limits are lowered by the tokens generated so far. Only these
values change in the body; every other byte is the client's.

No continuation is requested if it would be wrong, because a field of the request

- asks for more than one plain text: tool calls, log probabilities, token ids, several choices;
- makes the engine keep state over the answer, which a continuation would reset: a grammar or schema for the whole answer,
  penalties that count generated tokens only, logits processors;
- gives the engine another prompt than messages and text: token ids, embeddings, a prompt that it cuts;
- limits the answer in a way that cannot be lowered here: a limit that is no integer, or has an unknown name.

Pure: bytes in, edits out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.dialect import ASK, COMPLETE, IMPOSSIBLE
from gateway.dialects.json_edits import Edit, Members, append_element, append_text, read_list, read_object
from gateway.dialects.openai.request import CHAT

_LIMITS: Final = ("max_tokens", "max_completion_tokens")

# Fields that exclude a continuation unless their value is null, false, zero or empty.
_EXCLUDED: Final = frozenset(
    [
        # More than one text.
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "web_search_options",
        "audio",
        "logprobs",
        "top_logprobs",
        "n_probs",
        "echo",
        "suffix",
        "timings_per_token",
        "use_beam_search",
        # The form of the whole answer (OpenAI; vLLM; SGLang; llama.cpp, TGI, Ollama).
        "response_format",
        "structured_outputs",
        "structural_tag",
        "regex",
        "ebnf",
        "json_schema",
        "grammar",
        "format",
        # State that grows with the generated tokens.
        "presence_penalty",
        "frequency_penalty",
        "mirostat",
        "bad_words",
        "logits_processors",
        "custom_logit_processor",
        "vllm_xargs",
        "repetition_detection",
        # Another prompt, or a place where it was prefilled.
        "input_ids",
        "input_embeds",
        "token_ids",
        "task",
        "session_params",
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        # Nested parameters, limits among them.
        "sampling_params",
        "options",
    ]
)
_EXCLUDED_PREFIXES: Final = ("guided_", "return_")
# Fields that exclude a continuation unless they have one of these values.
_ALLOWED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "n_cmpl": (None, 1),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None, False),
    "repetition_penalty": (None, 1),  # some engines include the prompt's tokens, some only count generated ones
    "stream_interval": (None, 1),  # tokens per event: the number of generated tokens would be unknown
    "include_reasoning": (None, True),  # hidden reasoning is not in the text so far, but was counted
    "separate_reasoning": (None, True),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation": (None, "disabled"),
    "prompt_embeds": (None,),
    "bootstrap_room": (None,),
    "n_predict": (None,),
    "num_predict": (None,),
    "max_new_tokens": (None,),
    "min_new_tokens": (None,),
    "max_output_tokens": (None,),
    "max_length": (None,),
    "min_length": (None,),
    "t_max_predict_ms": (None,),
}


def continue_body(kind: str, body: bytes, text: str, tokens: int) -> tuple[str, list[Edit]]:
    """The edits of a request that ask for the rest of its answer: (IMPOSSIBLE, COMPLETE or ASK, the edits)."""
    request = orjson.loads(body)
    if _is_excluded(request):
        return IMPOSSIBLE, []
    if not text:
        return ASK, []
    left = _left(request, tokens)
    if left is None:
        return IMPOSSIBLE, []
    if left and max(left.values()) <= 0:
        return COMPLETE, []
    members = read_object(body)
    edits = _open_message(request, members, text) if kind == CHAT else _longer_prompt(request, members, text)
    if edits is None or (left and min(left.values()) <= 0):  # with two limits, it is unknown which one the engine obeys
        return IMPOSSIBLE, []
    least = request.get("min_tokens")
    if least is not None:
        if type(least) is not int:
            return IMPOSSIBLE, []
        left["min_tokens"] = max(0, least - tokens)
    edits += [members.put(name, b"%d" % value) for name, value in left.items()]
    return ASK, edits


def _is_excluded(request: Mapping[str, Any]) -> bool:
    """True if a field makes a continuation wrong."""
    for name, value in request.items():
        if value and (name in _EXCLUDED or name.startswith(_EXCLUDED_PREFIXES)):
            return True
        if name in _ALLOWED and value not in _ALLOWED[name]:
            return True
    return False


def _left(request: Mapping[str, Any], tokens: int) -> dict[str, int] | None:
    """The rest of each limit after this many generated tokens; None if one is no positive integer."""
    left = dict[str, int]()
    for name in _LIMITS:
        limit = request.get(name)
        if limit is None:
            continue
        if type(limit) is not int or limit < 1:
            return None
        left[name] = limit - tokens
    return left


def _open_message(request: Mapping[str, Any], members: Members, text: str) -> list[Edit] | None:
    """The edits for a chat: the text becomes an open assistant message."""
    raw, start = members.raw, members.spans["messages"][0]
    no_new_message = members.put("add_generation_prompt", b"false")
    if not (goes_on := request.get("continue_final_message")):
        if request.get("add_generation_prompt") not in (None, True):
            return None  # the text would not become a message
        message = orjson.dumps({"role": "assistant", "content": text})
        return [append_element(raw, start, message), no_new_message, members.put("continue_final_message", b"true")]
    if goes_on in (True, "content") and isinstance(request["messages"][-1].get("content"), str):
        last = read_object(raw, read_list(raw, start)[0][-1][0])
        return [append_text(raw, last.spans["content"][1], text), no_new_message]
    return None


def _longer_prompt(request: Mapping[str, Any], members: Members, text: str) -> list[Edit] | None:
    """The edits for a completion: the text becomes the end of its prompt. Without a limit, the engine's default is unknown:
    None.
    """
    if not isinstance(request["prompt"], str) or request.get("max_tokens") is None:
        return None
    return [append_text(members.raw, members.spans["prompt"][1], text)]
