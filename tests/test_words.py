"""Names of classes: nouns, each for one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts import structure_words
from scripts.structure_source import Source
from tests.support.paths import ROOT
from tests.support.rules import tree_of

pytestmark = pytest.mark.usefixtures("trees")

SOURCES = sorted(path for package in ("router", "gateway", "replica") for path in (ROOT / package).rglob("*.py"))

# One capitalised word that is no noun: participles, adverbs, pronouns.
NO_NOUNS = re.compile(r"_?[A-Z][a-z]+ed")
OTHERS = frozenset(
    [
        "After",
        "Again",
        "Before",
        "Begun",
        "Bye",
        "Drawn",
        "Given",
        "Gone",
        "Held",
        "Known",
        "Late",
        "Later",
        "Left",
        "Lost",
        "Made",
        "Newest",
        "Other",
        "Others",
        "Said",
        "Seen",
        "Sent",
        "Shown",
        "Spent",
        "Taken",
        "Those",
        "Told",
        "Unread",
        "Untaken",
        "Whole",
        "Written",
    ]
)
NOUNS = frozenset(["Feed", "Speed"])  # that look like participles


@cache
def classes() -> list[tuple[str, str]]:
    return [(node.name, path.relative_to(ROOT).as_posix()) for path in SOURCES for node in classes_in(path)]


def classes_in(path: Path) -> Iterator[ast.ClassDef]:
    """Classes in a module, and in its classes and functions; expressions have none."""
    left: list[ast.AST] = [tree_of(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.ClassDef):
            yield node
        left += (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def test_names_of_classes_are_nouns() -> None:
    wrong = [
        (name, place)
        for name, place in classes()
        if (NO_NOUNS.fullmatch(name) and name not in NOUNS) or name.strip("_") in OTHERS
    ]
    assert not wrong


def test_a_public_class_has_a_name_of_its_own() -> None:
    counts = Counter(name for name, _ in classes() if not name.startswith("_"))
    assert not {name: [place for other, place in classes() if other == name] for name, count in counts.items() if count > 1}


def prose() -> Source:
    """The product's files and the scripts'."""
    source = Source(ROOT)
    source.texts |= {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "scripts").rglob("*.py")}
    return source


def test_docstrings_and_comments_name_their_subject() -> None:
    source = prose()
    assert not structure_words.docstrings_that_begin_badly(source)
    assert not {phrase: files for phrase, files in structure_words.clauses(source).items() if files}


def test_no_class_is_a_bare_word() -> None:
    assert not [(name, place) for name, place in classes() if structure_words.is_bare(name)]
