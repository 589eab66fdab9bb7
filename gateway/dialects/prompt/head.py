"""The fields of a body, beside turns and prompt, that change the prompt from its first token on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import xxhash

from gateway.dialects.prompt.canonical import HEAD, to_json

# The fields of a body that stand in the head of its prompt, in this order: fields that chat templates print or read, then
# fields that change how a template is applied or cut the result, then fields that select another cache (a slot, a rank), a
# part of it or none. A name that
# only some engines read costs, on the other engines, a match between a request with it and one without.  `tool_choice` is left
# out, because it only changes decoding: vLLM, llama.cpp and `warmroute replica` print the same tools for every choice, so a
# choice that changes in mid-conversation changes no key. (SGLang prints no tools for "none" and one for a named tool, vLLM with
# --exclude-tools-when-tool-choice-none none for "none": there such a request finds less in the cache than predicted.) Only a
# list of allowed tools counts: translation leaves the other tools out.
_KEYS: Final = (
    "tools",
    "functions",
    "tool_choice",
    "documents",
    "system",
    "instructions",
    "previous_response_id",
    "conversation",
    "reasoning_effort",
    "thinking",
    "enable_thinking",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "truncation",
    "suffix",
    "input_ids",
    "prompt_embeds",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "lora",
    "lora_path",
    "extra_key",
    "id_slot",
    "slot_id",
    "data_parallel_rank",
    "routed_dp_rank",
    "session_params",
    "kv_transfer_params",
    "cache_prompt",
    "n_cache_reuse",
    "n_keep",
    "logprob_start_len",
    "prompt_logprobs",
    "echo",
)
_LONGEST: Final = 64  # bytes of a value, except of tools
_LETTERS: Final = bytes.maketrans(b"0123456789", b"ghijklmnop")  # a digest with digits would be a volatile text to the doctor
_IN_HEAD: Final = frozenset(_KEYS)
_BY_LENGTH: Final = tuple(sorted((key.encode() for key in _KEYS), key=len, reverse=True))  # a name may begin another one
_ALLOWED_TOOLS: Final = "allowed_tools"
# Default values of engines.
_USUAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "functions": ([],),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncation": ("disabled",),
    "id_slot": (-1,),
    "slot_id": (-1,),
    "cache_prompt": (True,),
    "n_cache_reuse": (0,),
    "n_keep": (0,),
    "logprob_start_len": (-1,),
    "echo": (False,),
}


def head_parts(body: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> list[bytes]:
    """The parts of the head. other: fields as OpenAI's chat would write them, which replace the body's own; a value None omits
    the field.
    """
    keys = _IN_HEAD.intersection(body)
    if other:
        keys = keys.union(other)
    if not keys:
        return []
    parts = list[bytes]()
    for key in _KEYS:
        if key not in keys:
            continue
        value = other[key] if other and key in other else body[key]
        if value is None or value in _USUAL.get(key, ()) or (key == "tool_choice" and not _limits_tools(value)):
            continue
        parts.append(HEAD + key.encode() + (to_json(value) if key == "tools" else _short(to_json(value))))
    return parts


def _short(value: bytes) -> bytes:
    """A long value as its digest, in JSON: few templates print it, or none."""
    return value if len(value) <= _LONGEST else b'"%b"' % xxhash.xxh3_128_hexdigest(value).encode().translate(_LETTERS)


def _limits_tools(choice: Any) -> bool:
    """True if a tool choice leaves tools out of the list."""
    return isinstance(choice, dict) and choice.get("type") == _ALLOWED_TOOLS


def head_field(part: bytes) -> tuple[str, bytes]:
    """The name of a part of the head, and its value as JSON."""
    for key in _BY_LENGTH:
        if part.startswith(key, len(HEAD)):
            return key.decode(), part[len(HEAD) + len(key) :]
    return "", part


def head_digest(body: Mapping[str, Any]) -> str:
    """A short digest of the head, for prompts without a head of their own; "" if there are no such fields."""
    parts = head_parts(body)
    return short_digest(b"".join(parts)) if parts else ""


def short_digest(data: bytes) -> str:
    """A digest of fixed length that is safe against deliberate collisions."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
