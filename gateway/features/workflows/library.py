"""The operator's workflows: the files of a directory, by name. A file with errors is left out, and logged with each error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.errors import GatewayError
from gateway.features.workflows.language.compiling import PYTHON, YAML, compile_text
from gateway.features.workflows.language.faults import DocumentError, refused, suggestion
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES
from gateway.features.workflows.language.workflow import Workflow
from gateway.request.client import Caller

log = logging.getLogger("warmroute.workflows")

PREFIX: Final = "workflow:"
OPERATOR: Final = "operator"
FORMS: Final[Mapping[str, str]] = {".yaml": YAML, ".yml": YAML, ".py": PYTHON}


@dataclass(frozen=True, slots=True)
class NamedWorkflow:
    """version: changes with the document; None: unversioned."""

    workflow: Workflow
    version: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Its entry in GET /v1/workflows."""
        workflow = self.workflow
        inputs = {
            name: {"type": each.type, "required": each.required}
            | ({"default": each.default} if each.default is not None else {})
            for name, each in workflow.inputs.items()
        }
        return {
            "name": workflow.name,
            "version": self.version,
            "description": workflow.description,
            "inputs": inputs,
            "primary": workflow.primary,
            "source": OPERATOR,
        }


class WorkflowLibrary:
    """Workflows by name."""

    def __init__(self) -> None:
        self.workflows: dict[str, NamedWorkflow] = {}

    def read(self, directory: Path) -> list[str]:
        """Read all files; a file with errors keeps its former workflow. Returns the errors, a line each. Raises OSError."""
        texts = {path: _text(path) for path in sorted(directory.iterdir()) if path.suffix in FORMS and path.is_file()}
        found: dict[str, NamedWorkflow] = {}
        problems: list[str] = []
        for path, text in texts.items():
            try:
                named = _compiled(text, FORMS[path.suffix])
                if named.workflow.name in found:
                    raise refused("name", f"the workflow {named.workflow.name!r} is in another file, too")
                found[named.workflow.name] = named
            except DocumentError as error:
                problems += [
                    f"{path.name}: line {each.line}: {each}" if each.line else f"{path.name}: {each}" for each in error.faults
                ]
                if (old := self.workflows.get(path.stem)) is not None:
                    found.setdefault(path.stem, old)
        self.workflows = found
        return problems

    def find(self, reference: str, caller: Caller) -> NamedWorkflow:
        """reference: NAME or NAME@N. Raises GatewayError 403 or 404."""
        name, _, version = reference.partition("@")
        if caller.grant is not None and not caller.grant.allows(PREFIX + name):
            text = f"The key {caller.grant.id} may not use the workflow {name[:63]!r}."
            raise GatewayError(403, "workflow_not_allowed", text, param="workflow")
        found = self.workflows.get(name)
        if found is None or (version and version != str(found.version)):
            hint = suggestion(
                name, [each for each in self.workflows if caller.grant is None or caller.grant.allows(PREFIX + each)]
            )
            raise GatewayError(404, "workflow_not_found", f"There is no workflow {reference[:80]!r}; {hint}", param="workflow")
        return found

    def listed(self, caller: Caller) -> list[NamedWorkflow]:
        """The workflows that a caller may use."""
        grant = caller.grant
        return [each for name, each in self.workflows.items() if grant is None or grant.allows(PREFIX + name)]


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_DOCUMENT_BYTES + 1).decode("utf-8", "replace")


def _compiled(text: str, form: str) -> NamedWorkflow:
    return NamedWorkflow(compile_text(text, form))
