"""Workflows in files of users, for commands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gateway.commands.streams import escaped
from gateway.features.workflows.language.compiling import JSON, PYTHON, YAML, compile_text
from gateway.features.workflows.language.faults import DocumentFault, refused
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES
from gateway.features.workflows.language.workflow import Workflow


def workflow_in(path: Path) -> Workflow:
    """Raises DocumentError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1).decode()
    except OSError as error:
        raise refused("", f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise refused("", f"the file is not UTF-8: {error.reason} at byte {error.start:,}") from None
    return compile_text(text, {".py": PYTHON, ".json": JSON}.get(path.suffix, YAML))


def fault_lines(path: Path, faults: Iterable[DocumentFault]) -> str:
    """The errors of a file for a terminal, a line each."""
    places = ((f"{path}:{fault.line}" if fault.line else f"{path}", fault) for fault in faults)
    return "\n".join(escaped(f"warmroute: {at}: {fault}") for at, fault in places)
