"""The request for the rest of an answer that broke off, and the requests for which there can be none.

The next replica gets the same request with the text so far as the beginning of the answer: as an assistant message that is
still open (`continue_final_message`), or as the end of the prompt. Token limits are lowered by the tokens generated so far.
Only these values are changed in the body; every other byte is the client's.

A continuation would be wrong, so that none is asked for, where a field of the request

- asks for more than one plain text: tool calls, log probabilities, token ids, several choices;
- makes the engine keep state over the answer, which begins anew with the rest: a grammar or schema for the whole answer,
  penalties that count generated tokens only, logits processors;
- makes the engine read another prompt than messages and text: token ids, embeddings, a prompt that it cuts;
- limits the answer in a way that cannot be lowered here: a limit that is no integer, or one with another name.

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

# Fields that exclude a continuation if they have any value but null, false, zero or an empty one.
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
        # A form of the whole answer (OpenAI; vLLM; SGLang; llama.cpp, TGI, Ollama).
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
    "repetition_penalty": (None, 1),  # some engines count the prompt's tokens, too, some only those that were generated
    "stream_interval": (None, 1),  # tokens in an event: how many there were is not known
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
    """What to change in a request so that it asks for the rest of its answer: (IMPOSSIBLE, COMPLETE or ASK, the edits)."""
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
    if edits is None or (left and min(left.values()) <= 0):  # two limits, and which one the engine obeys is not known
        return IMPOSSIBLE, []
    least = request.get("min_tokens")
    if least is not None:
        if type(least) is not int:
            return IMPOSSIBLE, []
        left["min_tokens"] = max(0, least - tokens)
    edits += [members.put(name, b"%d" % value) for name, value in left.items()]
    return ASK, edits


def _is_excluded(request: Mapping[str, Any]) -> bool:
    """Whether a field makes a continuation wrong."""
    for name, value in request.items():
        if value and (name in _EXCLUDED or name.startswith(_EXCLUDED_PREFIXES)):
            return True
        if name in _ALLOWED and value not in _ALLOWED[name]:
            return True
    return False


def _left(request: Mapping[str, Any], tokens: int) -> dict[str, int] | None:
    """What is left of each limit when this many tokens were generated; None if one is no positive integer."""
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
    """A chat, with the text as an assistant's message that is still open."""
    raw, start = members.raw, members.spans["messages"][0]
    no_new_message = members.put("add_generation_prompt", b"false")
    if not (goes_on := request.get("continue_final_message")):
        if request.get("add_generation_prompt") not in (None, True):
            return None  # the text is then no message
        message = orjson.dumps({"role": "assistant", "content": text})
        return [append_element(raw, start, message), no_new_message, members.put("continue_final_message", b"true")]
    if goes_on in (True, "content") and isinstance(request["messages"][-1].get("content"), str):
        last = read_object(raw, read_list(raw, start)[0][-1][0])
        return [append_text(raw, last.spans["content"][1], text), no_new_message]
    return None


def _longer_prompt(request: Mapping[str, Any], members: Members, text: str) -> list[Edit] | None:
    """A completion, with the text as the end of its prompt. Without a limit, how much is left is the engine's secret."""
    if not isinstance(request["prompt"], str) or request.get("max_tokens") is None:
        return None
    return [append_text(members.raw, members.spans["prompt"][1], text)]
