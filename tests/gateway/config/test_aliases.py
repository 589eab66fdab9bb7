"""Aliases: what a name stands for, and which configurations are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.advice import warnings_of
from gateway.config.aliases import MAX_ALIASES, MAX_NAME_CHARS, STAR, Aliases, chains
from gateway.config.live import Live
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.features.table import read
from tests.support.configs import load

POOLS = [{"replicas": ["http://127.0.0.1:9001"]}]
names = st.text(alphabet="ab-", max_size=4)
aliases = st.dictionaries(
    st.builds(str.__add__, names, st.sampled_from(["", STAR])).filter(bool), names.filter(bool), max_size=8
)


def config(model_aliases: Any, **more: Any) -> Config:
    return load(None, {"pools": POOLS, **more, "model_aliases": model_aliases}, env={})


def oracle(table: dict[str, str], name: str) -> str:
    """One entry after the other."""
    if name in table and not name.endswith(STAR):
        return table[name]
    fitting = [alias for alias in table if alias.endswith(STAR) and name.startswith(alias[:-1])]
    return table[max(fitting, key=len)] if fitting and name else ""


@given(aliases, st.builds(str.__add__, names, st.sampled_from(["", STAR])))
def test_the_exact_name_wins_then_the_longest_beginning(table: dict[str, str], name: str) -> None:
    assert Aliases(table).of(name) == oracle(table, name)


def test_a_request_without_a_model_has_no_alias() -> None:
    assert Aliases({"*": "m"}).of("") == ""
    assert Aliases({"*": "m"}).of("x") == "m"


@given(aliases)
def test_what_no_chain_is_found_in_is_looked_up_once(table: dict[str, str]) -> None:
    found = {alias for alias, _, _ in chains(table)}
    of = Aliases(table).of
    for alias, model in table.items():
        assert (alias in found) == (of(model) not in ("", model))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"a": "b", "b": "c"}, "model_aliases.a: 'b' is itself an alias, of 'c'"),
        ({"claude-*": "big", "*": "small"}, "model_aliases.claude-*: 'big' is itself an alias, of 'small'"),
        ({"cl*x": "m"}, "write 'cl*', or each name"),
        ({"a": "b*"}, "without a star"),
        ({"a\x07": "b"}, "printable characters"),
        ({"a": "\ud800"}, "printable characters"),
        ({"": "b"}, "a name of 1 to 256 characters"),
        ({"a": ""}, "the name of one model, of 1 to 256 characters"),
        ({"a" * (MAX_NAME_CHARS + 1): "b"}, "a name of 1 to 256 characters"),
        ({"a": "b" * (MAX_NAME_CHARS + 1)}, "the name of one model, of 1 to 256 characters"),
        ({"a": 5}, "got 5: put it in quotes if that is the name"),
        ({5: "a"}, "got 5: put it in quotes if that is the name"),
        ({True: "a"}, "got True: put it in quotes if that is the name"),
        (False, "({}: none) is expected, got False"),
        ([1], "a mapping of names to models such as {claude-*: qwen3-coder} ({}: none) is expected, got [1]"),
        ({str(number): "m" for number in range(MAX_ALIASES + 1)}, "at most 1024 are possible, got 1025"),
    ],
)
def test_what_cannot_be_an_alias(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^model_aliases") as caught:
        config(raw)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "raw", [{"*": "m"}, {"claude-*": "claude-local"}, {"claude-*": "big", "*": "small", "big": "big"}, {"a": "b", "c": "b"}, {}]
)
def test_what_can(raw: dict[str, str]) -> None:
    loaded = config(raw)
    assert loaded.model_aliases == raw
    made = Live(loaded).aliases
    assert (made.names if made else {}) == raw


def test_as_many_aliases_as_possible_are_checked_and_looked_up() -> None:
    """Each beginning has another length, as far as names can: the most that a look-up may cost."""
    most = {
        ("x" * (number % MAX_NAME_CHARS) + str(number))[-(MAX_NAME_CHARS - 1) :] + "*": "m" for number in range(MAX_ALIASES)
    }
    table = config(most).model_aliases
    assert len(table) == MAX_ALIASES
    assert Aliases(table).of("y" * MAX_NAME_CHARS) == ""


@pytest.mark.parametrize("models", [["qwen"], ["*"], []])
def test_an_alias_of_what_no_pool_serves_is_a_warning(models: list[str]) -> None:
    raw = {"pools": [{**POOLS[0], "models": models}], "model_aliases": {"a": "qwen3", "b": "llama", "c": "workflow:support"}}
    found = [str(warning) for warning in warnings_of(read(None, raw, env={}))]
    assert found == (["model_aliases.b: no pool serves a model with the name 'llama'"] if models == ["qwen"] else [])
