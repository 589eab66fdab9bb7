"""The JSON Schema of documents beside the reader: it accepts each valid document, and refuses what an editor can find."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given

from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.faults import DocumentError
from gateway.features.workflows.language.json_schema import document_schema
from gateway.features.workflows.language.reading import read_yaml
from tests.gateway.features.workflows.language.test_documents import DOCUMENT, REMOVED, changed, faults_of
from tests.gateway.features.workflows.language.test_hostile import DOCUMENTS, MANY, documents
from tests.gateway.features.workflows.language.test_programs import NAMES
from tests.support.paths import WORKFLOWS

SCHEMA = document_schema()
EDITOR = jsonschema.Draft202012Validator(SCHEMA)


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", NAMES)
def test_the_acceptance_programs(name: str) -> None:
    EDITOR.validate(read_yaml((WORKFLOWS / f"{name}.yaml").read_text("utf-8")).value)


@pytest.mark.parametrize("document", [DOCUMENT, *DOCUMENTS])
def test_valid_documents(document: Any) -> None:
    EDITOR.validate(document)


@MANY
@given(documents())
def test_a_document_that_the_reader_accepts_is_accepted(document: Any) -> None:
    """So an editor marks nothing that would run."""
    try:
        compile_document(copy.deepcopy(document))
    except DocumentError:
        return
    EDITOR.validate(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("workflow", 2),
        ("workflow", True),
        ("name", REMOVED),
        ("name", "My Flow"),
        ("stepz", {}),
        ("steps", {}),
        ("inputs/m/type", "text"),
        ("inputs/m/type", REMOVED),
        ("inputs/t/max_length", 0),
        ("defaults/max_tokens", 0),
        ("defaults/temperature", 3),
        ("limits", {"calls": 0}),
        ("limits", {"minutes": 1}),
        ("steps/a/chat/modell", "q"),
        ("steps/a/chat/model", "${inputs.t}"),
        ("steps/a/let", 1),
        ("steps/a/chat", REMOVED),
        ("steps/a/timeout_s", 0),
        ("steps/a/retry", {"max": 4}),
        ("steps/a/on_error", "ignore"),
        ("steps/a/yield", {"stream": "delta"}),
        ("steps/a/yield", {"as": "a", "stream": "all"}),
        ("steps/a/if", "true"),
        ("steps/a/needs", "b"),
        ("steps/b/chat/append/0/role", "robot"),
        ("steps/b/chat/append/0/content", REMOVED),
        ("steps/b/chat/output", "text"),
        ("steps/b/chat/choices", ["x", "x"]),
        ("steps/b/chat/extra", {"n": 2}),
        ("steps/c/switch/0/when", REMOVED),
        ("steps/c/switch/1/else", False),
        ("steps/c/switch/0/steps/c1/let", REMOVED),
        ("steps/d/each/as", REMOVED),
        ("steps/d/each/in", "b"),
        ("outputs", {"1": 1}),
    ],
)
def test_mistakes_that_an_editor_finds(path: str, value: Any) -> None:
    document = changed(path, value)
    assert not EDITOR.is_valid(document)
    assert faults_of(document)
