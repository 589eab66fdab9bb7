"""Converts the tools of a Messages request to chat functions.

custom tools                         the same function
bash, text_editor, memory            functions with the parameters that Anthropic documents: the client runs them
computer                             error 400: a model knows it by training only
any other (web_search, mcp_toolset)  left out beside other tools, because a model may use it, but need not. A request with
                                     nothing else, or with this choice, is for that tool: error 400
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.anthropic.prompt import chat_tool
from gateway.errors import GatewayError, bad_request
from gateway.features.translation.rules import Omissions, tool_refusal

_CUSTOM: Final = (None, "custom")
_VERSIONED: Final = re.compile(r"([a-z_]+)_\d{8}")  # a type of a tool of Anthropic's
_NOT_RUN: Final = "nothing here runs it"
_TEXT: Final = {"type": "string"}
_EDITOR: Final[Mapping[str, Any]] = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
# Description, commands, other parameters of tools that the client runs in a form of Anthropic's.
_CLIENTS: Final[Mapping[str, tuple[str, tuple[str, ...], Mapping[str, Any]]]] = {
    "bash": (
        "Runs a command in a shell that keeps its state, or restarts it.",
        (),
        {"command": _TEXT, "restart": {"type": "boolean"}},
    ),
    "text_editor": ("Views, creates and edits files.", ("view", "create", "str_replace", "insert"), _EDITOR),
    "memory": (
        "Reads and writes files below /memories, which outlast the conversation.",
        ("view", "create", "str_replace", "insert", "delete", "rename"),
        {**_EDITOR, "old_path": _TEXT, "new_path": _TEXT},
    ),
}


class MessageTools:
    """functions: for the chat request."""

    __slots__ = ("_first", "_missing", "functions")

    def __init__(self, body: Mapping[str, Any], left_out: Omissions) -> None:
        """Raises GatewayError 400 that names a tool that chat does not support."""
        self.functions = list[dict[str, Any]]()
        self._missing = list[Any]()  # names of tools that are left out
        self._first = ""  # the place of the first one
        tools = body.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise bad_request("'tools' must be a list.", "tools")
        for number, tool in enumerate(tools or ()):
            self._add(tool, f"tools[{number}]", number, left_out)
        if body.get("mcp_servers"):
            self._leave_out("mcp_servers", "mcp_servers", None, left_out)
        if self._missing and not self.functions:
            text = f"{self._first}: the replicas of this model run no tools, and the request has none that the client runs."
            raise bad_request(text, self._first)

    def require(self, name: str) -> None:
        """Raises GatewayError 400 if the tool of this name was left out."""
        if name in self._missing:
            raise bad_request(f"tool_choice.name: the replicas of this model do not run {name[:50]!r}.", "tool_choice.name")

    def _add(self, tool: Any, where: str, number: int, left_out: Omissions) -> None:
        if not isinstance(tool, dict):
            raise bad_request(f"{where} must be an object with 'name' and 'input_schema'.", where)
        kind = tool.get("type")
        if kind in _CUSTOM:
            for name, type_, wanted in (("name", str, "a string"), ("input_schema", dict, "an object")):
                if not isinstance(tool.get(name), type_):
                    raise bad_request(f"{where}.{name} is required and must be {wanted}.", f"{where}.{name}")
            self.functions.append(chat_tool(tool, number))
            return
        match = _VERSIONED.fullmatch(kind) if isinstance(kind, str) else None
        plain = match[1] if match else str(kind)
        if plain in _CLIENTS and isinstance(tool.get("name"), str):
            self.functions.append(_clients_tool(tool["name"], plain))
        elif reason := tool_refusal(plain):
            raise _cannot(where, kind, reason)
        else:
            self._leave_out(f"{where}.type", plain, tool.get("name"), left_out)

    def _leave_out(self, where: str, kind: str, name: Any, left_out: Omissions) -> None:
        self._first = self._first or where
        self._missing.append(name)
        left_out.add(kind, _NOT_RUN)


def _clients_tool(name: str, kind: str) -> dict[str, Any]:
    description, commands, others = _CLIENTS[kind]
    properties: dict[str, Any] = {"command": {"type": "string", "enum": commands}, **others} if commands else dict(others)
    parameters = {"type": "object", "properties": properties, "required": ["command"] if commands else []}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _cannot(where: str, kind: Any, reason: str) -> GatewayError:
    return bad_request(
        f"{where}.type: {str(kind)[:50]!r} cannot be used with the replicas of this model: {reason}.", f"{where}.type"
    )
