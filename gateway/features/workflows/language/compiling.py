"""From a text, or plain values, to a `Workflow`: the whole check of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from gateway.features.workflows.language.completing import completed
from gateway.features.workflows.language.faults import MAX_FAULTS, DocumentError, DocumentFaults, located, suggestion
from gateway.features.workflows.language.fields import OUTPUT_NAME, WORKFLOW_NAME, FieldReader
from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.inputs import read_declarations
from gateway.features.workflows.language.keys import DEFAULT_KEYS, DOCUMENT_KEYS, LIMITS, MAX_MODEL_CHARS, TOKENS, VERSION
from gateway.features.workflows.language.python_form import compile_program
from gateway.features.workflows.language.reading import SourceValue, check_plain, member, read_json, read_yaml
from gateway.features.workflows.language.scopes import check_outputs, check_scopes
from gateway.features.workflows.language.steps import MAX_STEPS, StepDefaults, StepReader, read_sampling
from gateway.features.workflows.language.templates import ValueTemplate
from gateway.features.workflows.language.workflow import RunLimits, Workflow

JSON, YAML, PYTHON = "json", "yaml", "python"
_READERS: Final[Mapping[str, Callable[[str], SourceValue]]] = {JSON: read_json, YAML: read_yaml, PYTHON: compile_program}


def compile_text(text: str, form: str) -> Workflow:
    """A workflow from the text of a document or a program. form: JSON, YAML or PYTHON. Raises DocumentError, with lines."""
    source = _READERS[form](text)
    try:
        workflow = compile_document(source.value)
    except DocumentError as error:
        raise located(DocumentError([*source.faults, *error.faults][:MAX_FAULTS]), source.lines) from None
    if source.faults:
        raise DocumentError(source.faults)
    return workflow


def compile_document(source: Any) -> Workflow:
    """A workflow from the plain values of its document. Raises DocumentError with up to 20 errors."""
    check_plain(source)
    faults = DocumentFaults()
    reader = FieldReader(faults)
    fields = reader.fields(source, "", DOCUMENT_KEYS)
    if fields.members.get("workflow") != VERSION or fields.members["workflow"] is True:  # True equals 1
        fields.fault("workflow", f"the version of the language is expected: workflow: {VERSION}")
    for key in ("name", "steps"):
        if key not in fields:
            fields.fault(key, "this key is missing")
    name, description = fields.name("name", WORKFLOW_NAME) or "", fields.text("description") or ""
    inputs = read_declarations(fields.members.get("inputs", {}), reader)
    defaults = _defaults(reader, fields.members.get("defaults", {}))
    step_reader = StepReader(reader, defaults)
    steps = step_reader.block(fields.members["steps"], "steps") if "steps" in fields else {}
    steps = completed(steps, defaults.model, inputs, faults)
    outputs = _outputs(reader, fields.members["outputs"]) if "outputs" in fields else None
    limits = _limits(reader, fields.members.get("limits", {}))
    graph = StepGraph(steps)
    check_scopes(graph, inputs, step_reader.paths, faults)
    yields = check_outputs(graph, inputs, outputs or {}, step_reader.paths, faults)
    primary = _primary(fields.members.get("primary"), {*yields, *(outputs or {})}, faults)
    faults.require_none()
    return Workflow(name, description, inputs, steps, outputs, primary, limits, graph, source)


def _defaults(reader: FieldReader, value: Any) -> StepDefaults:
    fields = reader.fields(value, "defaults", DEFAULT_KEYS)
    return StepDefaults(
        fields.constant_text("model", MAX_MODEL_CHARS), fields.number("max_tokens", TOKENS), read_sampling(fields)
    )


def _outputs(reader: FieldReader, value: Any) -> Mapping[str, ValueTemplate]:
    named = reader.named(value, "outputs", OUTPUT_NAME, MAX_STEPS)
    return {name: reader.template(each, member("outputs", name)) for name, each in named.items()}


def _limits(reader: FieldReader, value: Any) -> RunLimits:
    fields = reader.fields(value, "limits", LIMITS)
    return RunLimits(**{key: fields.number(key, bounds) for key, bounds in LIMITS.items()})


def _primary(value: Any, names: Iterable[str], faults: DocumentFaults) -> str | None:
    """The name of the primary output: the given one, else that of the only output. None: there is none."""
    known = sorted(names)
    if value is None:
        return known[0] if len(known) == 1 else None
    if value in known:
        return str(value)
    text = f"there is no output {value!r:.80}; outputs are the names that steps yield; {suggestion(str(value), known)}"
    faults.add("primary", text)
    return None
