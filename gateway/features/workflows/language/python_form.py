"""The Python form of a workflow: one function, parsed and never executed, translated to a document.

Each name of the function is bound to an input, a step, a list of messages or a loop's variable (`NameBinding`); statements add
steps to the block around them. Errors have the line; after an error in a statement, the next one is read.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.features.workflows.language.expressions import parsed_python
from gateway.features.workflows.language.faults import PROGRAM_INVALID, TOO_LARGE, DocumentFaults, refused
from gateway.features.workflows.language.operations import ExpressionError
from gateway.features.workflows.language.python_calls import read_arguments, read_call, read_settings
from gateway.features.workflows.language.python_values import NameBinding, ProgramFault, ProgramNames
from gateway.features.workflows.language.reading import SourceValue
from gateway.features.workflows.language.results import CALL, CHAT, EACH, LET, SWITCH, TEXT
from gateway.features.workflows.language.steps import MAX_STEPS

MAX_PROGRAM_BYTES: Final = 64 << 10
MAX_PROGRAM_NODES: Final = 8192
MAX_PROGRAM_LINES: Final = 4096
_CALLS: Final = {"chat": CHAT, "llm_chat": CHAT, "text": TEXT, "call": CALL}
_TOP: Final = 1  # number of the function's own block
_STREAMS: Final = {"deltas": "delta", "snapshots": "snapshot"}
_NOT_HERE: Final = (
    "is not part of the language; statements: NAME = ..., yield {...}, with job():, if, for, wait(...), wait_any(...),"
    " NAME.kill(), return {...}"
)


def compile_program(text: str) -> SourceValue:
    """The document of a program, with the lines of its steps. Raises DocumentError (`program_invalid`)."""
    if len(text.encode(errors="replace")) > MAX_PROGRAM_BYTES:
        raise refused("", f"a program has at most {MAX_PROGRAM_BYTES >> 10} KiB", TOO_LARGE)
    if text.count("\n") + text.count(";") > MAX_PROGRAM_LINES:
        raise refused("", f"a program has at most {MAX_PROGRAM_LINES:,} lines", TOO_LARGE)
    faults = DocumentFaults()
    try:
        tree = parsed_python(text, "exec")
        if sum(1 for _, _ in zip(ast.walk(tree), range(MAX_PROGRAM_NODES + 1), strict=False)) > MAX_PROGRAM_NODES:
            raise refused("", f"a program has at most {MAX_PROGRAM_NODES:,} parts (names, constants, operators)", TOO_LARGE)
        compiler = _ProgramCompiler(faults)
        document = compiler.document(tree)
    except ExpressionError as error:
        raise refused("", f"not valid Python: {error}", PROGRAM_INVALID) from None
    except ProgramFault as fault:
        raise refused("", fault.text, PROGRAM_INVALID, fault.line) from None
    except RecursionError:
        raise refused("", "it is nested too deeply", PROGRAM_INVALID) from None
    faults.require_none()
    return SourceValue(document, compiler.lines_of(document))


@dataclass
class _ProgramBlock:
    """A block of statements. steps: of the document, by name. arm: the arm of a switch, for `emit` and `kill`.

    needs: of `wait`, for all steps that follow. needs_any: of `wait_any`, for the next step. waits: True from either until the
    next step. last: the newest step. result: the name that every arm of an `if` sets; steps of this name are numbered by their
    arms.
    """

    number: int
    steps: dict[str, Any]
    names: ProgramNames
    arm: dict[str, Any] | None = None
    needs: list[str] = field(default_factory=list)
    needs_any: list[str] = field(default_factory=list)
    waits: bool = False
    last: str = ""
    result: str = ""
    arm_number: int = 0
    top: bool = False


class _ProgramCompiler:
    def __init__(self, faults: DocumentFaults) -> None:
        self._faults = faults
        self._blocks = 0
        self._lines: dict[str, int] = {}
        self._broken = set[str]()  # names set by statements with errors
        self._outputs: dict[str, Any] | None = None

    def document(self, tree: ast.AST) -> dict[str, Any]:
        body = [each for each in getattr(tree, "body", ()) if not _is_docstring(each)]
        functions = [each for each in body if isinstance(each, ast.FunctionDef)]
        if len(functions) != 1 or len(body) != 1:
            other = next((each for each in body if not isinstance(each, ast.FunctionDef)), tree)
            raise ProgramFault(other, "a program is one function with the decorator @workflow(...), and nothing else")
        function = functions[0]
        inputs = read_arguments(function.args)
        names = ProgramNames({name: NameBinding("input", type=each["type"], block=_TOP) for name, each in inputs.items()})
        made: dict[str, Any] = {"workflow": 1, "name": function.name, "inputs": inputs, **read_settings(function, names)}
        statements = function.body[1:] if _is_docstring(function.body[0]) else function.body
        block = self._block({}, names, top=True)
        self._run(statements, block)
        made["steps"] = block.steps
        return made if self._outputs is None else {**made, "outputs": self._outputs}

    def lines_of(self, document: dict[str, Any]) -> dict[str, int]:
        """Lines by path of steps."""
        found: dict[str, int] = {}

        def visit(steps: dict[str, Any], path: str) -> None:
            for name, step in steps.items():
                place = f"{path}.{name}"
                found[place] = self._lines.get(name, 0)
                for at, arm in enumerate(step.get(SWITCH, ())):
                    visit(arm.get("steps", {}), f"{place}.switch[{at}].steps")
                if EACH in step:
                    visit(step[EACH]["steps"], f"{place}.each.steps")

        visit(document["steps"], "steps")
        return found

    # -- blocks and statements

    def _block(self, steps: dict[str, Any], names: ProgramNames, **more: Any) -> _ProgramBlock:
        self._blocks += 1
        return _ProgramBlock(self._blocks, steps, ProgramNames(dict(names.names)), **more)

    def _run(self, statements: Sequence[ast.stmt], block: _ProgramBlock) -> None:
        for statement in statements:
            try:
                self._statement(statement, block)
            except ProgramFault as fault:
                names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
                if not names & self._broken:  # else the error follows from an earlier one
                    self._faults.add("", fault.text, PROGRAM_INVALID, fault.line or statement.lineno)
                self._broken |= _set_in(statement)

    def _statement(self, statement: ast.stmt, block: _ProgramBlock) -> None:
        match statement:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="job"), args=[], keywords=[]))]):
                self._job(statement.body, block)
            case ast.Expr(value=ast.Call(func=ast.Name(id="wait"), args=names, keywords=[])):
                block.needs += [block.names.step_of(each) for each in names]
                block.waits = True
            case ast.Expr(value=ast.Call(func=ast.Name(id="wait_any"), args=names, keywords=[])):
                block.needs_any = [block.names.step_of(each) for each in names]
                block.waits = True
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="kill"), args=[], keywords=[])):
                self._kill(target, block)
            case ast.Expr(value=ast.Yield(value=ast.Dict() as outputs)):
                for key, value in zip(outputs.keys, outputs.values, strict=True):
                    self._yield(key, value, block)
            case ast.Assign(targets=[ast.Name() as target], value=value):
                self._assign(target, value, block)
            case ast.If():
                self._if(statement, block)
            case ast.For(target=ast.Name(), orelse=[]):
                self._for(statement, block)
            case ast.Return(value=ast.Dict() as result) if block.top:
                self._outputs = block.names.value(result)
            case _:
                raise ProgramFault(statement, f"{_name_of(statement)} {_NOT_HERE}")

    def _job(self, statements: Sequence[ast.stmt], block: _ProgramBlock) -> None:
        """Statements of the same block. Their waits end with them."""
        needs, needs_any, last = list(block.needs), list(block.needs_any), block.last
        self._run(statements, block)
        block.needs, block.needs_any, block.waits = needs, needs_any if block.last == last else [], False

    def _kill(self, target: ast.expr, block: _ProgramBlock) -> None:
        step = block.names.step_of(target)
        if block.waits:
            raise ProgramFault(target, "a wait holds for steps; kill() stands before it, or after the step that follows it")
        if block.last:
            place = block.steps[block.last]
        elif block.arm is not None:
            place = block.arm
        else:
            raise ProgramFault(target, "kill() stands after the step that kills once it is done, or in an if")
        place.setdefault("kill", []).append(step)

    def _add(self, node: ast.AST, name: str, step: dict[str, Any], block: _ProgramBlock, parts: Any = ()) -> None:
        """Add a step to a block. name: in the program."""
        made = f"{name}_{block.arm_number}" if name == block.result else name
        if keyword.iskeyword(made) or made in self._lines:
            raise ProgramFault(node, f"{made} is set twice; each step has a name of its own")
        if len(self._lines) == MAX_STEPS:
            raise refused("", f"a workflow has at most {MAX_STEPS} steps", TOO_LARGE, getattr(node, "lineno", 0))
        kind = next(each for each in (CHAT, TEXT, CALL, LET, SWITCH, EACH) if each in step)
        if block.needs:
            step["needs"] = list(dict.fromkeys(block.needs))
        if block.needs_any:
            step["needs_any"], block.needs_any = block.needs_any, []
        block.steps[made] = step
        block.last, block.waits = made, False
        block.names.names[name] = NameBinding(kind, made, parts=parts, block=block.number)
        self._lines[made] = getattr(node, "lineno", 0)
        if name == block.result and block.arm is not None:
            block.arm["value"] = f"${{{made}.value}}"

    def _assign(self, target: ast.Name, value: ast.expr, block: _ProgramBlock) -> None:
        name, known = target.id, block.names.names.get(target.id)
        if known is not None and name != block.result:
            if known.block != block.number:
                raise ProgramFault(target, f"{name} is set outside of this if or loop, and cannot be set again in it")
            if known.step:
                raise ProgramFault(target, f"{name} is set twice; each step has a name of its own")
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _CALLS:
            step, parts = read_call(value, value.func.id, block.names)
            self._add(target, name, step, block, parts)
        elif isinstance(value, ast.List) and not value.elts:
            block.names.names[name] = NameBinding("list", block=block.number)
        elif name == block.result and block.arm is not None:
            block.arm["value"] = block.names.value(value)
        elif (messages := block.names.messages(value)) is not None and not _is_chat(value, block):
            block.names.names[name] = NameBinding("messages", parts=messages, block=block.number)
        else:
            self._add(target, name, {LET: block.names.value(value)}, block)

    def _yield(self, key: ast.expr | None, value: ast.expr, block: _ProgramBlock) -> None:
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise ProgramFault(key or value, "the name of an output is a text")
        stream = ""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _STREAMS:
            stream = _STREAMS[value.func.id]
            value = value.args[0] if len(value.args) == 1 else value
        found = [block.names.names.get(each.id) for each in ast.walk(value) if isinstance(each, ast.Name)]
        made = [each.step for each in found if each is not None and each.step in block.steps]
        if len(set(made)) == 1:
            step = block.steps[made[0]]
            if "yield" in step:
                raise ProgramFault(value, f"{made[0]} is yielded twice; set another name to its value first")
            if isinstance(value, ast.Name):
                step["yield"] = {"as": key.value, "stream": stream} if stream else key.value
            else:
                step["yield"] = {"as": key.value, "value": block.names.value(value)}
                if stream:
                    step["yield"]["stream"] = stream
        elif block.arm is not None and not any(each is not None and each.step for each in found):
            if block.waits:
                raise ProgramFault(value, "a wait holds for steps; a constant is yielded at once, before it")
            block.arm.setdefault("emit", {})[key.value] = block.names.value(value)
        elif made:
            raise ProgramFault(value, "an output comes of one step; set a name to this value first, and yield the name")
        else:
            block.names.value(value)  # raises for a name that is not known
            text = "a step of this block is yielded, or, in an if, a constant; another value is set to a name that is yielded"
            raise ProgramFault(value, text)

    def _if(self, statement: ast.If, block: _ProgramBlock) -> None:
        arms: list[tuple[ast.expr | None, list[ast.stmt]]] = []
        rest: ast.If | None = statement
        while rest is not None:
            arms.append((rest.test, rest.body))
            inner = rest.orelse
            rest = inner[0] if len(inner) == 1 and isinstance(inner[0], ast.If) else None
            if inner and rest is None:
                arms.append((None, inner))
        results = set.intersection(*(_set_names(body) for _, body in arms)) if arms[-1][0] is None else set()
        if len(results) > 1:
            text = f"each arm sets {' and '.join(sorted(results))}; one name can be set in every arm"
            raise ProgramFault(statement, f"{text}, others are set after the if")
        result = next(iter(results), "")
        made, last = [], block
        for number, (test, body) in enumerate(arms, 1):
            arm: dict[str, Any] = {"when": f"${{{block.names.expression(test)}}}"} if test is not None else {"else": True}
            last = self._block({}, block.names, arm=arm, result=result, arm_number=number)
            self._run(body, last)
            made.append({**arm, **({"steps": last.steps} if last.steps else {})})
        if len(made) == 1 and not {"emit", "kill"} & made[0].keys():
            self._conditions(made[0]["when"], last, block)
        else:
            self._add(statement, result or f"if_{statement.lineno}", {SWITCH: made}, block)

    @staticmethod
    def _conditions(when: str, inner: _ProgramBlock, block: _ProgramBlock) -> None:
        """An `if` without else, emit and kill is a condition on each of its steps."""
        for name, step in inner.steps.items():
            also = step.pop("if", None)
            step["if"] = f"${{({when[2:-1]}) and ({also[2:-1]})}}" if also else when
            if needs := list(dict.fromkeys([*block.needs, *step.pop("needs", [])])):
                step["needs"] = needs
            if block.needs_any:
                step["needs_any"], block.needs_any = [*block.needs_any, *step.get("needs_any", [])], []
            block.steps[name] = step
            block.last, block.waits = name, False
        for name, binding in inner.names.names.items():
            if binding.block == inner.number:
                block.names.names[name] = NameBinding(binding.kind, binding.step, binding.type, binding.parts, block.number)

    def _for(self, statement: ast.For, block: _ProgramBlock) -> None:
        assert isinstance(statement.target, ast.Name)
        *body, last = statement.body
        match last:
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value], keywords=[])
            ):
                pass
            case _:
                raise ProgramFault(statement, "a loop ends with NAME.append(...), and NAME = [] is before the loop")
        known = block.names.names.get(name)
        if known is None or known.kind != "list":
            raise ProgramFault(last, f"{name} = [] is missing before the loop")
        if statement.target.id in block.names.names:
            raise ProgramFault(statement, f"the name {statement.target.id} is taken")
        inner = self._block({}, block.names)
        inner.names.names[statement.target.id] = NameBinding("variable", block=inner.number)
        self._run(body, inner)
        items = block.names.value(statement.iter)
        each = {"in": items, "as": statement.target.id, "steps": inner.steps, "value": inner.names.value(value)}
        self._add(statement, name, {EACH: each}, block)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )


def _is_chat(node: ast.expr, block: _ProgramBlock) -> bool:
    """True for the name of a chat step: its value is meant, not its messages."""
    return isinstance(node, ast.Name) and block.names.of(node).kind == CHAT


def _set_names(statements: Sequence[ast.stmt]) -> set[str]:
    """Names that a block sets, but for lists of loops."""
    found = set[str]()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not (isinstance(value, ast.List) and not value.elts):
                found.add(name)
            case ast.With(body=body):
                found |= _set_names(body)
    return found


def _set_in(statement: ast.stmt) -> set[str]:
    """All names that a statement sets, and lists that its loops fill."""
    found = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    for each in ast.walk(statement):
        match each:
            case ast.Attribute(value=ast.Name(id=name), attr="append"):
                found.add(name)
    return found


def _name_of(statement: ast.stmt) -> str:
    return {"Assign": "this assignment", "Expr": "this expression", "For": "this loop", "Return": "return here"}.get(
        type(statement).__name__, type(statement).__name__.lower()
    )
