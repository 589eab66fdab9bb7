"""Converts the tools of a Responses request to chat functions, and function names back to tools.

    function              the same function
    custom                a function with one text argument, `input`; a grammar is described to the model, not enforced
    namespace             its tools, as functions whose names begin with the namespace's name
    web_search            left out: a model may search, but need not; Codex offers it in every request
    tools of a server     left out beside other tools (file_search, mcp, code_interpreter ...); a request with nothing else
                          is for that tool: error 400
    tools with their own  error 400: a model knows them by training only (local_shell, shell, apply_patch, computer)
    format

If only some tools are allowed, the others are removed from the list, because engines do not support such a choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.responses.prompt import chat_tool
from gateway.errors import GatewayError, bad_request
from gateway.features.translation.rules import Omissions, tool_refusal

INPUT: Final = "input"  # the argument of a custom tool's function

_OFFERED: Final = ("web_search", "web_search_preview")
_CHOICES: Final = frozenset(["auto", "none", "required"])


class ToolName:
    """The tool of a chat function. namespace: "" without one."""

    __slots__ = ("custom", "name", "namespace")

    def __init__(self, name: str, namespace: str = "", *, custom: bool = False) -> None:
        self.name = name
        self.namespace = namespace
        self.custom = custom


def flat_name(namespace: str, name: str) -> str:
    """The function name of a tool in a namespace; Codex lets its namespaces end with the separator."""
    return f"{namespace}{name}" if not namespace or namespace.endswith("__") else f"{namespace}__{name}"


def tool_names(echo: bytes) -> dict[str, ToolName]:
    """The repeated tools that have another form in chat, by function name. O(length)."""
    if b'"custom"' not in echo and b'"namespace"' not in echo:
        return {}
    found = dict[str, ToolName]()
    for tool in orjson.loads(echo).get("tools") or ():
        if tool.get("type") == "namespace":
            for inner in tool["tools"]:
                name = ToolName(inner["name"], tool["name"], custom=inner.get("type") == "custom")
                found[flat_name(name.namespace, name.name)] = name
        elif tool.get("type") == "custom":
            found[tool["name"]] = ToolName(tool["name"], custom=True)
    return found


class ChatTools:
    """functions: for the chat request. echo: the tools as repeated in a response."""

    __slots__ = ("_left_out", "_names", "echo", "functions")

    def __init__(self, tools: Any, left_out: Omissions) -> None:
        """Raises GatewayError 400 that names a tool that chat does not support."""
        self._left_out = left_out
        missing = ""
        self.functions = list[dict[str, Any]]()
        self.echo = list[dict[str, Any]]()
        self._names = set[str]()
        if tools is None:
            return
        if not isinstance(tools, list):
            raise bad_request("'tools' must be a list.", "tools")
        for index, tool in enumerate(tools):
            where = f"tools[{index}]"
            if not self._add(tool, where):
                missing = missing or where
        if missing and not self.functions:
            raise _not_run(missing)

    def choose(self, choice: Any) -> Any:
        """`tool_choice` for the chat request, or None. Functions that are not allowed are removed.

        Raises GatewayError 400.
        """
        if choice is None or (isinstance(choice, str) and choice in _CHOICES):
            return choice
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind in ("function", "custom"):
            return {"type": "function", "function": {"name": self._chosen(choice, "tool_choice")}}
        if kind == "allowed_tools":
            return self._allow(choice)
        text = "'tool_choice' must be 'auto', 'none', 'required', a function or custom tool, or 'allowed_tools' of such"
        raise bad_request(f"{text}: this model's replicas speak only chat completions.", "tool_choice")

    def _allow(self, choice: Mapping[str, Any]) -> str:
        mode, tools = choice.get("mode", "auto"), choice.get("tools")
        if mode not in ("auto", "required"):
            raise bad_request("tool_choice.mode must be 'auto' or 'required'.", "tool_choice.mode")
        if not isinstance(tools, list) or not tools:
            raise bad_request("tool_choice.tools must be a list of tools.", "tool_choice.tools")
        names = {self._chosen(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)}
        self.functions = [tool for tool in self.functions if tool["function"]["name"] in names]
        return "required" if mode == "required" else "auto"

    def _chosen(self, tool: Any, where: str) -> str:
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or tool.get("type") not in ("function", "custom"):
            raise bad_request(f"{where} must be a function or custom tool with its 'name'.", where)
        namespace = tool.get("namespace")
        name = flat_name(namespace, name) if isinstance(namespace, str) else name
        if name not in self._names:
            raise bad_request(f"{where}: no function or custom tool of 'tools' has that name.", where)
        return name

    def _add(self, tool: Any, where: str) -> bool:
        """False: the tool is left out, and a request cannot be only for it."""
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind == "namespace":
            self._add_namespace(tool, where)
        elif kind in ("function", "custom") or not isinstance(kind, str) or tool_refusal(kind):
            self.functions.append(self._function(tool, where))
            self.echo.append(_echoed(tool))
        else:
            self._left_out.add(kind, "nothing here runs it")
            return kind in _OFFERED
        return True

    def _add_namespace(self, tool: dict[str, Any], where: str) -> None:
        """The description of the namespace precedes the description of its first tool."""
        namespace, tools, about = tool.get("name"), tool.get("tools"), tool.get("description")
        if not isinstance(namespace, str) or not namespace:
            raise bad_request(f"{where}.name must be a string.", f"{where}.name")
        if not isinstance(tools, list):
            raise bad_request(f"{where}.tools must be a list.", f"{where}.tools")
        echo = list[dict[str, Any]]()
        for index, inner in enumerate(tools):
            function = self._function(inner, f"{where}.tools[{index}]", namespace)
            if index == 0 and isinstance(about, str) and about:
                described = function["function"].get("description") or ""
                function["function"]["description"] = f"{about}\n\n{described}".rstrip()
            self.functions.append(function)
            echo.append(_echoed(inner))
        self.echo.append({**tool, "description": about if isinstance(about, str) else "", "tools": echo})

    def _function(self, tool: Any, where: str, namespace: str = "") -> dict[str, Any]:
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind not in ("function", "custom"):
            raise _not_run(where)
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise bad_request(f"{where}.name must be a string.", f"{where}.name")
        flat = flat_name(namespace, name)
        if flat in self._names:
            raise bad_request(f"{where}.name: another tool has the name {flat[:100]!r}.", f"{where}.name")
        self._names.add(flat)
        if kind == "custom":
            return _custom(tool, flat)
        return chat_tool({**tool, "name": flat} if namespace else tool, 0)


def _not_run(where: str) -> GatewayError:
    text = "must be a function, a custom tool, or a namespace of them: this model's replicas speak only chat"
    return bad_request(f"{where}.type {text} completions, and nothing here runs other tools.", f"{where}.type")


def _custom(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    about, form = tool.get("description"), tool.get("format")
    about = about if isinstance(about, str) else ""
    if isinstance(form, dict) and form.get("type") == "grammar":
        about = f"{about}\n\nThe input must match this {form.get('syntax')} grammar:\n{form.get('definition')}".lstrip()
    text = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": text}}


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as OpenAI's API repeats it, with the fields that its clients require."""
    if tool.get("type", "function") == "custom":
        return tool
    defaults: dict[str, Any] = {"description": None, "parameters": None, "strict": False}
    return {**defaults, **tool, "type": "function"}
