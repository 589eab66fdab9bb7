"""Values in a program: constants, texts with `${...}`, lists of messages. Nothing is executed."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gateway.features.workflows.language.expressions import INPUTS
from gateway.features.workflows.language.faults import suggestion
from gateway.features.workflows.language.functions import FUNCTIONS
from gateway.features.workflows.language.inputs import MESSAGES
from gateway.features.workflows.language.operations import foreign
from gateway.features.workflows.language.results import CHAT
from gateway.features.workflows.language.templates import escape

MAX_PARTS: Final = 1024
ROLES: Final = ("system", "user", "assistant")


class ProgramFault(Exception):
    """A part of the program is not of the language."""

    def __init__(self, node: ast.AST, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.line: int = getattr(node, "lineno", 0)


class MessagePart(NamedTuple):
    """A part of a list of messages. kind: "literal" (a message), "expression" (messages), "answer" (of the step `value`)."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class NameBinding:
    """A name of the program. kind: "input", "variable" (of a loop), "list" (that a loop fills), "messages", or the kind of step
    it is. step: its name in the document. parts: messages, or the prompt of a chat step. block: identifies the block that binds
    the name.
    """

    kind: str
    step: str = ""
    type: str = ""
    parts: tuple[MessagePart, ...] = ()
    block: int = 0


@dataclass
class ProgramNames:
    """Names that are seen at one place of the program."""

    names: dict[str, NameBinding] = field(default_factory=dict)

    def of(self, node: ast.Name) -> NameBinding:
        found = self.names.get(node.id)
        if found is None:
            hint = suggestion(node.id, self.names)
            text = f"{node.id} is not known here ({hint}); a name set in an if or a loop is not seen outside of it"
            raise ProgramFault(node, text)
        return found

    def step_of(self, node: ast.AST) -> str:
        """The step that a name is."""
        found = self.of(node) if isinstance(node, ast.Name) else None
        if found is None or not found.step:
            raise ProgramFault(node, "the name of a step is expected")
        return found.step

    # -- constants and texts

    def value(self, node: ast.expr) -> Any:
        """A value of the document: a constant, or texts with `${...}`."""
        if isinstance(node, ast.Constant):
            return _constant(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number
        if isinstance(node, ast.Dict):
            return {_key(key, node): self.value(each) for key, each in zip(node.keys, node.values, strict=True)}
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.JoinedStr):
            return self.template(self.texts(node))
        return f"${{{self.expression(node)}}}"

    def constant(self, node: ast.expr, what: str) -> Any:
        """A value without any name in it."""
        if any(isinstance(each, ast.Name | ast.Call | ast.JoinedStr) for each in ast.walk(node)):
            raise ProgramFault(node, f"{what} is a constant")
        return self.value(node)

    def texts(self, node: ast.expr) -> list[tuple[bool, str]]:
        """A text as its pieces: (True, an expression) or (False, plain text)."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [(False, node.value)]
        if isinstance(node, ast.JoinedStr):
            return [piece for each in node.values for piece in self.texts(_plain_piece(each))]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.texts(node.left) + self.texts(node.right)
        return [(True, self.expression(node))]

    @staticmethod
    def template(pieces: list[tuple[bool, str]]) -> str:
        made = ""
        for is_expression, text in pieces:
            if is_expression and made.endswith("$"):
                made = f"{made[:-1]}${{'$'}}"  # the text would read as an escape
            made += f"${{{text}}}" if is_expression else escape(text)
        return made

    def expression(self, node: ast.expr) -> str:
        return ast.unparse(_ExpressionRewriter(self).visit(node))

    # -- messages

    def messages(self, node: ast.expr) -> tuple[MessagePart, ...] | None:
        """The parts of a list of messages; None: the node is something else."""
        if isinstance(node, ast.Name):
            return self._named_messages(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.messages(node.left), self.messages(node.right)
            if left is None and right is None:
                return None
            for part, inner in ((left, node.left), (right, node.right)):
                if part is None:
                    raise ProgramFault(inner, "messages are expected on both sides of +, such as [system(...)]")
            if len(left or ()) + len(right or ()) > MAX_PARTS:
                raise ProgramFault(node, f"a list of messages has at most {MAX_PARTS:,} parts")
            return (left or ()) + (right or ())
        if isinstance(node, ast.List) and node.elts:
            found_parts = [self._message(each) for each in node.elts]
            if not any(found_parts):
                return None
            for made, each in zip(found_parts, node.elts, strict=True):
                if made is None:
                    raise ProgramFault(each, "a message is expected: system(...), user(...), assistant(...), x.message")
            return tuple(filter(None, found_parts))
        return None

    def _named_messages(self, node: ast.Name) -> tuple[MessagePart, ...] | None:
        found = self.of(node)
        if found.kind == "input" and found.type == MESSAGES:
            return (MessagePart("expression", f"{INPUTS}.{node.id}"),)
        if found.kind == CHAT:
            return (*found.parts, MessagePart("answer", found.step))
        return found.parts if found.kind == "messages" else None

    def _message(self, node: ast.expr) -> MessagePart | None:
        match node:
            case ast.Dict(keys=keys) if any(isinstance(key, ast.Constant) and key.value == "role" for key in keys):
                return MessagePart("literal", self.value(node))
            case ast.Call(func=ast.Name(id=role), args=[content], keywords=[]) if role in ROLES:
                return MessagePart("literal", {"role": role, "content": self._content(content)})
            case ast.Attribute(value=ast.Name() as name, attr="message") if self.of(name).kind == CHAT:
                return MessagePart("answer", self.of(name).step)
        return None

    def _content(self, node: ast.expr) -> Any:
        """The content of a message; + joins texts in it."""
        literal = (ast.Constant, ast.JoinedStr)
        joins = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
        if joins and any(isinstance(each, literal) for each in (node.left, node.right)):  # type: ignore[attr-defined]
            return self.template(self.texts(node))
        return self.value(node)

    def placed(self, parts: tuple[MessagePart, ...]) -> dict[str, Any]:
        """`from` and `append`: from the longest transcript that the messages begin with."""
        best, length = "", 0
        for binding in self.names.values():
            whole = (*binding.parts, MessagePart("answer", binding.step))
            if binding.kind == CHAT and len(whole) > length and parts[: len(whole)] == whole:
                best, length = binding.step, len(whole)
        if not best and parts[0].kind == "expression":
            best, length = f"${{{parts[0].value}}}", 1
        rest = [_appended(part) for part in parts[length:]]
        return {**({"from": best} if best else {}), **({"append": rest} if rest else {})}


def _appended(part: MessagePart) -> Any:
    if part.kind == "literal":
        return part.value
    return f"${{{part.value}.message}}" if part.kind == "answer" else f"${{{part.value}}}"


def _constant(node: ast.Constant) -> Any:
    if isinstance(node.value, str):
        return escape(node.value)
    if node.value is None or isinstance(node.value, bool | int | float):
        return node.value
    raise ProgramFault(node, f"{node.value!r:.40} is no value of the language")


def _key(key: ast.expr | None, node: ast.AST) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    raise ProgramFault(key or node, "the key of an object is a text")


def _plain_piece(node: ast.expr) -> ast.expr:
    """The value within the braces of an f-string."""
    if not isinstance(node, ast.FormattedValue):
        return node
    if node.conversion != -1 or node.format_spec is not None:
        raise ProgramFault(node, "a value in an f-string has no format; write {x} alone")
    return node.value


class _ExpressionRewriter(ast.NodeTransformer):
    """Rewrites an expression of the program: inputs as inputs.NAME, a step as NAME.value, f-strings as sums."""

    def __init__(self, names: ProgramNames) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not isinstance(node, ast.JoinedStr | ast.Slice) and (text := foreign(node)):
            raise ProgramFault(node, text)
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self._names.of(node)
        if found.kind == "input":
            return _member(INPUTS, node.id)
        if found.kind in ("list", "messages"):
            text = (
                "a list that a loop fills is used after the loop" if found.kind == "list" else "messages are used in chat(...)"
            )
            raise ProgramFault(node, f"{node.id}: {text}")
        return _member(found.step, "value") if found.step else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and self._names.of(node.value).step:
            return _member(self._names.of(node.value).step, node.attr)
        return ast.Attribute(self.visit(node.value), node.attr, ast.Load())

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        base, index = self.visit(node.value), self.visit(node.slice)
        if isinstance(index, ast.Constant) and isinstance(index.value, str) and _is_member(index.value):
            return ast.Attribute(base, index.value, ast.Load())
        return ast.Subscript(base, index, ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            text = f"{ast.unparse(node.func)[:60]} cannot be called here; functions: {', '.join(FUNCTIONS)}"
            raise ProgramFault(node, text)
        return ast.Call(node.func, [self.visit(each) for each in node.args], node.keywords)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        made: ast.expr = ast.Constant("")
        for each in node.values:
            inner = self.visit(_plain_piece(each))
            piece = inner if isinstance(each, ast.Constant) else ast.Call(ast.Name("string", ast.Load()), [inner], [])
            made = piece if isinstance(made, ast.Constant) and made.value == "" else ast.BinOp(made, ast.Add(), piece)
        return made


def _member(name: str, attribute: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(name, ast.Load()), attribute, ast.Load())


def _is_member(text: str) -> bool:
    if not text.isidentifier() or not text.isascii() or text.startswith("_"):
        return False
    try:
        ast.parse(f"x.{text}", mode="eval")
    except SyntaxError:  # a word of Python
        return False
    return True
