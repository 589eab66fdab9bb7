"""The head and the calls of a program: `@workflow(...)`, the arguments of the function, chat, llm_chat, text, call."""

from __future__ import annotations

import ast
from typing import Any, Final

from gateway.features.workflows.language.inputs import MESSAGES
from gateway.features.workflows.language.keys import SAMPLING
from gateway.features.workflows.language.python_values import ProgramFault, ProgramNames
from gateway.features.workflows.language.results import CALL, CHAT, TEXT
from gateway.features.workflows.language.values import EvaluationError, bytes_of

_INPUT_TYPES: Final = {
    "Messages": MESSAGES,
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "list",
    "dict": "object",
}
_OUTPUT_TYPES: Final = {**_INPUT_TYPES, "Messages": ""}
_CALL_FIELDS: Final = ("model", "max_tokens", *SAMPLING, "choices", "output", "tools", "tool_choice", "extra")
_STEP_FIELDS: Final = ("timeout_s", "retry", "on_error")
_SETTINGS: Final = ("description", "primary", "limits")


def read_settings(function: ast.FunctionDef, names: ProgramNames) -> dict[str, Any]:
    """`defaults` and further keys of the document, from the decorator of the function."""
    match function.decorator_list:
        case [ast.Call(func=ast.Name(id="workflow"), args=[], keywords=keywords)]:
            pass
        case _:
            raise ProgramFault(function, 'one decorator is expected: @workflow(model="...", max_tokens=...)')
    given = {each.arg or "": names.constant(each.value, f"{each.arg} of @workflow") for each in keywords}
    known = (*_SETTINGS, "model", "max_tokens", *SAMPLING)
    for name in [name for name in given if name not in known]:
        raise ProgramFault(function, f"@workflow has no {name or '**'}; it has {', '.join(known)}")
    texts: dict[str, Any] = {each.arg: _plain_constant(each.value) for each in keywords if each.arg in _SETTINGS}
    return {**texts, "defaults": {name: each for name, each in given.items() if name not in _SETTINGS}}


def read_arguments(arguments: ast.arguments) -> dict[str, Any]:
    """The inputs that the arguments of the function declare."""
    if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        raise ProgramFault(arguments.args[0] if arguments.args else arguments, "the function has plain arguments only")
    required = len(arguments.args) - len(arguments.defaults)
    found: dict[str, Any] = {}
    for at, argument in enumerate(arguments.args):
        declared = _input_type(argument, argument.annotation)
        if at < required:
            declared["required"] = True
        else:
            declared["default"] = _plain_constant(arguments.defaults[at - required])
        found[argument.arg] = declared
    return found


def _input_type(argument: ast.arg, node: ast.expr | None) -> dict[str, Any]:
    match node:
        case ast.Name(id=name) if name in _INPUT_TYPES:
            return {"type": _INPUT_TYPES[name]}
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            texts = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return {"type": "string", "enum": [_plain_constant(each) for each in texts]}
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, ast.Dict() as more])):
            return {**_input_type(argument, inner), **_plain_constant(more)}
    kinds = ", ".join(_INPUT_TYPES)
    raise ProgramFault(
        argument, f'{argument.arg} needs a type: {kinds}, Literal["a", "b"] or Annotated[str, {{"max_length": 9}}]'
    )


def read_call(node: ast.Call, function: str, names: ProgramNames) -> tuple[dict[str, Any], Any]:
    """(step, its messages) of chat, llm_chat, text or call."""
    arguments = list(node.args)
    if any(each.arg is None for each in node.keywords) or any(isinstance(each, ast.Starred) for each in arguments):
        raise ProgramFault(node, "stars cannot be used in a call")
    fields = {str(each.arg): each.value for each in node.keywords}
    wanted = 2 if function == "llm_chat" else 1
    if len(arguments) != wanted:
        what = {"llm_chat": "a model and messages", "chat": "messages", "text": "a text", "call": "a connector"}[function]
        raise ProgramFault(node, f"{function} has {what} first, and then NAME=value; got {len(arguments)} before")
    if function == "call":
        use = names.constant(arguments[0], "the name of a connector")
        return {CALL: {"use": use, "with": {key: names.value(each) for key, each in fields.items()}}}, ()
    made: dict[str, Any] = {}
    if function == "llm_chat":
        made["model"] = names.constant(arguments.pop(0), "the model")
        fields = {{"result_value": "choices", "result_type": "output"}.get(key, key): each for key, each in fields.items()}
    step: dict[str, Any] = {}
    for key, each in fields.items():
        if key not in (*_CALL_FIELDS, *_STEP_FIELDS):
            raise ProgramFault(each, f"{function} has no {key}; it has {', '.join((*_CALL_FIELDS, *_STEP_FIELDS))}")
        (step if key in _STEP_FIELDS else made)[key] = _output(each) if _is_type(key, each) else _field(key, each, names)
    if function == "text":
        return {TEXT: {**_prompt(arguments[0], names), **made}, **step}, ()
    parts = names.messages(arguments[0])
    if parts is None:
        raise ProgramFault(node, "messages are expected: an input of type Messages, a chat step, or [system(...), user(...)]")
    return {CHAT: {**names.placed(parts), **made}, **step}, parts


def _field(key: str, node: ast.expr, names: ProgramNames) -> Any:
    if key in ("choices", "output", "model", "max_tokens", *_STEP_FIELDS):
        value = names.constant(node, key)
        return _plain_constant(node) if key in ("choices", "output") else value
    return names.value(node)


def _prompt(node: ast.expr, names: ProgramNames) -> dict[str, Any]:
    """`prompt`, or `from` and `append` if the text begins with a text step."""
    first = node
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    source = names.names.get(first.id) if isinstance(first, ast.Name) else None
    if source is None or source.kind != TEXT:
        return {"prompt": names.template(names.texts(node))}
    rest = names.template(names.texts(node)[1:])
    return {"from": source.step, **({"append": rest} if rest else {})}


def _plain_constant(node: ast.expr) -> Any:
    """A constant in which `${` means nothing."""
    try:
        value = ast.literal_eval(node)
        bytes_of(value)
    except (ValueError, TypeError, SyntaxError, EvaluationError):
        raise ProgramFault(node, "a constant is expected: a text, a number, True, False, None, a list or an object") from None
    return value


def _is_type(key: str, node: ast.expr) -> bool:
    return key == "output" and isinstance(node, ast.Name)


def _output(node: ast.expr) -> str:
    name = node.id if isinstance(node, ast.Name) else ""
    if not _OUTPUT_TYPES.get(name):
        raise ProgramFault(node, "output is list, str, int, float, bool, dict, or a JSON schema")
    return _OUTPUT_TYPES[name]
