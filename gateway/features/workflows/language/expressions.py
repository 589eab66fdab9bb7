"""Expressions: Python's grammar, cut down to values, and evaluated without Python.

`parse_expression` accepts the nodes of `RULES` (`operations.py`) alone, so a tree that it returns has no other node. Evaluation
is total: the tree is bounded in nodes and depth, every operation is linear in its operands, and each charges a bounded budget.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.features.workflows.language.operations import (
    RULES,
    Evaluation,
    ExpressionError,
    Reference,
    Scope,
    WorkBudget,
    foreign,
)
from gateway.features.workflows.language.values import MAX_VALUE_BYTES

MAX_CHARS: Final = 2000
MAX_NODES: Final = 256
MAX_NESTING: Final = 50
EVALUATION_WORK: Final = 2000
NODE_WORK: Final = 500
INPUTS: Final = "inputs"
_LINE_BREAK: Final = r"a text in an expression has no line break; write it as \n (within double quotes in YAML: \\n)"


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression. nodes: their number."""

    text: str
    tree: ast.expr = field(compare=False, repr=False)
    references: frozenset[Reference] = field(compare=False)
    nodes: int = field(compare=False, default=1)

    def evaluate(self, scope: Scope, budget: WorkBudget | None = None, most: int = MAX_VALUE_BYTES) -> Any:
        """Its value. budget: of several expressions together; default: one of its own. most: bytes of the value. Raises
        EvaluationError.
        """
        return self.sized(scope, budget or WorkBudget(), most)[0]

    def sized(self, scope: Scope, budget: WorkBudget, most: int) -> tuple[Any, int]:
        """Its value, and the bytes of it. Raises EvaluationError."""
        budget.spend(EVALUATION_WORK + NODE_WORK * self.nodes)
        value = Evaluation(scope, budget).of(self.tree)
        return value, budget.measure(value, most)

    @property
    def canonical(self) -> str:
        """The same expression, independent of spaces, quotes and parentheses."""
        return ast.unparse(self.tree)


def parse_expression(text: str) -> Expression:
    """Raises ExpressionError."""
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"an expression has at most {MAX_CHARS:,} characters, this one has {len(text):,}")
    tree = parsed_python(text.strip(), "eval")
    assert isinstance(tree, ast.Expression)
    references = set[Reference]()
    nodes = _check(tree.body, references)
    return Expression(text.strip(), tree.body, frozenset(references), nodes)


def parsed_python(text: str, mode: str) -> ast.AST:
    """The syntax tree of hostile text. Raises ExpressionError, with the line in a program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful texts, such as "1or 2"
            tree = ast.parse(text, mode=mode)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if mode == "exec" and error.lineno else ""
        message = _LINE_BREAK if mode == "eval" and "\n" in text and "string literal" in error.msg else error.msg
        raise ExpressionError(f"{where}{message}") from None
    except (RecursionError, MemoryError):
        raise ExpressionError("it is nested too deeply") from None
    except ValueError as error:  # a null byte, half of a surrogate pair
        raise ExpressionError(f"it has a character that is not allowed ({error})") from None
    return tree


def _check(tree: ast.expr, references: set[Reference]) -> int:
    """Refuse foreign nodes; collect the references. Returns the number of nodes."""
    count, level, waiting = 0, 0, [tree]
    while waiting:
        level += 1
        count += len(waiting)
        if count > MAX_NODES:
            raise ExpressionError(f"an expression has at most {MAX_NODES} parts; compute a piece in a step of its own (let)")
        if level > MAX_NESTING:
            raise ExpressionError(f"an expression has at most {MAX_NESTING} levels; compute a piece in a step of its own (let)")
        inner: list[ast.expr] = []
        for node in waiting:
            if text := foreign(node):
                raise ExpressionError(text)
            inner += RULES[type(node)].parts(node, references)
        waiting = inner
    return count
