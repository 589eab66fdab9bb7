"""The tools of a request: the functions, whether calls are parsed from the answer, and whether a call is forced.

"none" keeps the tools in the prompt, as in vLLM: the cached prefix stays the same. A forced call is a constraint on the answer
(`Grammar` of the kind "calls"), so the engine must be able to follow one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from replica.api.validation import ApiError, json_text, shown
from replica.engine import Grammar
from replica.output.tool_calls import CLOSE

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call; `parameters` is a JSON schema, None if it was not sent."""

    name: str
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`read`: calls are parsed from the answer's text. `forced`: the answer is one call."""

    read: bool = False
    forced: Grammar | None = None


def tool_use(functions: Sequence[Function], choice: Choice, named: str | None = None) -> ToolUse:
    """`named`: the only function that may be called. Raises ApiError."""
    if not functions:
        if choice == "required":
            raise ApiError(400, "tool_choice is only allowed together with tools.", "tool_choice")
        return ToolUse()
    if choice != "required":
        return ToolUse(read=choice == "auto")
    wanted = [one for one in functions if named in (None, one.name)]
    if not wanted:
        raise ApiError(400, f"tool_choice names the function {shown(named)}, which is not among the tools.", "tool_choice")
    described = [{"name": one.name, "parameters": one.parameters or {"type": "object"}} for one in wanted]
    text = json_text(described, "tools")
    if CLOSE in text or not all(one.name for one in wanted):
        raise ApiError(400, f"A call that is forced needs a name, and nothing in its tool may have the text {CLOSE}.", "tools")
    return ToolUse(read=True, forced=Grammar("calls", text))


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as chats have it, which is how templates print it: the same for every API."""
    function: dict[str, Any] = {"name": name}
    function |= {} if description is None else {"description": description}
    function |= {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": function}
