from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import main
from gateway.config import Config, ConfigError, PriceConfig, ReplicaConfig, load

URL = "http://127.0.0.1:9001"
GOOD = {"pools": [{"replicas": [URL]}]}


def config(**raw: Any) -> Config:
    return load(None, {**GOOD, **raw}, env={})


def test_a_replica_url_is_all_that_is_needed() -> None:
    loaded = config()
    assert loaded.pools[0].replicas == (ReplicaConfig(URL, name="127.0.0.1:9001"),)
    assert (loaded.listen, loaded.routing.policy, loaded.limits.body_mb) == ("127.0.0.1:8000", "cost", 64)


def test_the_example_of_the_design_loads(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        """
listen: 127.0.0.1:8000
pools:
  - models: [smollm2, HuggingFaceTB/]
    replicas: [http://127.0.0.1:9001, {url: http://127.0.0.1:9002, capacity_tokens: 1000000}]
routing: {policy: cost, block_bytes: 256, ttl_s: 300, memory_mb: 256}
prices:
  smollm2: {input: 0.50, cached_input: 0.05, output: 1.50}
"""
    )
    loaded = load(path, {}, env={})
    assert loaded.pools[0].replicas[1].capacity_tokens == 1_000_000
    assert loaded.routing.ttl_s == 300.0
    assert loaded.prices["smollm2"] == PriceConfig(input=0.5, output=1.5, cached_input=0.05)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"pools": []}, "pools: at least one pool"),
        ({"pools": [{"replicas": []}]}, r"pools\[0\].replicas: at least one"),
        ({"pools": [{"replicas": [URL, URL]}]}, "listed twice"),
        ({"pools": [{"replicas": ["127.0.0.1:9001"]}]}, r"replicas\[0\].url: .* is not a base URL such as"),
        ({"pools": [{"replicas": ["http://h:99999"]}]}, r"replicas\[0\].url: .* no valid port"),
        ({"pools": [{"replicas": ["http://u:p@h"]}]}, "credentials do not belong"),
        ({"pools": [{"replicas": [{"name": "x"}]}]}, r"replicas\[0\].url: missing"),
        ({"pools": [{"replicas": [{"url": URL, "capacity_tokens": 0}]}]}, "capacity_tokens: must be greater than 0"),
        ({"pools": [{"models": ["m", "m"], "replicas": [URL]}]}, "claimed twice"),
        ({"pools": "x"}, "pools: a list is expected, got 'x'"),
        ({"rooting": {}}, "rooting: unknown key; did you mean 'routing'"),
        ({"routing": {"zzz": 1}}, "routing.zzz: unknown key; known keys: policy"),
        ({"routing": {"policy": "best"}}, "routing.policy: 'best' is not one of cost, round_robin"),
        ({"routing": {"ttl_s": "long"}}, "routing.ttl_s: a number is expected, got 'long'"),
        ({"routing": {"block_bytes": 1.5}}, "routing.block_bytes: a whole number is expected"),
        ({"routing": {"block_bytes": True}}, "routing.block_bytes: a whole number is expected"),
        ({"routing": {"memory_mb": -1}}, "routing.memory_mb: must be greater than 0, got -1"),
        ({"routing": []}, r"routing: a mapping is expected, got \[\]"),
        ({"prices": {"m": {"input": 1}}}, "prices.m.output: missing"),
        ({"prices": {"m": {"input": -1, "output": 1}}}, "prices.m.input: a price is not negative"),
        ({"prices": [1]}, "prices: a mapping is expected"),
        ({"listen": "8000"}, "listen: '8000' is not host:port"),
        ({"listen": "h:70000"}, "listen: "),
        ({"log_level": "loud"}, "log_level: 'loud' is not one of debug"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**raw)


keys = st.sampled_from(["pools", "replicas", "url", "routing", "policy", "prices", "listen", "models", "memory_mb"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(URL)
anything = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner), max_leaves=12)


@given(st.dictionaries(keys, anything))
def test_any_yaml_gives_a_config_or_a_config_error(raw: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load(None, {**GOOD, **raw}, env={}), Config)


def test_a_price_for_cached_tokens_defaults_to_a_tenth() -> None:
    assert config(prices={"m": {"input": 2, "output": 1}}).prices["m"].cached_input == pytest.approx(0.2)
    assert config(prices={"m": {"input": 2, "output": 1, "cached_input": 0}}).prices["m"].cached_input == 0


def test_base_urls_may_end_as_engines_print_them() -> None:
    for url in (URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"):
        assert config(pools=[{"replicas": [url]}]).pools[0].replicas[0].url == URL
    assert config(pools=[{"replicas": [f"{URL}/team/v1"]}]).pools[0].replicas[0].url == f"{URL}/team"


def test_the_environment_wins_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "listen": "127.0.0.1:1"}))
    env = {"WARMROUTE_LISTEN": "0.0.0.0:2", "WARMROUTE_ADMIN_KEY": "secret"}
    loaded = load(path, {}, env)
    assert (loaded.listen, loaded.admin_key) == ("0.0.0.0:2", "secret")
    assert "secret" not in repr(loaded)
    assert load(path, {"listen": "[::1]:3"}, env).address == ("::1", 3)


def test_a_secret_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "admin_key": "x"}))
    with pytest.raises(ConfigError, match="WARMROUTE_ADMIN_KEY"):
        load(path, {}, env={})


@pytest.mark.parametrize("text", ["a: [", "just text", "\x00"])
def test_a_broken_file_is_an_error_not_a_traceback(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_check_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert main(["check", str(path)]) == 0
    assert "1 pools, 1 replicas, policy cost" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
