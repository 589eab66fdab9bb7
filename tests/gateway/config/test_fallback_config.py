"""Fallbacks of pools in the configuration: what is taken, and what is refused, with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.cluster.messages import decode_config, encode_config
from gateway.commands.advice import warnings_of
from gateway.commands.cli import main
from gateway.config.json_schema import config_schema
from gateway.config.parse import ConfigError
from gateway.config.schema import MAX_FALLBACKS, MAX_POOLS, FallbackConfig
from gateway.features.table import WholeConfig, read
from tests.support.configs import load


def pool(name: str, fallback: Any = None, **more: Any) -> dict[str, Any]:
    raw = {"name": name, "replicas": [f"http://{name or 'unnamed'}:8000"], **more}
    return raw if fallback is None else {**raw, "fallback": fallback}


def fallbacks(*pools: dict[str, Any], **more: Any) -> list[FallbackConfig | None]:
    return [each.fallback for each in load(None, {"pools": list(pools), **more}, env={}).pools]


def chain(length: int) -> list[dict[str, Any]]:
    return [*(pool(f"p{number}", f"p{number + 1}") for number in range(length)), pool(f"p{length}")]


def test_another_pool_by_its_name_with_a_model_or_without() -> None:
    assert fallbacks(pool("a", "b"), pool("b")) == [FallbackConfig("b"), None]
    assert fallbacks(pool("a", {"pool": "b", "model": "x"}), pool("b")) == [FallbackConfig("b", "x"), None]


def test_a_pool_may_have_the_name_of_its_models() -> None:
    assert fallbacks(pool("a", "qwen3"), pool("", models=["qwen3"])) == [FallbackConfig("qwen3"), None]


def test_several_pools_may_share_one_and_a_chain_may_be_long() -> None:
    assert len(fallbacks(pool("a", "c"), pool("b", "c"), pool("c"))) == 3
    assert len(fallbacks(*chain(MAX_FALLBACKS))) == MAX_FALLBACKS + 1


@pytest.mark.parametrize(
    ("pools", "messages"),
    [
        ([pool("a", "a")], ["pools[0].fallback.pool: the pool 'a' cannot be its own fallback"]),
        ([pool("a", "c"), pool("b")], ["pools[0].fallback.pool: 'c' is no pool's name; possible are: b"]),
        ([pool("a", "c")], ["pools[0].fallback.pool: 'c' is no pool's name; possible are: none: there is no other pool"]),
        (
            [pool("a", "b"), pool("b", "c"), pool("c", "b")],
            [
                "pools[1].fallback.pool: the fallbacks form a circle: b -> c -> b",
                "pools[2].fallback.pool: the fallbacks form a circle: c -> b -> c",
            ],
        ),
        (chain(MAX_FALLBACKS + 1), ["pools[0].fallback.pool: the chain of fallbacks is too long: at most 8 pools may follow"]),
        ([pool("a", {"pool": "b", "model": "x*"}), pool("b")], ["pools[0].fallback.model: one model is meant"]),
        ([pool("a", {"pool": "b", "model": "x" * 257}), pool("b")], ["the name of one model, of 1 to 256 characters"]),
        ([pool("a", {"pool": "b", "modl": "x"}), pool("b")], ["pools[0].fallback.modl: unknown key; did you mean 'model'?"]),
        ([pool("a", {"model": "x"}), pool("b")], ["pools[0].fallback.pool: missing"]),
        ([pool("a", {"pool": 5}), pool("b")], ["pools[0].fallback.pool: a text is expected, got 5"]),
        ([pool("a", 5), pool("b")], ["pools[0].fallback: a mapping is expected, got 5"]),
        ([pool("a", ["b"]), pool("b")], ["pools[0].fallback: a mapping is expected"]),
    ],
)
def test_what_leads_nowhere_is_refused(pools: list[dict[str, Any]], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        fallbacks(*pools)
    for message in messages:
        assert message in str(caught.value)
    assert len(caught.value.problems) == len(messages)


def test_the_name_of_an_alias_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"pools\[0\]\.fallback\.model: 'x' is an alias, of 'y': write that"):
        fallbacks(pool("a", {"pool": "b", "model": "x"}), pool("b"), model_aliases={"x": "y"})


def test_a_pool_with_another_problem_is_not_missed_as_a_fallback() -> None:
    with pytest.raises(ConfigError) as caught:
        fallbacks(pool("a", "b"), {"name": "b", "replicas": []})
    assert "fallback" not in str(caught.value)


def test_as_many_pools_as_there_may_be_are_checked() -> None:
    """One circle of all of them is as far as a chain can lead."""
    pools = [pool(f"p{number}", f"p{(number + 1) % MAX_POOLS}") for number in range(MAX_POOLS)]
    with pytest.raises(ConfigError) as caught:
        fallbacks(*pools)
    assert len(caught.value.problems) <= MAX_POOLS


def test_the_command_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text("pools:\n  - name: a\n    replicas: [http://a:1]\n    fallback:\n      pool: b\n", "utf-8")
    assert main(["check", str(file)]) != 0
    printed = capsys.readouterr()
    assert f"{file}:5: pools[0].fallback.pool: 'b' is no pool's name" in printed.out + printed.err


@pytest.mark.parametrize("fallback", ["b", {"pool": "b"}, {"pool": "b", "model": "x"}, None])
def test_the_schema_for_editors_knows_both_forms(fallback: Any) -> None:
    jsonschema.validate({"pools": [{"replicas": ["http://a:1"], "fallback": fallback}]}, config_schema(WholeConfig))


@pytest.mark.parametrize("fallback", [5, {"model": "x"}, {"pool": "b", "more": 1}])
def test_the_schema_for_editors_refuses_others(fallback: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"pools": [{"replicas": ["http://a:1"], "fallback": fallback}]}, config_schema(WholeConfig))


@pytest.mark.parametrize("fallback", ["b", {"pool": "b", "model": "x"}])
def test_workers_get_it(fallback: Any) -> None:
    config = load(None, {"pools": [pool("a", fallback), pool("b")]}, env={})
    assert decode_config(WholeConfig, encode_config(config)) == config


@pytest.mark.parametrize(
    ("fallback", "models", "warned"),
    [
        ({"pool": "small"}, ["little"], "large"),
        ({"pool": "small", "model": "nope"}, ["little"], "nope"),
        ({"pool": "small", "model": "little-2"}, ["little"], ""),
        ({"pool": "small"}, ["lar"], ""),
        ({"pool": "small"}, ["*"], ""),
        ({"pool": "small"}, [], ""),
    ],
)
def test_a_pool_that_does_not_serve_what_it_is_asked_for_is_a_warning(
    fallback: dict[str, str], models: list[str], warned: str
) -> None:
    pools = [
        {"name": "big", "models": ["large"], "replicas": ["http://a:1"], "fallback": fallback},
        {"name": "small", "models": models, "replicas": ["http://b:1"]},
    ]
    found = [str(warning) for warning in warnings_of(read(None, {"pools": pools}, env={}))]
    expected = [
        f"pools[0].fallback: the pool 'small' serves no model with the name '{warned}': set model to one that it serves"
    ]
    assert found == (expected if warned else [])
