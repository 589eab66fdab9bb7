"""Bodies of Anthropic's Messages API in, checked `GenerationRequest`s out.

A field that is known and not supported (`thinking`, `context_management`, ...) is no error: it is listed for the header
`x-warmroute-ignored`. So are tools that Anthropic's servers would run, and `disable_parallel_tool_use`. `cache_salt`,
`cache_retention`, `seed` and `ignore_eos` are as in chats.
"""

from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from replica.api.completions.response_format import json_grammar, refuse_constraints
from replica.api.generation import (
    MAX_STOP,
    MAX_STOPS,
    RETENTION_S,
    CacheSalt,
    GenerationRequest,
    OutputOptions,
    Retention,
)
from replica.api.messages.answer import MessageAnswer
from replica.api.messages.cache_control import CacheMarks
from replica.api.messages.conversation import Conversation
from replica.api.prompts import RequestPrompt
from replica.api.tools import Choice, Function, ToolUse, function_tool, tool_use
from replica.api.validation import ApiError, Flag, check_model, checked, ignored_fields, read_object
from replica.cache.prefix import Scope
from replica.engine import Grammar, PromptEnd, SamplingOptions

CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]


class ToolChoice(Struct, kw_only=True):
    type: Annotated[Literal["auto", "any", "tool", "none"], Meta(description="'auto', 'any', 'tool' or 'none'")]
    name: Annotated[str, Meta(description="a string")] | None = None
    disable_parallel_tool_use: Flag | None = None


class MessagesPromptFields(Struct, kw_only=True):
    """The fields of the prompt; count_tokens reads only these."""

    model: Any = None
    messages: Annotated[list[Any], Meta(min_length=1, description="a list with at least one message")]
    system: Any = None
    tools: Annotated[list[Any], Meta(description="a list")] | None = None
    tool_choice: Annotated[ToolChoice, Meta(description="an object such as {'type': 'auto'}")] | None = None
    cache_control: Annotated[dict[str, Any], Meta(description="an object such as {'type': 'ephemeral'}")] | None = None


class MessagesFields(MessagesPromptFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0, description="an integer of at least 0")]
    stream: Flag | None = None
    temperature: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0, up to 1")] | None = None
    top_k: Annotated[int, Meta(ge=0, description="an integer of at least 0")] | None = None
    stop_sequences: (
        Annotated[
            list[Stop],
            Meta(max_length=MAX_STOPS, description=f"a list of at most {MAX_STOPS} strings, of 1 to {MAX_STOP} characters"),
        ]
        | None
    ) = None
    metadata: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    output_config: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    seed: Annotated[int, Meta(description="an integer")] | None = None
    ignore_eos: Flag | None = None
    cache_salt: CacheSalt | None = None
    cache_retention: Annotated[Retention, Meta(description="one of '5m', '1h', or left out")] | None = None


SUPPORTED = frozenset(MessagesFields.__struct_fields__)


def parse_messages(raw: bytes, model: str) -> GenerationRequest:
    """Check one body; `model` is the only served name. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    if body.get("max_tokens") is None:
        raise ApiError(400, "max_tokens: Field required", "max_tokens")
    refuse_constraints(body)
    fields = checked(body, MessagesFields)
    own = _own_tools(fields)
    prompt, marks = _prompt(fields, body, own)
    tools = _tool_use(fields, own)
    return GenerationRequest(
        prompts=[prompt],
        n=1,
        max_tokens=fields.max_tokens or 1,  # a prompt is computed together with its first token
        sampling=_sampling(fields, tools),
        stops=tuple(fields.stop_sequences or ()),
        output=OutputOptions(stream=bool(fields.stream)),
        encoder=partial(MessageAnswer, marks, tools=tools.read, silent=fields.max_tokens == 0),
        scope=Scope(salt=fields.cache_salt),
        keep_s=max(marks.keep_s, RETENTION_S[fields.cache_retention] if fields.cache_retention else 0.0),
        needs_scores=("top_k",) if fields.top_k else (),
        ignored=_ignored(body, fields),
        format_field="output_config.format",
    )


def parse_count(raw: bytes, model: str) -> RequestPrompt:
    """A body of count_tokens. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    fields = checked(body, MessagesPromptFields)
    own = _own_tools(fields)
    _tool_use(fields, own)
    return _prompt(fields, body, own)[0]


def _prompt(fields: MessagesPromptFields, body: dict[str, Any], own: list[dict[str, Any]]) -> tuple[RequestPrompt, CacheMarks]:
    conversation = Conversation()
    conversation.tools(fields.tools or [])
    conversation.system(fields.system)
    for at, message in enumerate(fields.messages):
        conversation.turn(message, at)
    cache = conversation.end(body)
    messages = conversation.messages
    if not messages:
        raise ApiError(400, "messages: at least one message with content is required", "messages")
    last = dict(zip(cache.ttls, conversation.marks, strict=True))  # the last mark of each ttl, which includes the earlier ones
    marks = tuple(None if mark == messages else mark for mark in last.values())
    tools = [function_tool(tool["name"], tool.get("description"), tool["input_schema"]) for tool in own]
    end: PromptEnd = "open" if conversation.open else "answer"
    return RequestPrompt(messages=messages, tools=tools or None, end=end, marks=marks), CacheMarks(tuple(last))


def _own_tools(fields: MessagesPromptFields) -> list[dict[str, Any]]:
    """The tools run by the client. Raises ApiError."""
    own = []
    for at, tool in enumerate(fields.tools or []):
        if not isinstance(tool, dict):
            raise ApiError(400, f"tools.{at}: Input should be an object", f"tools.{at}")
        if tool.get("type") not in (None, "custom"):
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise ApiError(400, f"tools.{at}.name: Field required", f"tools.{at}.name")
        if not isinstance(tool.get("input_schema"), dict):
            raise ApiError(400, f"tools.{at}.input_schema: Field required", f"tools.{at}.input_schema")
        if not isinstance(tool.get("description"), str | None):
            raise ApiError(400, f"tools.{at}.description: Input should be a valid string", f"tools.{at}.description")
        own.append(tool)
    return own


def _tool_use(fields: MessagesPromptFields, own: list[dict[str, Any]]) -> ToolUse:
    choice = fields.tool_choice
    if choice is not None and choice.type == "tool" and not choice.name:
        raise ApiError(400, "tool_choice.tool.name: Field required", "tool_choice")
    functions = [Function(tool["name"], tool["input_schema"]) for tool in own]
    named = choice.name if choice is not None and choice.type == "tool" else None
    return tool_use(functions, CHOICES[choice.type] if choice else "auto", named)


def _sampling(fields: MessagesFields, tools: ToolUse) -> SamplingOptions:
    grammar = _format(fields)
    if grammar and tools.forced:
        raise ApiError(400, "output_config.format: cannot be combined with a tool_choice that forces a call", "output_config")
    if (grammar or tools.forced) and fields.ignore_eos:
        raise ApiError(400, "The format decides where the answer ends: leave out ignore_eos.", "ignore_eos")
    return SamplingOptions(
        temperature=fields.temperature or 0.0,
        top_p=fields.top_p or 1.0,
        top_k=fields.top_k or 0,
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        grammar=tools.forced or grammar,
    )


def _format(fields: MessagesFields) -> Grammar | None:
    wanted = (fields.output_config or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        message = "output_config.format: Input should be {'type': 'json_schema', 'schema': {...}}"
        raise ApiError(400, message, "output_config.format")
    return json_grammar(wanted["schema"], "output_config.format.schema")


def _ignored(body: dict[str, Any], fields: MessagesFields) -> tuple[str, ...]:
    output = fields.output_config or {}
    partly = ["output_config"] if any(value is not None for name, value in output.items() if name != "format") else []
    kinds = {tool["type"] for tool in fields.tools or [] if isinstance(tool.get("type"), str)} - {"custom"}
    inner: dict[str, Any] = {f"tools.{kind}": True for kind in kinds}
    if fields.tool_choice is not None:
        inner["tool_choice.disable_parallel_tool_use"] = fields.tool_choice.disable_parallel_tool_use
    return (*ignored_fields(body, SUPPORTED), *partly, *ignored_fields(inner, frozenset()))
