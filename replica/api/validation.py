"""Request bodies as typed values, and errors that name the wrong field and state a valid value.

Theory of operation. A JSON value costs some bytes to send and hundreds to hold: a body of 16 MiB could be four million texts, a
gigabyte and many seconds. So values are counted in the bytes first (`check_size`). Then the body is parsed, by orjson, to a
dict; `checked` converts that dict to a msgspec Struct. The dict stays: the names of fields that were ignored are read from it.
Each field's type carries a `description` (msgspec.Meta) that completes the sentence "FIELD must be ...": if the conversion
fails, the error is made from the description nearest to the failing value. Null is the same as a field that was left out.
"""

import contextlib
import heapq
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
import orjson
from msgspec import Meta

T = TypeVar("T", bound=msgspec.Struct)
Flag = Annotated[bool, Meta(description="true or false")]
TokenIds = Annotated[list[int], Meta(description="a list of token ids (integers)")]
MAX_IGNORED = 20  # field names in the header; a body may have thousands
MAX_SHOWN = 200  # characters of a value in an error
MAX_VALUES = 1 << 19  # in a body: the token ids of several long prompts
MAX_CONTAINERS = 1 << 16  # lists and objects among the values: the garbage collector stops all threads to traverse each
PART = 1 << 16  # bytes
MAX_NESTING = 250  # levels of JSON; answers have a request's values a little deeper inside
_DEEPER = 4  # lists around a value: orjson writes 254 levels
_inspected = set[type]()
_looking = threading.Lock()
# Values of fields that request only the default behaviour: the defaults of OpenAI's, Anthropic's and vLLM's APIs.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("echo", "include_stop_str_in_output", "store", "use_beam_search"), (False,)),
    **dict.fromkeys(("bad_words", "documents", "functions", "include", "mcp_servers", "tools"), ([],)),
    **dict.fromkeys(("length_penalty", "repetition_penalty"), (1,)),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "priority"), (0,)),
    "modalities": (["text"],),
    **dict.fromkeys(("parallel_tool_calls", "spaces_between_special_tokens"), (True,)),
    "service_tier": ("auto", "default"),
    "text.verbosity": ("medium",),
    "thinking": ({"type": "disabled"},),
    "tool_choice.disable_parallel_tool_use": (False,),
    "top_k": (0, -1),
}
_SAFE_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile(r"missing required field `(\w+)`")


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape. `retry_after_s`: when to try again, where that helps."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = status, message, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def check_size(raw: bytes) -> None:
    """Raises ApiError for a body with too many values, before any is made. O(bytes)."""
    for limit, signs, what in ((MAX_VALUES, b",[{", "values"), (MAX_CONTAINERS, b"[{", "lists and objects")):
        if _count(raw, signs) > limit and signs_within(raw, limit, signs) > limit:
            raise ApiError(400, f"The body has more than the {limit:,} {what} that a request may have.")


def signs_within(raw: bytes, limit: int, signs: bytes, part: int = PART) -> int:
    """Return the number of these signs outside of strings, where they separate and open values; if there are more than `limit`,
    possibly not all of them. `part`: the bytes that are scanned in one step.
    """
    found, outside, at = 0, True, 0
    while at < len(raw) and found <= limit:
        piece = raw[at : at + part]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]  # it escapes the character after it
        at += len(piece)
        between = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
        found += _count(b'"'.join(between[0 if outside else 1 :: 2]), signs)
        if len(between) % 2 == 0:
            outside = not outside
    return found


def check_texts(texts: Iterable[str], name: str) -> None:
    """Apply the limits of `check_size` to all texts in a body that contain JSON themselves, together: `check_size` counts such
    a text as one value. O(texts).
    """
    values = containers = 0
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        values += signs_within(raw, MAX_VALUES, b",[{")
        containers += signs_within(raw, MAX_CONTAINERS, b"[{")
        if values > MAX_VALUES or containers > MAX_CONTAINERS:
            limits = f"{MAX_VALUES:,} values, or {MAX_CONTAINERS:,} lists and objects,"
            raise ApiError(400, f"The JSON in {name} has more than the {limits} that a request may have.", name)


def _count(raw: bytes, signs: bytes) -> int:
    """Count in parts: while bytes are counted, no other thread has the interpreter."""
    pieces = (raw[at : at + PART] for at in range(0, len(raw), PART))
    return sum(piece.count(sign) for piece in pieces for sign in (signs[at : at + 1] for at in range(len(signs))))


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "limit" in error.msg:  # the depth limit; orjson's name for it depends on the release
            raise nested_too_deeply("The body") from None
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, not {kind_of(body)}.")
    if _count(raw, b"[{") > MAX_NESTING:
        for name, value in body.items():
            json_text(value, shortened(name))
    return body


def json_text(value: object, name: str) -> str:
    """A value as JSON. Raises ApiError if it is nested too deeply."""
    try:
        return orjson.dumps([[[[value]]]])[_DEEPER:-_DEEPER].decode()
    except orjson.JSONEncodeError:
        raise nested_too_deeply(name) from None


def nested_too_deeply(name: str) -> ApiError:
    return ApiError(400, f"{name} is nested too deeply: {MAX_NESTING} levels at most.", None if name == "The body" else name)


def checked(body: dict[str, Any], kind: type[T]) -> T:
    """The fields of a body; unknown ones are left out. Raises ApiError, which names the first field that is wrong."""
    _look_at(kind)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _field_error(body, kind, str(error)) from None


def _look_at(kind: type[msgspec.Struct]) -> None:
    """Call before a body is converted to it. msgspec looks at a type when that is used for the first time, and two threads
    that do so at the same moment end the process with a segmentation fault (0.22.0)."""
    if kind in _inspected:
        return
    with _looking:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert({}, kind)
        _inspected.add(kind)


def check_model(body: Mapping[str, Any], model: str) -> None:
    """`model` is the only name that is served; a body may leave it out. Raises ApiError."""
    if body.get("model") not in (None, model):
        message = f"The model {shown(body['model'])} does not exist; this replica serves {model!r}."
        raise ApiError(404, message, "model", "model_not_found")


def ignored_fields(body: Mapping[str, Any], supported: frozenset[str]) -> tuple[str, ...]:
    """The fields of a body that ask for something and are not supported, as far as they can be in a header."""
    names = (name for name in body if name not in supported and asks(name, body[name]) and _SAFE_NAME.fullmatch(name))
    return tuple(heapq.nsmallest(MAX_IGNORED, names))


def asks(name: str, value: object) -> bool:
    """Return whether a field with this value requests non-default behaviour. An unknown field always does, also with false, 0
    or an empty text.
    """
    return value is not None and value not in NEUTRAL.get(name, ())


def shown(value: object) -> str:
    """A value of a body for an error message, shortened if it is long."""
    text = value if isinstance(value, str) else kind_of(value)
    cut = text[:MAX_SHOWN]
    return repr(cut) if cut == text else f"{cut!r}..."


def shortened(text: str) -> str:
    """The beginning of a text if it is long, else the text."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _field_error(body: dict[str, Any], kind: type, message: str) -> ApiError:
    """The error for msgspec's message, such as "Expected `int`, got `str` - at `$.stop_token_ids[1]`"."""
    path = _PATH.search(message)
    missing = _MISSING.search(message)
    steps = _STEP.findall((path[1] if path else "") + (f".{missing[1]}" if missing else ""))
    param, expected, got = _described(body, kind, steps)
    if missing:
        return ApiError(400, f"{param} must be {expected}.", param)
    if ", got `" in message:
        return ApiError(400, f"{param} must be {expected}, not {kind_of(got)}.", param)
    suffix = f", got {got}" if isinstance(got, int | float) else ""
    return ApiError(400, f"{param} must be {expected}{suffix}.", param)


def _described(value: Any, kind: Any, steps: list[tuple[str, str]]) -> tuple[str, str, object]:
    """The innermost field on a path that has a description: its own path, its description; and the value at the path's end."""
    param, found = "", ("", "")
    for name, index in steps:
        param += f"[{index}]" if index else f".{name}" if param else name
        kind = _fields(kind).get(name) if name else None
        description = _description(kind)
        if description:
            found = param, description
        value = value[int(index)] if index else value.get(name) if isinstance(value, dict) else None
    return *found, value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fields(kind: Any) -> dict[str, Any]:
    """The types of the fields of a Struct, or of the Struct in a union."""
    if isinstance(kind, type):
        return _hints(kind) if issubclass(kind, msgspec.Struct) else {}
    return next(filter(None, map(_fields, get_args(kind))), {})


def _description(kind: Any) -> str:
    """The outermost description in a type."""
    own = (meta.description for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta))
    inner = (_description(part) for part in get_args(kind) if not isinstance(part, Meta | str))
    return next(filter(None, (*own, *inner)), "")
