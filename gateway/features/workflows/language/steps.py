"""Steps of a document as values: every key, its type and its bounds. Names of other steps are checked by `graph.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.features.workflows.language.constraints import (
    MAX_CHOICES,
    SHORT_FORMS,
    AnswerConstraint,
    check_schema,
    choice_constraint,
)
from gateway.features.workflows.language.document import (
    ConnectorCall,
    EachItem,
    LetValue,
    ModelCall,
    OutputRule,
    Replacement,
    SwitchArm,
    SwitchArms,
    Work,
    WorkflowStep,
)
from gateway.features.workflows.language.faults import TOO_LARGE, refused, shown
from gateway.features.workflows.language.fields import OUTPUT_NAME, STEP_NAME, VARIABLE_NAME, WORKFLOW_NAME, FieldReader, Fields
from gateway.features.workflows.language.keys import (
    ARM_KEYS,
    CALL_KEYS,
    CHAT_KEYS,
    EACH_KEYS,
    ERRORS,
    MAX_MODEL_CHARS,
    NOT_EXTRA,
    RETRIES,
    ROLES,
    SAMPLING,
    SAMPLING_NUMBERS,
    STEP_KEYS,
    STREAMS,
    TEXT_KEYS,
    TIMEOUT_S,
    TOKENS,
    YIELD_KEYS,
)
from gateway.features.workflows.language.reading import member
from gateway.features.workflows.language.results import CALL, CHAT, EACH, KINDS, LET, SWITCH, TEXT
from gateway.features.workflows.language.templates import ValueTemplate

MAX_STEPS: Final = 64
MAX_BLOCKS: Final = 4  # one within the other
MAX_ITEMS: Final = 64
MAX_ARMS: Final = 16
MAX_MESSAGES: Final = 256
_LATER_KINDS: Final = ("repeat", "run")  # of steps, in a later version of the language
_RESERVED_NAMES: Final = (*_LATER_KINDS, "inputs")


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """The member `defaults` of a document."""

    model: str = ""
    max_tokens: int | None = None
    sampling: Mapping[str, ValueTemplate] = field(default_factory=dict)


class StepReader:
    """Reads the steps of one document. paths: of all steps, by name, also of steps that could not be read."""

    def __init__(self, reader: FieldReader, defaults: StepDefaults) -> None:
        self.paths: dict[str, str] = {}
        self._reader = reader
        self._defaults = defaults
        self._works: Mapping[str, Callable[[Any, str], Work]] = {
            CHAT: self._chat,
            TEXT: self._text,
            CALL: self._call,
            LET: lambda value, path: LetValue(self._reader.template(value, path)),
            SWITCH: self._switch,
            EACH: self._each,
        }
        self._depth = 0

    def block(self, value: Any, path: str) -> dict[str, WorkflowStep]:
        """Steps by name. Names are unique in the whole document."""
        faults = self._reader.faults
        self._depth += 1
        if self._depth > MAX_BLOCKS:
            raise refused(path, f"steps are nested more than {MAX_BLOCKS} deep")
        if value == {}:
            faults.add(path, "a step is expected here: steps are never empty")
        made: dict[str, WorkflowStep] = {}
        for name, each in self._reader.named(value, path, STEP_NAME, MAX_STEPS).items():
            place = member(path, name)
            if name in _RESERVED_NAMES:
                faults.add(place, f"the name {name!r} is reserved; choose another one")
            elif name in self.paths:
                faults.add(place, f"the name is taken by {self.paths[name]}; each step has a name of its own")
            else:
                self.paths[name] = place
                if len(self.paths) > MAX_STEPS:
                    raise refused(place, f"a workflow has at most {MAX_STEPS} steps", TOO_LARGE)
                if step := self._step(name, each, place):
                    made[name] = step
        self._depth -= 1
        return made

    def _step(self, name: str, value: Any, path: str) -> WorkflowStep | None:
        if isinstance(value, dict) and (later := [key for key in _LATER_KINDS if key in value]):
            self._reader.faults.add(member(path, later[0]), "this kind of step is reserved for a later version")
            return None
        fields = self._reader.fields(value, path, STEP_KEYS)
        kinds = [kind for kind in KINDS if kind in fields]
        if not fields.given:
            return None
        if len(kinds) != 1:
            got = " and ".join(kinds) or "none of them"
            fields.fault("", f"a step has exactly one of {', '.join(KINDS)}; this one has {got}")
            return None
        skips, replacement = self._on_error(fields)
        work = self._works[kinds[0]](fields.members[kinds[0]], fields.at(kinds[0]))
        retry = self._reader.fields(fields.members["retry"], fields.at("retry"), ("max",)) if "retry" in fields else None
        return WorkflowStep(
            name,
            path,
            work,
            needs=fields.names("needs"),
            needs_any=fields.names("needs_any"),
            condition=fields.expression("if"),
            output=self._output(fields, work.kind),
            kills=fields.names("kill"),
            timeout_s=fields.number("timeout_s", TIMEOUT_S),
            retries=retry.number("max", RETRIES) if retry else None,
            skips_on_error=skips,
            replacement=replacement,
        )

    def _on_error(self, fields: Fields) -> tuple[bool, Replacement | None]:
        value = fields.members.get("on_error", "fail")
        if isinstance(value, dict):
            inner = self._reader.fields(value, fields.at("on_error"), ("value",))
            made = inner.template("value")
            return False, Replacement(made) if made else None
        if value not in ERRORS:
            fields.expected("on_error", "fail, skip or {value: X}")
        return value == "skip", None

    def _output(self, fields: Fields, kind: str) -> OutputRule | None:
        if "yield" not in fields:
            return None
        value = fields.members["yield"]
        if isinstance(value, str):
            value = {"as": value}
        inner = self._reader.fields(value, fields.at("yield"), YIELD_KEYS)
        if "as" not in inner:
            inner.fault("as", "the name of the output is missing")
        stream = inner.members.get("stream", "")
        if "stream" in inner and stream not in STREAMS:
            inner.expected("stream", "delta or snapshot")
        elif stream and kind not in (CHAT, TEXT):
            inner.fault("stream", f"only chat and text steps can be streamed; this is a {kind} step")
        elif stream and "value" in inner:
            inner.fault("stream", "only the text of a step can be streamed; leave value or stream out")
        return OutputRule(inner.name("as", OUTPUT_NAME) or "", inner.template("value"), str(stream))

    # -- calls of models

    def _chat(self, value: Any, path: str) -> ModelCall:
        fields = self._reader.fields(value, path, CHAT_KEYS)
        source, opening = None, None
        if "${" in str(fields.members.get("from")):
            opening = fields.expression("from")
        elif "from" in fields and not STEP_NAME.fullmatch(str(fields.members["from"])):
            fields.expected("from", 'a step, or messages such as "${inputs.NAME}"')
        else:
            source = fields.name("from", STEP_NAME)
        if "from" not in fields and "append" not in fields:
            fields.fault("", "from (a step, or messages as ${...}) or append (a list of messages) is missing")
        return self._model_call(CHAT, fields, source, opening, self._messages(fields))

    def _messages(self, fields: Fields) -> ValueTemplate | None:
        value = fields.members.get("append")
        if "append" not in fields:
            return None
        if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
            fields.expected("append", f"a list of 1 to {MAX_MESSAGES} messages")
            return None
        made = fields.template("append")
        for at, (raw, each) in enumerate(zip(value, made.items if made else (), strict=False)):
            key = f"append[{at}]"
            if isinstance(raw, dict):
                if raw.get("role") not in ROLES:
                    fields.fault(f"{key}.role", f"one of {', '.join(ROLES)} is expected, got {shown(raw.get('role'))}")
                if "content" not in raw and "tool_calls" not in raw:
                    fields.fault(f"{key}.content", "the content of the message is missing")
            elif each.expression is None:
                text = 'a message such as {role: user, content: "..."}, or "${...}" that gives messages,'
                fields.fault(key, f"{text} is expected, got {shown(raw)}")
        return made

    def _text(self, value: Any, path: str) -> ModelCall:
        fields = self._reader.fields(value, path, TEXT_KEYS)
        if ("prompt" in fields) == ("from" in fields):
            fields.fault("", "exactly one of prompt (a text) and from (a text step that it goes on from) is expected")
        if "append" in fields and "from" not in fields:
            fields.fault("append", "only a step with from has append; write one prompt")
        source = fields.name("from", STEP_NAME)
        return self._model_call(TEXT, fields, source, fields.text_template("prompt"), fields.text_template("append"))

    def _model_call(
        self, kind: str, fields: Fields, source: str | None, opening: ValueTemplate | None, append: ValueTemplate | None
    ) -> ModelCall:
        sampling = read_sampling(fields)
        return ModelCall(
            kind,
            fields.constant_text("model", MAX_MODEL_CHARS),  # completed by `completing.py`
            source,
            opening,
            append,
            fields.number("max_tokens", TOKENS) or self._defaults.max_tokens,
            {**self._defaults.sampling, **sampling},
            self._constraint(fields),
            fields.template("tools"),
            fields.template("tool_choice"),
            self._extra(fields),
        )

    def _constraint(self, fields: Fields) -> AnswerConstraint | None:
        if "choices" in fields and "output" in fields:
            fields.fault("output", "a step has choices or output, not both")
        if "choices" in fields:
            choices = fields.members["choices"]
            texts = isinstance(choices, list) and all(isinstance(each, str) and each for each in choices)
            if not texts or not 0 < len(choices) <= MAX_CHOICES or len(set(choices)) < len(choices):
                fields.expected("choices", f"a list of 1 to {MAX_CHOICES} different texts")
                return None
            fields.without_expressions("choices", *choices)
            return choice_constraint(tuple(choices))
        if "output" not in fields:
            return None
        schema = fields.members["output"]
        if isinstance(schema, str):
            if schema not in SHORT_FORMS:
                fields.expected("output", f"{', '.join(SHORT_FORMS)} or a JSON schema")
            return AnswerConstraint(SHORT_FORMS.get(schema, {}))
        before = len(self._reader.faults.found)
        check_schema(schema, fields.at("output"), self._reader.faults)
        return AnswerConstraint(schema) if len(self._reader.faults.found) == before else None

    def _extra(self, fields: Fields) -> ValueTemplate | None:
        value = fields.members.get("extra", {})
        if not isinstance(value, dict):
            fields.expected("extra", "an object")
            return None
        for key in [key for key in value if key in NOT_EXTRA]:
            fields.fault(member("extra", key), "this member of the request is set by the workflow, or not allowed")
        return fields.template("extra")

    # -- all others

    def _call(self, value: Any, path: str) -> ConnectorCall:
        fields = self._reader.fields(value, path, CALL_KEYS)
        if "use" not in fields:
            fields.fault("use", "the name of a connector is missing")
        arguments = fields.template("with") or ValueTemplate(fields.at("with"), {})
        return ConnectorCall(fields.name("use", WORKFLOW_NAME) or "", arguments)

    def _switch(self, value: Any, path: str) -> SwitchArms:
        if not isinstance(value, list) or not 0 < len(value) <= MAX_ARMS:
            self._reader.faults.add(path, f"a list of 1 to {MAX_ARMS} arms is expected, got {shown(value)}")
            return SwitchArms(())
        last = len(value) - 1
        return SwitchArms(tuple(self._arm(each, f"{path}[{at}]", at == last) for at, each in enumerate(value)))

    def _arm(self, value: Any, path: str, last: bool) -> SwitchArm:
        fields = self._reader.fields(value, path, ARM_KEYS)
        if "else" in fields:
            if fields.members["else"] is not True:
                fields.expected("else", "true")
            if not last:
                fields.fault("else", "only the last arm is else: the first arm whose condition is true is taken")
            if "when" in fields:
                fields.fault("when", "an arm has when or else, not both")
        elif "when" not in fields and fields.given:
            fields.fault("when", 'a condition is missing: when: "${...}", or else: true in the last arm')
        emit = self._reader.named(fields.members.get("emit", {}), fields.at("emit"), OUTPUT_NAME, MAX_STEPS)
        return SwitchArm(
            fields.expression("when"),
            {name: self._reader.template(each, member(fields.at("emit"), name)) for name, each in emit.items()},
            fields.names("kill"),
            self.block(fields.members["steps"], fields.at("steps")) if "steps" in fields else {},
            fields.template("value"),
        )

    def _each(self, value: Any, path: str) -> EachItem:
        fields = self._reader.fields(value, path, EACH_KEYS)
        for key in EACH_KEYS:
            if key not in fields:
                fields.fault(key, "this key is missing; each has in, as, steps and value")
        items = fields.template("in") or ValueTemplate(fields.at("in"), [])
        if not isinstance(items.value, list) and items.expression is None:
            fields.expected("in", 'a list, or an expression such as "${...}"')
        return EachItem(
            items,
            fields.name("as", VARIABLE_NAME) or "",
            self.block(fields.members.get("steps", {}), fields.at("steps")),
            fields.template("value") or ValueTemplate(fields.at("value"), None),
        )


def read_sampling(fields: Fields) -> dict[str, ValueTemplate]:
    """Sampling fields: numbers and texts within the bounds of the APIs, or expressions."""
    made: dict[str, ValueTemplate] = {}
    for key in SAMPLING:
        value = fields.members.get(key)
        if key not in fields:
            continue
        if key in SAMPLING_NUMBERS and not isinstance(value, str):
            fields.number(key, SAMPLING_NUMBERS[key])
        elif key in SAMPLING_NUMBERS:
            fields.expression(key, 'a number, or an expression such as "${...}"')
        elif not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            fields.expected(key, "a text or a list of texts")
        if found := fields.template(key):
            made[key] = found
    return made
