"""The operator's workflows: the files of a directory, by name.

A file with errors is logged with each error. If it had none before, its former workflow stays. The workflows are replaced as a
whole, and a run keeps its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.features.workflows.language.compiling import PYTHON, YAML, compile_text
from gateway.features.workflows.language.faults import DocumentError, refused, suggestion
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.section import MODEL_PREFIX
from gateway.request.rights import Rights

PREFIX: Final = MODEL_PREFIX
OPERATOR, TENANT, INLINE = "operator", "tenant", "inline"
FORMS: Final[Mapping[str, str]] = {".yaml": YAML, ".yml": YAML, ".py": PYTHON}


@dataclass(frozen=True, slots=True)
class NamedWorkflow:
    """source: OPERATOR or TENANT. version: of a stored document; None: unversioned. modified_at: Unix seconds."""

    workflow: Workflow
    source: str = OPERATOR
    version: int | None = None
    modified_at: int = 0

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
            "source": self.source,
        }


class WorkflowLibrary:
    """Workflows by name."""

    def __init__(self) -> None:
        self.workflows: Mapping[str, NamedWorkflow] = {}
        self._files: Mapping[str, NamedWorkflow] = {}

    def read(self, directory: Path) -> list[str]:
        """Read all files; a file with errors keeps its former workflow. Returns the errors, a line each. Raises OSError."""
        files: dict[str, NamedWorkflow] = {}
        names = set[str]()
        problems: list[str] = []
        for path in sorted(each for each in directory.iterdir() if each.suffix in FORMS and each.is_file()):
            former = self._files.get(path.name)
            try:
                named = _compiled(path)
                if named.workflow.name in names:
                    raise refused("name", f"the workflow {named.workflow.name!r} is in another file, too")
            except DocumentError as error:
                problems += [
                    f"{path.name}: line {each.line}: {each}" if each.line else f"{path.name}: {each}" for each in error.faults
                ]
                if former is None or former.workflow.name in names:
                    continue
                named = former
            files[path.name] = named
            names.add(named.workflow.name)
        self._files = files
        self.workflows = {named.workflow.name: named for named in files.values()}
        return problems

    def model_entries(self) -> dict[str, bytes]:
        """Entries of a list of models: the workflows whose answer is a text."""
        entries: dict[str, bytes] = {}
        for name, named in self.workflows.items():
            if named.workflow.primary is not None:
                about = {"id": PREFIX + name, "object": "model", "created": named.modified_at, "owned_by": "warmroute"}
                entries[PREFIX + name] = orjson.dumps(about)
        return entries

    def find(self, name: str) -> NamedWorkflow | None:
        return self.workflows.get(name)

    def suggestion(self, name: str, grant: Rights | None) -> str:
        """A hint for an unknown name."""
        return suggestion(name, [each for each in self.workflows if grant is None or grant.allows(PREFIX + each)])


def _compiled(path: Path) -> NamedWorkflow:
    """Raises DocumentError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1).decode("utf-8", "replace")
            modified_at = int(os.fstat(file.fileno()).st_mtime)
    except OSError as error:
        raise refused("", f"the file cannot be read: {error.strerror}") from None
    return NamedWorkflow(compile_text(text, FORMS[path.suffix]), modified_at=modified_at)
