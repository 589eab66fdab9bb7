"""`make mutants` takes hours; whether its table still fits the code shows here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_changes_one_place_into_other_valid_code(mutant: Mutant) -> None:
    text = Path(ROOT, mutant.file).read_text("utf-8")
    assert text.count(mutant.old) == 1
    changed = ast.dump(ast.parse(text.replace(mutant.old, mutant.new)))
    assert changed != ast.dump(ast.parse(text))


def test_no_mutant_is_listed_twice() -> None:
    assert len(set(MUTANTS)) == len(MUTANTS)
