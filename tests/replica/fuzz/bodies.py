"""Random requests: a path and a body, by shape and size. Each is made from a `Random` alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final, NamedTuple

from replica.api.completions.requests import SUPPORTED
from replica.api.messages.requests import SUPPORTED as MESSAGES
from replica.api.responses.requests import SUPPORTED as RESPONSES
from scripts.fuzzing.bodies import BROKEN, VALUES

LARGEST: Final = 17 << 20
LONGEST_ANSWER: Final = 98_000  # tokens; the simulated engine has a context of 100,000
LONG_S: Final = 3.0  # of a long answer that is read
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
FIELDS: Final[Mapping[str, frozenset[str]]] = {
    CHAT: SUPPORTED["chat"],
    COMPLETION: SUPPORTED["completion"],
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/tokenize": frozenset(["prompt", "messages", "add_special_tokens", "return_token_strs"]),
    "/detokenize": frozenset(["tokens"]),
}
SMALL: Final[list[Any]] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e-30, 1e300, 1 << 62, "", "x", "\x00", "\U0010ffff", "auto", "required"),
    *([], [None], [[]], [0], [-1], ["a", 1], {}, {"": ""}, {"1": 100}, {"type": "json_object"}, {"type": "object"}),
]


class Sent(NamedTuple):
    """A request. kind: of which outcomes are counted. leave_s: the client stays no longer, None: until the end."""

    kind: str
    path: str
    body: bytes
    leave_s: float | None = None


def request(chance: Random) -> Sent:
    kind = chance.choice(list(KINDS))
    path, body = KINDS[kind](chance, size(chance))
    if isinstance(body, dict):
        if chance.random() < 0.4 and path not in ("/tokenize", "/detokenize"):
            body["stream"] = True
        body = json.dumps(body).encode()
    return Sent(kind, path, body[:LARGEST], LONG_S if kind == "long" else None)


def size(chance: Random) -> int:
    """Bytes; of few digits as often as of many, up to a little more than what is accepted."""
    return int(10 ** chance.uniform(0, 7.23))


def good(path: str, chance: Random) -> dict[str, Any]:
    """A body that is served."""
    text = chance.choice(["Hi", "Tell me a story about a lake.", "word " * chance.randrange(1, 200)])
    turn = [{"role": "user", "content": text}]
    tokens = chance.choice([1, 2, 8])
    return {
        CHAT: {"messages": turn, "max_tokens": tokens},
        COMPLETION: {"prompt": text, "max_tokens": tokens},
        "/v1/messages": {"messages": turn, "max_tokens": tokens},
        "/v1/messages/count_tokens": {"messages": turn},
        "/v1/responses": {"input": text, "max_output_tokens": tokens},
        "/v1/responses/input_tokens": {"input": text},
        "/tokenize": {"prompt": text},
        "/detokenize": {"tokens": [1, 2, 3]},
    }[path]


def any_path(chance: Random) -> str:
    return chance.choice(list(FIELDS))


def text(chance: Random, length: int) -> str:
    once = chance.choice(["a", "word ", "é", "\U0001f600", "\n", '"', "\\", "a b\n", "<|user|>", "0", " ", "[", "x" * 50 + " "])
    return once * (length // len(once) + 1)


# -- kinds of requests


def _plain(chance: Random, _: int) -> tuple[str, dict[str, Any]]:
    path = any_path(chance)
    return path, good(path, chance)


def _field(chance: Random, length: int) -> tuple[str, bytes]:
    """One field of any shape and size, which the API knows or not."""
    path = any_path(chance)
    name = chance.choice([*sorted(FIELDS[path]), "unknown"])
    shape = chance.choice(list(VALUES))
    value = VALUES[shape](length, chance.choice([1, 2, 20, 66]), chance) if chance.random() < 0.6 else None
    head = json.dumps(good(path, chance)).encode()[:-1]
    return path, head + b',"' + name.encode() + b'":' + (value or json.dumps(chance.choice(SMALL)).encode()) + b"}"


def _several(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    path = any_path(chance)
    names = chance.sample(sorted(FIELDS[path]), min(3, len(FIELDS[path])))
    small = [*SMALL, text(chance, length % 1000)]
    return path, good(path, chance) | {name: chance.choice(small) for name in names}


def _broken(chance: Random, length: int) -> tuple[str, bytes]:
    return any_path(chance), BROKEN[chance.choice(list(BROKEN))](length)


def _prompt(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    prompts: list[Any] = [
        text(chance, length),
        [chance.randrange(256) for _ in range(min(length, 9_000))],
        [7] * (length // 2),
        [text(chance, 3)] * (length // 8),
        [[1]] * (length // 4),
        [text(chance, length // 64)] * 64,
    ]
    limit = {"max_tokens": chance.choice([1, 4, 100_000])}
    return COMPLETION, {"prompt": chance.choice(prompts), **limit, "echo": chance.random() < 0.3}


def _turns(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    long, few = text(chance, length), text(chance, length % 50)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": few})}}
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": long}],
        [{"role": "user", "content": few}, {"role": "assistant", "content": few}] * (length // 60)
        + [{"role": "user", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": few}] * (length // 40)}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call] * (length // 90)}],
        [{"role": "system", "content": long}, {"role": "user", "content": "x", "extra": {"a": [long]}}],
        [{"role": text(chance, length % 40), "content": few}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": long, "content": few}]}],
    ]
    path = chance.choice([CHAT, "/v1/messages", "/tokenize", "/v1/messages/count_tokens"])
    return path, {"messages": chance.choice(turns), "max_tokens": 1, "truncation": chance.choice(["auto", "disabled"])}


def _tools(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    schema = _schema(chance, length)
    function = {"name": "f", "description": text(chance, length % 300), "parameters": schema}
    most = max(1, LARGEST // len(json.dumps(function)))
    count = min(most, chance.choice([1, 1, 3, max(1, length // 200)]))
    tools: dict[str, list[Any]] = {
        CHAT: [{"type": "function", "function": function}] * count,
        "/v1/messages": [{"name": "f", "input_schema": schema}] * count,
        "/v1/responses": [{"type": "function", **function}] * count,
    }
    path = chance.choice(list(tools))
    choice = chance.choice(["auto", "none", "required"])
    if path == "/v1/messages":
        return path, good(path, chance) | {"tools": tools[path][:100], "tool_choice": {"type": chance.choice(["any", "auto"])}}
    return path, good(path, chance) | {"tools": tools[path], "tool_choice": choice}


def _schema(chance: Random, length: int) -> dict[str, Any]:
    number, deep = length // 40, min(length // 30, 400)
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(deep):
        nested = chance.choice(
            [
                {"type": "object", "properties": {"a": nested}, "required": ["a"]},
                {"anyOf": [nested, {"type": "null"}]},
                {"items": nested},
            ]
        )
    chain = {f"a{at}": {"items": {"$ref": f"#/$defs/a{at + 1}"}} for at in range(number)} | {f"a{number}": {}}
    pattern = {"type": "string", "pattern": "[a-z]{1,50}"}
    return chance.choice(
        [
            {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(number)}},
            {"type": "object", "properties": {f"p{at}": pattern for at in range(number)}, "required": ["p0"]},
            {"enum": [f"value {at}" for at in range(number)]},
            {"$ref": "#/$defs/a0", "$defs": chain},
            {"allOf": [{"anyOf": [{"properties": {f"{one}{at}": {}}} for one in "ab"]} for at in range(number % 30)]},
            {"type": "array", "items": pattern, "minItems": length, "maxItems": 2 * length},
            {"type": "string", "maxLength": length, "minLength": length // 2},
            {"const": text(chance, length)},
            nested,
        ]
    )


def _regex(chance: Random, length: int) -> str:
    few = length % 1000
    return chance.choice(
        [
            "(" * length + "a" + ")" * length,
            "|".join(f"x{at}" for at in range(length // 5)),
            f"(a{{1,{few}}}b){{1,{few}}}",
            "(.*a){50}x{" + str(few) + "}",
            r"(\p{L}|\p{N}|\p{S}){10," + str(length) + "}",
            "(a*)*b" * (length // 6),
            text(chance, length),
        ]
    )


def _grammar(chance: Random, length: int) -> str:
    number = length // 12
    names = chance.choice(["r", "T"])
    chain = "".join(f'\n{names}{at}: "a" {names}{at + 1}' for at in range(number))
    return chance.choice(
        [
            f'start: {names}0{chain}\n{names}{number}: "b"',
            "start: " + "(" * length + '"a"' + ")" * length,
            "root ::= " + "(" * length + '"a"' + ")" * length,
            "root ::= " + " | ".join(f'"a{at}"' for at in range(number)),
            'start: start start | "a" |',
            'start: "a"{1,' + str(length) + "}",
            "start: /" + _regex(chance, length % 3000).replace("/", "") + "/",
            "start: %json " + json.dumps(_schema(chance, length % 20_000)),
            text(chance, length),
        ]
    )


def _format(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    schema, regex, grammar = _schema(chance, length), _regex(chance, length), _grammar(chance, length)
    choice = chance.choice([[f"choice {at}" for at in range(length // 14 + 1)], [text(chance, length)]])
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields: list[dict[str, Any]] = [
        *({"guided_json": schema}, {"guided_regex": regex}, {"guided_grammar": grammar}, {"guided_choice": choice}),
        *({"structured_outputs": {"grammar": grammar}}, {"response_format": form}),
    ]
    return CHAT, good(CHAT, chance) | chance.choice(fields) | {"max_tokens": 8, "temperature": chance.choice([0, 1])}


def _sampled(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    """Each limit of the sampling fields, alone and together."""
    extra: list[dict[str, Any]] = [
        {"n": 128},
        {"logprobs": 20, "n": 16},
        {"logit_bias": {str(at): 1 for at in range(min(4096, length))}},
        {"bad_words": [f"word {at}" for at in range(min(1100, length))]},
        {"allowed_token_ids": [at % 300 for at in range(min(262_150, length))]},
        {"stop": [text(chance, length // 16) + str(at) for at in range(16)]},
        {"stop_token_ids": list(range(min(1030, length)))},
        {"repetition_penalty": 1.3, "presence_penalty": 1, "n": 8},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": length},
        {"min_tokens": 4, "ignore_eos": True},
        {"cache_salt": text(chance, length)[:1100]},
    ]
    body: dict[str, Any] = {"prompt": text(chance, min(length, 3_000)), "max_tokens": 4, "temperature": 1.0}
    for chosen in chance.sample(extra, chance.choice([1, 1, 2, 3])):
        body |= chosen
    return COMPLETION, body


def _long(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    """Answers of up to the whole context, and up to 128 of them, that do not end by themselves before."""
    path, tokens = chance.choice([CHAT, COMPLETION, "/v1/messages", "/v1/responses"]), min(length, LONGEST_ANSWER)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = good(path, chance) | {limit: tokens, "ignore_eos": True}
    if path in (CHAT, COMPLETION):
        body |= {"n": chance.choice([1, 8, 128]), "temperature": 1.0}
        body |= chance.choice([{}, {"ignore_eos": False, "min_tokens": tokens}])
    return path, body


def _spelled(chance: Random, length: int) -> tuple[str, dict[str, Any]]:
    path = chance.choice(["/tokenize", "/detokenize"])
    if path == "/tokenize":
        return path, {"prompt": text(chance, length), "return_token_strs": chance.random() < 0.5}
    return path, {"tokens": [chance.randrange(300)] * (length // 3)}


KINDS: Final[Mapping[str, Callable[[Random, int], tuple[str, dict[str, Any] | bytes]]]] = {
    "plain": _plain,
    "field": _field,
    "fields": _several,
    "broken": _broken,
    "prompt": _prompt,
    "turns": _turns,
    "tools": _tools,
    "format": _format,
    "sampled": _sampled,
    "long": _long,
    "spelled": _spelled,
}
