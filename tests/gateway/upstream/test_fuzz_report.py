"""The fuzzers' page: its content for good and for bad runs."""

from __future__ import annotations

from subprocess import CompletedProcess

from scripts.fuzzing.report import Fuzzed, fuzz, page


def test_a_fuzzer_is_run_and_its_inputs_are_counted() -> None:
    found = fuzz("tap", "at random", seconds=1, seed=5)
    assert found.found == ""
    assert found.tried > 1  # in a second of a busy machine
    assert int(found.outcomes) > 1
    assert found.seed == 5


def test_what_was_measured_is_on_the_page() -> None:
    run = Fuzzed("shapes", "at random", 5, 7, "3", "2", "", ("It took 5 ms.",))
    assert "- shapes: It took 5 ms." in list(page("Made here.", [run], ""))


def test_a_fuzzer_that_ends_badly_is_a_bug_with_its_last_words() -> None:
    ended = CompletedProcess((), 1, "seed 5\n", "Traceback\nAssertionError: a bug")
    found = fuzz("tap", "at random", seconds=1, seed=5, run=lambda _command: ended)
    assert found.found.endswith("AssertionError: a bug")
    text = "\n".join(page("Made here.", [found, Fuzzed("answers", "atheris", 5, 12_345, "", "", "")], "| a table |"))
    assert "| at random | 5 | 0 |  |  | **1** |" in text
    assert "| atheris | 5 | 12,345 |  |  | 0 |" in text
    assert "AssertionError: a bug" in text
    assert text.endswith("| a table |")
