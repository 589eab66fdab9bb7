"""Bodies of OpenAI's Responses API in, checked `GenerationRequest`s out.

A replica stores nothing: each request brings its whole input, and references to stored state are refused, as by vLLM with
its store off; `store` is accepted and has no effect. A gateway can keep the state. A known field without support
(`reasoning`, `include`, `text.verbosity`, ...) is no error: it is listed in the header `x-warmroute-ignored`, as are tools
that are not functions, and the list of tools in a `tool_choice`. `cache_salt`, `cache_retention`, `seed`, `top_k` and
`ignore_eos` are as in chats.
"""

from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from replica.api.completions.response_format import ANY_OBJECT, json_grammar, refuse_constraints
from replica.api.generation import CacheSalt, GenerationRequest, OutputOptions, RetentionFields
from replica.api.prompts import RequestPrompt, Truncation
from replica.api.responses.answer import ResponseAnswer
from replica.api.responses.conversation import conversation
from replica.api.tools import Choice, Function, ToolUse, function_tool, tool_use
from replica.api.validation import ApiError, Flag, check_model, checked, ignored_fields, json_text, read_object
from replica.cache.prefix import Scope
from replica.engine import Grammar, SamplingOptions

_FORMATS = "'text', 'json_object' or 'json_schema'"
_CHOICES = "'auto', 'none', 'required' or {'type': 'function', 'name': ...}"
MAX_REPEATED = 1 << 20  # characters of a field
_STATE = "This replica stores no responses: send the whole input, or ask a gateway that keeps them."


Text = Annotated[str, Meta(min_length=1)]
Items = Annotated[list[Any], Meta(min_length=1)]


class TextFormat(Struct, kw_only=True):
    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description=_FORMATS)]
    schema: Annotated[dict[str, Any], Meta(description="a JSON schema (an object)")] | None = None


class TextFields(Struct, kw_only=True):
    format: Annotated[TextFormat, Meta(description="an object with a type")] | None = None


class NamedFunction(Struct, kw_only=True):
    type: Annotated[str, Meta(description="a string")]
    name: Annotated[str, Meta(description="a string")] | None = None
    mode: Any = None
    tools: Any = None


class ResponsesPromptFields(Struct, kw_only=True):
    """The fields that the prompt is made from: input_tokens reads only these."""

    model: Any = None
    input: Annotated[Text | Items, Meta(description="a string or a list of items, not empty")]
    instructions: Annotated[str, Meta(description="a string")] | None = None
    tools: Annotated[list[Any], Meta(description="a list")] | None = None
    tool_choice: Annotated[Literal["auto", "none", "required"] | NamedFunction, Meta(description=_CHOICES)] | None = None
    truncation: Annotated[Truncation, Meta(description="'auto' (drop the oldest turns if needed) or 'disabled'")] | None = None
    previous_response_id: Annotated[str, Meta(description="a string")] | None = None
    conversation: Any = None


class ResponsesFields(ResponsesPromptFields, kw_only=True):
    stream: Flag | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, description="an integer of at least 1")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0, up to 1")] | None = None
    text: Annotated[TextFields, Meta(description="an object such as {'format': {'type': 'text'}}")] | None = None
    metadata: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    store: Flag | None = None
    background: Flag | None = None
    prompt: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    top_k: Annotated[int, Meta(ge=-1, description="an integer: at least 1, or 0 or -1 for all tokens")] | None = None
    seed: Annotated[int, Meta(description="an integer")] | None = None
    ignore_eos: Flag | None = None
    cache_salt: CacheSalt | None = None


SUPPORTED = frozenset([*ResponsesFields.__struct_fields__, *RetentionFields.__struct_fields__])


def parse_responses(raw: bytes, model: str) -> GenerationRequest:
    """Check one body; `model` is the only name that is served. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    refuse_constraints(body)
    fields = checked(body, ResponsesFields)
    for name, value in (("background", fields.background), ("prompt", fields.prompt)):
        if value:
            raise ApiError(400, f"{name} is not supported: leave it out. {_STATE}", name)
    tools, echo = _tool_use(fields), _echo(fields, body)
    return GenerationRequest(
        prompts=[_prompt(fields)],
        n=1,
        max_tokens=fields.max_output_tokens,
        sampling=_sampling(fields, tools),
        stops=(),
        output=OutputOptions(stream=bool(fields.stream)),
        encoder=partial(ResponseAnswer, echo, tools=tools.read),
        scope=Scope(salt=fields.cache_salt),
        keep_s=checked(body, RetentionFields).keep_s,
        needs_scores=("top_k",) if fields.top_k and fields.top_k > 0 else (),
        ignored=(*ignored_fields(body, SUPPORTED), *_ignored_within(body, fields)),
        limit_field="max_output_tokens",
        format_field="text.format",
        repeated=sum(len(json_text(value, name)) for name, value in echo.items()),
    )


def parse_count(raw: bytes, model: str) -> RequestPrompt:
    """A body of input_tokens. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    fields = checked(body, ResponsesPromptFields)
    _tool_use(fields)
    return _prompt(fields)


def no_such_response(name: str, param: str = "response_id") -> ApiError:
    """The error for the id of a stored response: a replica stores none."""
    return ApiError(404, f"Response with id '{name[:128]}' not found. {_STATE}", param, "response_not_found")


def _prompt(fields: ResponsesPromptFields) -> RequestPrompt:
    if fields.previous_response_id is not None:
        raise no_such_response(fields.previous_response_id, "previous_response_id")
    if fields.conversation is not None:
        raise ApiError(404, f"This conversation was not found. {_STATE}", "conversation", "conversation_not_found")
    messages = conversation(fields.instructions, fields.input)
    if not messages:
        raise ApiError(400, "input must have at least one message.", "input")
    tools = [function_tool(one["name"], one.get("description"), one.get("parameters")) for one in _functions(fields)]
    return RequestPrompt(messages=messages, param="input", tools=tools or None, truncation=fields.truncation or "disabled")


def _functions(fields: ResponsesPromptFields) -> list[dict[str, Any]]:
    """The tools that are functions. Raises ApiError."""
    found = []
    for at, tool in enumerate(fields.tools or []):
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise ApiError(400, f"tools[{at}] must be an object with a type (a string).", f"tools[{at}]")
        if tool["type"] != "function":
            continue
        for name, kind in (("name", str), ("description", str | None), ("parameters", dict | None)):
            if not isinstance(tool.get(name), kind):
                raise ApiError(400, f"tools[{at}].{name} is missing or has the wrong type.", f"tools[{at}].{name}")
        found.append(tool)
    return found


def _ignored_within(body: dict[str, Any], fields: ResponsesFields) -> tuple[str, ...]:
    """The names of the unsupported parts of supported fields."""
    kinds = {tool["type"] for tool in fields.tools or []} - {"function"}
    inner: dict[str, Any] = {f"tools.{kind}": True for kind in kinds}
    inner |= {f"text.{name}": value for name, value in (body.get("text") or {}).items() if name != "format"}
    if isinstance(fields.tool_choice, NamedFunction):
        inner["tool_choice.tools"] = fields.tool_choice.tools
    return ignored_fields(inner, frozenset())


def _tool_use(fields: ResponsesPromptFields) -> ToolUse:
    functions = [Function(tool["name"], tool.get("parameters")) for tool in _functions(fields)]
    wanted = fields.tool_choice
    if not isinstance(wanted, NamedFunction):
        return tool_use(functions, wanted or "auto")
    if wanted.type == "allowed_tools":
        choice: Choice = "required" if wanted.mode == "required" else "auto"
        return tool_use(functions, choice)
    if wanted.type != "function" or wanted.name is None:
        raise ApiError(400, f"tool_choice must be {_CHOICES}.", "tool_choice")
    return tool_use(functions, "required", wanted.name)


def _sampling(fields: ResponsesFields, tools: ToolUse) -> SamplingOptions:
    grammar = _format(fields)
    if grammar and tools.forced:
        raise ApiError(400, "text.format cannot be combined with a tool_choice that forces a call.", "text.format")
    if (grammar or tools.forced) and fields.ignore_eos:
        raise ApiError(400, "The format decides where the answer ends: leave out ignore_eos.", "ignore_eos")
    return SamplingOptions(
        temperature=fields.temperature or 0.0,
        top_p=fields.top_p or 1.0,
        top_k=max(0, fields.top_k or 0),
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        grammar=tools.forced or grammar,
    )


def _format(fields: ResponsesFields) -> Grammar | None:
    wanted = fields.text.format if fields.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json", ANY_OBJECT)
    if wanted.schema is None:
        raise ApiError(400, "text.format.schema must be a JSON schema (an object).", "text.format.schema")
    return json_grammar(wanted.schema, "text.format.schema")


def _echo(fields: ResponsesFields, body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a response that repeat the request. Raises ApiError if they are too long: three events of a stream have
    them. (Instructions have the bounds of the prompt.)"""
    for name in ("metadata", "text", "tools", "tool_choice"):
        length = len(json_text(body.get(name), name))
        if length > MAX_REPEATED:
            raise ApiError(400, f"{name} has {length:,} characters; at most {MAX_REPEATED:,} are repeated in an answer.", name)
    return {
        "instructions": fields.instructions,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": True,
        "temperature": fields.temperature or 0.0,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": fields.tools or [],
        "top_p": fields.top_p or 1.0,
        "background": False,
        "max_output_tokens": fields.max_output_tokens,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "truncation": fields.truncation or "disabled",
    }
