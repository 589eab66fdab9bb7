"""Operations of expressions: for each kind of node, which inner nodes it may have, and its value.

Each operation is linear in its operands, and pays for them from a budget. A missing key, index or member is null; a wrong type
is an EvaluationError.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gateway.features.workflows.language.functions import FUNCTIONS, has, is_number, search_work
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.values import (
    EvaluationError,
    ValueTooLargeError,
    bytes_of,
    require_bytes,
    same,
    type_name,
)

MAX_WORK: Final = 1 << 25  # units of about a nanosecond
_OPERATION_WORK: Final = 500
_WIDE_CHAR_WORK: Final = 3  # of a character of a text that is not all ASCII
_BYTE_WORK: Final = 4  # of a byte of a list or an object
_ITEM_WORK: Final = 20  # of an item of a slice; of a character of one: 1
_NO_NUMBERS: Final = "only numbers can be calculated with; + also joins two texts or two lists"

Scope = Mapping[str, Any]
"""Values by name: `inputs`, variables, and a StepResult for each step."""


class ExpressionError(ValueError):
    """The text is no expression of the language."""


class WorkBudget:
    """Bounds the work of evaluations: every operation pays for its operands. used: units so far."""

    def __init__(self) -> None:
        self.used = 0

    def charge(self, *values: object) -> None:
        """Pay for one operation with these operands. Raises ValueTooLargeError beyond MAX_WORK."""
        work = _OPERATION_WORK
        for value in values:
            if isinstance(value, str):
                work += len(value) if value.isascii() else _WIDE_CHAR_WORK * len(value)
            elif isinstance(value, list | dict):
                work += _BYTE_WORK * bytes_of(value, MAX_WORK // _BYTE_WORK)
        self.spend(work)

    def measure(self, value: object, most: int) -> int:
        """The bytes of a value, paid also if there are more than `most`. Raises EvaluationError."""
        size = bytes_of(value, MAX_WORK // _BYTE_WORK)
        self.spend(size if isinstance(value, str) else _BYTE_WORK * size)
        return require_bytes(size, most)

    def spend(self, work: int) -> None:
        """Raises ValueTooLargeError beyond MAX_WORK."""
        self.used += work
        if self.used > MAX_WORK:
            raise ValueTooLargeError("the expressions of this step are too much work: they have too large values")


class Reference(NamedTuple):
    """A name in an expression, and the member that is read of it; None: the name alone."""

    root: str
    member: str | None


def foreign(node: ast.expr) -> str:
    """The reason why a node is not of the language; "": it is."""
    name = _NAMES.get(type(node), type(node).__name__)
    return "" if type(node) in RULES else f"{name} cannot be used in an expression"


class Evaluation:
    """One evaluation."""

    def __init__(self, scope: Scope, budget: WorkBudget) -> None:
        self.scope = scope
        self.charge = budget.charge
        self.spend = budget.spend

    def of(self, node: ast.expr) -> Any:
        return RULES[type(node)].value(node, self)


class _Rule(NamedTuple):
    """parts: the inner nodes of a node, after its own check. value: evaluates a node."""

    parts: Callable[[Any, set[Reference]], list[ast.expr]]
    value: Callable[[Any, Evaluation], Any]


def _constant_parts(node: ast.Constant, _: set[Reference]) -> list[ast.expr]:
    if not (node.value is None or isinstance(node.value, str | bool | int | float)):
        raise ExpressionError(f"{node.value!r:.60} cannot be used in an expression")
    try:
        bytes_of(node.value)
    except EvaluationError as error:
        raise ExpressionError(str(error)) from None
    return []


def _name_parts(node: ast.Name, references: set[Reference]) -> list[ast.expr]:
    _allow_name(node.id)
    references.add(Reference(node.id, None))
    return []


def _attribute_parts(node: ast.Attribute, references: set[Reference]) -> list[ast.expr]:
    _allow_name(node.attr)
    if isinstance(node.value, ast.Name):
        _allow_name(node.value.id)
        references.add(Reference(node.value.id, node.attr))
        return []
    return [node.value]


def _allow_name(name: str) -> None:
    if name.startswith("_"):
        raise ExpressionError(f"{name[:60]}: names that begin with _ cannot be used")


def _attribute_value(node: ast.Attribute, run: Evaluation) -> Any:
    base = run.of(node.value)
    if isinstance(base, StepResult):
        return base.member(node.attr)
    return base.get(node.attr) if isinstance(base, dict) else None


def _name_value(node: ast.Name, run: Evaluation) -> Any:
    if node.id not in run.scope:
        raise EvaluationError(f"the name {node.id!r} is not known here")
    return run.scope[node.id]


def _subscript_parts(node: ast.Subscript, _: set[Reference]) -> list[ast.expr]:
    if isinstance(node.slice, ast.Slice):
        if node.slice.step is not None:
            raise ExpressionError("a slice has no step: write [a:b]")
        return [node.value, *filter(None, (node.slice.lower, node.slice.upper))]
    return [node.value, node.slice]


def _subscript_value(node: ast.Subscript, run: Evaluation) -> Any:
    base = run.of(node.value)
    if isinstance(node.slice, ast.Slice):
        bounds = [run.of(each) if each else None for each in (node.slice.lower, node.slice.upper)]
        if not all(each is None or _is_whole(each) for each in bounds):
            raise EvaluationError("the bounds of a slice are whole numbers")
        if base is not None and not isinstance(base, str | list):
            raise EvaluationError(f"a slice needs a text or a list, got {type_name(base)}")
        if base is None:
            return None
        copied = len(range(*slice(*bounds).indices(len(base))))
        run.spend(copied if isinstance(base, str) else _ITEM_WORK * copied)
        return base[bounds[0] : bounds[1]]
    index = run.of(node.slice)
    if isinstance(base, dict) and isinstance(index, str):
        return base.get(index)
    if not (_is_whole(index) or isinstance(index, str)):
        raise EvaluationError(f"an index is a whole number or a text, got {type_name(index)}")
    found = isinstance(base, str | list) and isinstance(index, int) and -len(base) <= index < len(base)
    return base[index] if found else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _compare_value(node: ast.Compare, run: Evaluation) -> bool:
    left = run.of(node.left)
    for operator, each in zip(node.ops, node.comparators, strict=True):
        right = run.of(each)
        run.charge(left, right)
        if isinstance(operator, ast.In | ast.NotIn):
            run.spend(search_work(right, left))
        if not _COMPARISONS[type(operator)](left, right):
            return False
        left = right
    return True


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compared(left: Any, right: Any) -> bool:
        if (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str)):
            return compare(left, right)
        raise EvaluationError(f"{type_name(left)} and {type_name(right)} have no order")

    return compared


_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: same,
    ast.NotEq: lambda a, b: not same(a, b),
    ast.Lt: _ordered(lambda a, b: a < b),
    ast.LtE: _ordered(lambda a, b: a <= b),
    ast.Gt: _ordered(lambda a, b: a > b),
    ast.GtE: _ordered(lambda a, b: a >= b),
    ast.In: lambda a, b: has(b, a),
    ast.NotIn: lambda a, b: not has(b, a),
}


def _compare_parts(node: ast.Compare, _: set[Reference]) -> list[ast.expr]:
    if not all(type(each) in _COMPARISONS for each in node.ops):
        raise ExpressionError("`is` cannot be used in an expression; write == or !=")
    return [node.left, *node.comparators]


def _bool_value(node: ast.BoolOp, run: Evaluation) -> Any:
    value: Any = None
    for each in node.values:
        value = run.of(each)
        if bool(value) == isinstance(node.op, ast.Or):
            break
    return value


def _unary_parts(node: ast.UnaryOp, _: set[Reference]) -> list[ast.expr]:
    if not isinstance(node.op, ast.Not | ast.USub):
        raise ExpressionError("the operators before a value are - and not")
    return [node.operand]


def _unary_value(node: ast.UnaryOp, run: Evaluation) -> Any:
    value = run.of(node.operand)
    if isinstance(node.op, ast.Not):
        return not value
    if not is_number(value):
        raise EvaluationError(_NO_NUMBERS)
    return -value


_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def _binary_parts(node: ast.BinOp, _: set[Reference]) -> list[ast.expr]:
    if type(node.op) not in _ARITHMETIC:
        raise ExpressionError("the operators are + - * / // %")
    return [node.left, node.right]


def _binary_value(node: ast.BinOp, run: Evaluation) -> Any:
    left, right = run.of(node.left), run.of(node.right)
    joins = isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
    if not joins and not (is_number(left) and is_number(right)):
        raise EvaluationError(f"{_NO_NUMBERS}; got {type_name(left)} and {type_name(right)}")
    run.charge(left, right)
    try:
        value = _ARITHMETIC[type(node.op)](left, right)
    except ZeroDivisionError:
        raise EvaluationError("a division by zero") from None
    except OverflowError:
        raise EvaluationError("a number is too large") from None
    bytes_of(value)
    return value


def _call_parts(node: ast.Call, _: set[Reference]) -> list[ast.expr]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    function = FUNCTIONS.get(name)
    if function is None:
        raise ExpressionError(f"{ast.unparse(node.func)[:60]} is no function; functions: {', '.join(FUNCTIONS)}")
    if node.keywords:
        raise ExpressionError(f"{name}: arguments have no names here")
    if not function.least <= len(node.args) <= function.most:
        wanted = f"{function.least}" if function.least == function.most else f"{function.least} to {function.most}"
        raise ExpressionError(f"{name} takes {wanted} argument{'s' * (function.most > 1)}, got {len(node.args)}")
    return node.args


def _call_value(node: ast.Call, run: Evaluation) -> Any:
    assert isinstance(node.func, ast.Name)
    arguments = [run.of(each) for each in node.args]
    function = FUNCTIONS[node.func.id]
    run.charge(*arguments)
    run.spend(function.extra_work(*arguments))
    value = function.call(*arguments)
    bytes_of(value)
    return value


def _list_value(node: ast.List, run: Evaluation) -> list[Any]:
    value = [run.of(each) for each in node.elts]
    run.charge(*value)
    return value


RULES: Final[Mapping[type[ast.AST], _Rule]] = {
    ast.Constant: _Rule(_constant_parts, lambda node, _: node.value),
    ast.Name: _Rule(_name_parts, _name_value),
    ast.Attribute: _Rule(_attribute_parts, _attribute_value),
    ast.Subscript: _Rule(_subscript_parts, _subscript_value),
    ast.List: _Rule(lambda node, _: node.elts, _list_value),
    ast.Compare: _Rule(_compare_parts, _compare_value),
    ast.BoolOp: _Rule(lambda node, _: node.values, _bool_value),
    ast.UnaryOp: _Rule(_unary_parts, _unary_value),
    ast.BinOp: _Rule(_binary_parts, _binary_value),
    ast.IfExp: _Rule(
        lambda node, _: [node.test, node.body, node.orelse],
        lambda node, run: run.of(node.body if run.of(node.test) else node.orelse),
    ),
    ast.Call: _Rule(_call_parts, _call_value),
}
_NAMES: Final[Mapping[type[ast.AST], str]] = {
    ast.Lambda: "lambda",
    ast.Dict: "an object in braces",
    ast.Set: "a set",
    ast.Tuple: "a tuple",
    ast.JoinedStr: "an f-string",
    ast.Starred: "a star",
    ast.NamedExpr: ":=",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    **dict.fromkeys([ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp], "a comprehension"),
}
