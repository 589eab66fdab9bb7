from __future__ import annotations

import contextlib
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
import yaml
import yarl
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import compose
from gateway.cluster.messages import decode_config, encode_config
from gateway.commands.advice import warnings_of
from gateway.commands.cli import main
from gateway.config.hints import MAX_NUMBER
from gateway.config.json_schema import editor_schema
from gateway.config.kinds import unix_time
from gateway.config.parse import ConfigError, convert
from gateway.config.schema import (
    MAX_POOLS,
    MAX_REPLICAS,
    Config,
    PeakConfig,
    PriceConfig,
    ReplicaConfig,
    RoutingConfig,
    TierConfig,
)
from gateway.features.table import WholeConfig, read
from tests.gateway.conftest import LOGGED
from tests.support.configs import load

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
    assert loaded.prices["smollm2"] == (PriceConfig(input=0.5, output=1.5, cached_input=0.05),)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"pools": []}, "pools: at least one pool with a replica .or the flag --replica URL., or a source in `discovery`, is"),
        ({"pools": [{"replicas": []}]}, r"pools\[0\].replicas: at least one"),
        ({"pools": [{"replicas": [URL, URL]}]}, "listed twice"),
        ({"pools": [{"replicas": ["127.0.0.1:9001"]}]}, r"replicas\[0\].url: .* is not a base URL such as"),
        ({"pools": [{"replicas": ["http://h:99999"]}]}, r"replicas\[0\].url: .* no valid port"),
        ({"pools": [{"replicas": ["http://u:p@h"]}]}, "credentials do not belong"),
        ({"pools": [{"replicas": [{"name": "x"}]}]}, r"replicas\[0\].url: missing"),
        ({"pools": [{"replicas": [{"url": URL, "capacity_tokens": 0}]}]}, "capacity_tokens: must be greater than 0"),
        ({"pools": [{"replicas": [{"url": URL, "weight": 0}]}]}, "weight: 1 to 100 are possible, got 0"),
        ({"pools": [{"replicas": [{"url": URL, "weight": 101}]}]}, "weight: 1 to 100 are possible, got 101"),
        ({"pools": [{"models": ["m", "m"], "replicas": [URL]}]}, "claimed twice"),
        ({"pools": "x"}, "pools: a list is expected, got 'x'"),
        ({"rooting": {}}, "rooting: unknown key; did you mean 'routing'"),
        ({"routing": {"zzz": 1}}, "routing.zzz: unknown key; known keys: policy"),
        ({"routing": {"policy": "best"}}, "routing.policy: 'best' is not one of cost, round_robin"),
        (
            {"routing": {"policy": "longest_prefix"}},
            "routing.policy: 'longest_prefix' is not one of cost, round_robin, least_loaded, power_of_two, sticky",
        ),
        ({"routing": {"ttl_s": "long"}}, "routing.ttl_s: a finite number is expected, got 'long'"),
        ({"routing": {"block_bytes": 1.5}}, "routing.block_bytes: a whole number is expected"),
        ({"routing": {"block_bytes": True}}, "routing.block_bytes: a whole number is expected"),
        ({"routing": {"memory_mb": -1}}, "routing.memory_mb: must be greater than 0, got -1"),
        ({"routing": []}, r"routing: a mapping is expected, got \[\]; its keys: policy, block_bytes"),
        ({"pools": [{"prefill": [URL]}]}, r"^pools\[0\].prefill: .* list those that take them over in `decode`$"),
        (
            {"pools": [{"prefill": [URL], "decode": [{"url": URL, "bootstrap_port": 1}]}]},
            r"^pools\[0\].decode\[0\].bootstrap_port: unknown key; known keys: [a-z_, ]*$",
        ),
        ({"pools": [{"replicas": [URL], "translate": ["x"]}]}, r"translate\[0\]: 'x' is not one of messages, responses$"),
        ({"pools": [{"replicas": [URL], "translate": "messages"}]}, "translate: a list is expected, got 'messages'"),
        ({"pools": [{"replicas": [URL], "resume_streams": 1}]}, r"resume_streams: true or false is expected, got 1"),
        ({"pools": [{"replicas": [URL], "resume_streams": "yes"}]}, r"resume_streams: true or false is expected, got 'yes'"),
        ({"prices": {"m": {"input": 1}}}, "prices.m.output: missing"),
        ({"prices": {"m": {"input": -1, "output": 1}}}, "prices.m.input: 0 to 1,000,000 are possible, got -1"),
        ({"prices": [1]}, "prices: a mapping is expected"),
        ({"state": True}, "state: a mapping such as .url: sqlite., or off to keep nothing, is expected, got True"),
        ({"state": None}, "state: .* or off .* got None"),
        ({"sharing": True}, "sharing: a mapping such as .url: redis://valkey:6379., or off is expected, got True"),
        ({"sharing": "redis://me:secret@h"}, "sharing: .* is expected, got 'redis'"),
        (
            {"sharing": {"url": "redis://h", "ca_file": "/ca"}},
            "sharing.ca_file: TLS needs a URL .* rediss, got redis",
        ),
        (
            {"sharing": {"url": "rediss://h", "key_file": "/k"}},
            "sharing.key_file: .* cert_file, which is missing",
        ),
        ({"snapshot": {"file": ""}}, "snapshot.file: auto, off, or the path of a file is expected, got ''"),
        ({"snapshot": "auto"}, "snapshot: a mapping such as .file: auto., or off is expected, got 'auto'"),
        ({"listen": "8000"}, "listen: '8000' is not host:port"),
        ({"listen": 8000}, "listen: host:port .such as 0.0.0.0:8000. is expected, got 8000"),
        ({"listen": False}, "listen: host:port .such as 0.0.0.0:8000. is expected, got False"),
        ({"admin_listen": True}, "admin_listen: host:port .such as 0.0.0.0:8000., unix:/path, auto or off is expected"),
        ({"metrics_listen": 8002}, "metrics_listen: host:port .such as 0.0.0.0:8000., or off is expected, got 8002"),
        ({"listen": "h:70000"}, "listen: "),
        ({"listen": ":8000"}, "listen: "),
        ({"listen": "a b:8000"}, "listen: "),
        ({"listen": "::1:8000"}, "listen: "),
        ({"log_level": "loud"}, "log_level: 'loud' is not one of debug"),
        (
            {"pools": [{"models": [""], "replicas": [URL]}]},
            r'models\[0\]: a model name .*"\*": any model. is expected, got ..$',
        ),
        ({"prices": {"": {"input": 1, "output": 1}}}, r'prices\[..\]: a model name .*"\*": any model. is expected, got ..$'),
        (
            {"pools": [{"replicas": [{"url": URL, "capacity_tokens": 10**400}]}]},
            "capacity_tokens: a number of at most 10,0",
        ),
        ({"pools": [{"replicas": [{"url": URL, "capacity_tokens": 10**5000}]}]}, "got a number of 16610 bits"),
        (
            {"limits": {"connections": 10**10 + 1}},
            "limits.connections: a number of at most 10,000,000,000 is",
        ),
        ({"timeouts": {"total_s": 1e11}}, "timeouts.total_s: a number of at most"),
        ({"timeouts": {"total_s": 10**400}}, "timeouts.total_s: a finite number is expected"),
        ({"prices": {"m": {"input": 1e300, "output": 1}}}, "prices.m.input: a number of at most"),
        ({"workers": -(10**400)}, "workers: a number of at most"),
        ({"prices": {7: {"input": 1, "output": 1}}}, "prices.7: a model name .* is expected, got 7"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**raw)


def test_a_password_in_a_url_at_the_wrong_place_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="state: a mapping such as") as caught:
        config(state="postgresql://user:secret@host/name")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "rest", ["u:secret@h/n", ":secret@h/n", "u:@h/n", "u@h/n?password=secret", "h/n?ssl=x&password=secret"]
)
def test_a_password_of_the_database_is_refused_and_not_shown(rest: str) -> None:
    for scheme in ("postgres", "postgresql"):
        with pytest.raises(ConfigError, match=r"state.url: a password does not belong in a URL; set PGPASSWORD") as caught:
            config(state={"url": f"{scheme}://{rest}"})
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "rest", ["u@h/n", "h:5432/n", "u@h:5432,i:5433/n?sslmode=require", "u@[::1]:5432/n", "/n?host=/run/postgresql"]
)
def test_addresses_of_databases_without_a_password(rest: str) -> None:
    assert config(state={"url": f"postgresql://{rest}"}).state.url == f"postgresql://{rest}"


def test_the_largest_numbers_that_are_allowed_can_be_used() -> None:
    """By the fleet, and by all that bounds memory, time and places."""
    loaded = config(
        pools=[{"replicas": [{"url": URL, "capacity_tokens": MAX_NUMBER}], "max_inflight": MAX_NUMBER, "queue_s": MAX_NUMBER}],
        routing={"block_bytes": MAX_NUMBER, "ttl_s": MAX_NUMBER, "memory_mb": MAX_NUMBER},
        limits={"body_mb": MAX_NUMBER, "inflight_mb": MAX_NUMBER, "connections": MAX_NUMBER},
    )
    gateway = compose(loaded, LOGGED)
    (pool,) = gateway.fleet.pools
    (replica,) = pool.replicas
    assert (replica.member.capacity_tokens, pool.admission.max_inflight) == (MAX_NUMBER, MAX_NUMBER)


def refused(**raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**raw)
    return str(caught.value)


def loaded_url(url: str) -> str:
    return config(pools=[{"replicas": [url]}]).pools[0].replicas[0].url


@pytest.mark.parametrize("name", ["a\nb", "a\r", "a b", 'a"', "a'", "é", "\x7f", "a" * 101, " "])
def test_a_replica_name_can_be_written_into_a_header(name: str) -> None:
    message = refused(pools=[{"replicas": [{"url": URL, "name": name}]}])
    assert message.startswith("pools[0].replicas[0].name: 1 to 100 printable ASCII characters, no spaces and no quotes")
    assert "\n" not in message


def test_a_replica_name_has_up_to_100_characters() -> None:
    for name in ("a", "gpu-7/vllm:8000", "#~!" + "x" * 97):
        assert config(pools=[{"replicas": [{"url": URL, "name": name}]}]).pools[0].replicas[0].name == name


@pytest.mark.parametrize(
    "url",
    [
        "http://a b:1",
        "http://a..b:1",
        "http://.a:1",
        "http://a:1/v1/v1?",
        "http://a:1/#",
        "http://a:1/x y",
        "http://a:1/x\ny",
        "http://a:1/\n",
        "http://a\n:1",
        " http://a:1",
        "http://a:1/%zz",
        'http://a:1/"',
        "http://b\u00fccher:1",
        "http://:1",
        "http:///v1",
        "http://" + "a" * 64,
        "http://" + "a." * 127,
        "http://999.1.1.1:1",
        "http://7:1",
        "http://[::1",
        "http://[]:1",
        "http://[fe80::1%a b]:1",
        "http://[fe80::1%a\nb]:1",
        "http://[v1.a]:1",
        "http://x[::1]:1",
        "http://::1:1",
    ],
)
def test_a_url_that_cannot_be_connected_to_is_refused(url: str) -> None:
    message = refused(pools=[{"replicas": [url]}])
    assert message.startswith("pools[0].replicas[0].url: ")
    assert message.endswith(" is not a base URL such as http://127.0.0.1:9001")


@pytest.mark.parametrize("port", ["", "0", "65536", "1x", "-1", "\uff11", "9" * 4000])
def test_a_port_is_between_1_and_65535(port: str) -> None:
    assert "has no valid port" in refused(pools=[{"replicas": [f"http://a:{port}"]}])


@pytest.mark.parametrize("url", ["http://u:p@h", "http://@h", "http://:@h", "http://u:top@h?x", "http://u:top secret@h"])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    message = refused(pools=[{"replicas": [url]}])
    assert "credentials do not belong" in message
    assert "top" not in message


@pytest.mark.parametrize(
    "url",
    [
        "http://a",
        "https://vllm-0.vllm_headless.ns.svc.cluster.local.:8000",
        "http://10.0.0.1:65535",
        "http://[2001:db8::1]:8000",
        "http://[fe80::1%25eth0]:1",
        "HTTP://a:1",
        "http://a:1/team-a/%20;x=1,y@z",
    ],
)
def test_a_good_url_is_kept_as_it_is(url: str) -> None:
    assert loaded_url(url) == url


@given(st.from_regex(r"https?://[\[\]:.%@a-z0-9 ]{1,30}(/[^?]{0,10})?", fullmatch=True))
def test_the_host_of_a_good_url_is_one_that_a_resolver_takes(url: str) -> None:
    with contextlib.suppress(ConfigError):
        host = yarl.URL(loaded_url(url)).host
        assert host
        host.encode("idna")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 10**400, "1e999"])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("routing", "ttl_s"),
        ("health", "interval_s"),
        ("health", "timeout_s"),
        ("timeouts", "idle_s"),
        ("limits", "drain_timeout_s"),
    ],
)
def test_a_number_is_finite(section: str, key: str, number: object) -> None:
    assert refused(**{section: {key: number}}).startswith(f"{section}.{key}: a finite number is expected, got ")


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["input", "output", "cached_input"])
def test_a_price_is_finite(text: str, key: str, tmp_path: Path) -> None:
    price = ", ".join(f"{name}: {text if name == key else 1}" for name in ("input", "output", "cached_input"))
    path = written(tmp_path, f"pools: [{{replicas: [{URL}]}}]\nprices: {{m: {{{price}}}}}")
    with pytest.raises(ConfigError, match=f"prices.m.{key}: a finite number is expected, got -?(nan|inf)"):
        load(path, {}, env={})


def test_a_whole_number_is_finite_too() -> None:
    assert refused(routing={"memory_mb": math.nan}) == "routing.memory_mb: a whole number is expected, got nan"
    assert refused(routing={"memory_mb": math.inf}) == "routing.memory_mb: a whole number is expected, got inf"


@pytest.mark.parametrize("text", ["1e-05", "1E5", "1.5e9", "+2.e3", ".5e-2"])
def test_a_number_may_be_in_scientific_notation(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"pools: [{{replicas: [{URL}]}}]\nrouting: {{ttl_s: {text}}}")
    assert load(path, {}, env={}).routing.ttl_s == float(text)


@pytest.mark.parametrize("text", ["1", "0.5", "nan", "inf", "1_0e5", " 1e5", "1e5\n", "e5", ".e5", "1e", "\uff11e5", "0x1e5"])
def test_no_other_text_is_a_number(text: str) -> None:
    assert "routing.ttl_s: a finite number is expected" in refused(routing={"ttl_s": text})
    assert "routing.memory_mb: a whole number is expected" in refused(routing={"memory_mb": "1e5"})


def test_a_price_for_any_model_may_be_given() -> None:
    assert config(prices={"*": {"input": 1, "output": 1}}).prices["*"][0].output == 1


def test_any_model_is_claimed_once() -> None:
    pools = [{"models": ["*"], "replicas": [url]} for url in (URL, "http://a:1")]
    assert refused(pools=pools) == "pools[1].models[0]: the model prefix '*' is claimed twice, first by pools[0].models[0]"


def test_the_admin_key_is_not_offered_as_a_key() -> None:
    for key in ("zzzzz", "qqqqq"):
        message = refused(**{key: 1})
        assert "known keys: pools, listen, admin_listen" in message
        assert "admin_key" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routing:\n  ttl_s: 1\n  block_bytes: 2\n  ttl_s: 3", "4: the key 'ttl_s' is given twice, first in line 2"),
        ("pools: []\n\n'pools': []", "3: the key 'pools' is given twice, first in line 1"),
        ("prices: {m: {input: 1, input: 2}}", "1: the key 'input' is given twice, first in line 1"),
    ],
)
def test_a_key_is_given_once(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, env={})
    assert f"{path}:{message}" in map(str, caught.value.problems)


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    text = f"""
pools: [{{replicas: [{URL}]}}]
prices:
  small: &small {{input: 1, output: 2}}
  large: &large {{<<: *small, output: 3}}
  huge: {{<<: *large, output: 4}}
"""
    prices = load(written(tmp_path, text), {}, env={}).prices
    assert [(price.input, price.output) for (price,) in prices.values()] == [(1, 2), (1, 3), (1, 4)]


def test_pools_and_replicas_are_bounded() -> None:
    many = [f"http://a:{port}" for port in range(1, MAX_REPLICAS + 1)]
    halves = [{"models": ["a"], "replicas": many[:1000]}, {"models": ["b"], "replicas": many[1000:]}]
    assert len(config(pools=halves).pools) == 2
    halves[0]["replicas"] = [*many[:1000], "http://b:1"]
    assert refused(pools=halves) == "pools: at most 2048 replicas are possible, got 2049"
    pools = [{"models": [str(number)], "replicas": [url]} for number, url in enumerate(many[: MAX_POOLS + 1])]
    assert refused(pools=pools) == "pools: at most 1024 are possible, got 1025"
    assert len(config(pools=pools[1:]).pools) == MAX_POOLS


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file is too large; at most 1 MiB are possible"):
        load(written(tmp_path, "# \n" * (1 << 20)), {}, env={})


@pytest.mark.parametrize("text", ["pools: &a [*a]", "x: &a {b: {c: *a}}", f"workers: 1{'0' * 5000}"])
def test_values_without_end_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {}, env={})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (
            "pools:\n- replicas: [http://a:1\n- x: 2\n",
            3,
            "while parsing a flow sequence that begins in line 2: expected ',' or ']'",
        ),
        ("a: 1\nb: c: d\n", 2, "mapping values are not allowed here"),
        ("pools:\n\t- replicas: []\n", 2, r"character '\t' that cannot start any token"),
        ("x: 1\ny: *a\n", 2, "found undefined alias 'a'"),
        ("a:\n  *: b\n", 2, "but found ':' (a text that begins with a star must be in quotes)"),
        ("x: 1\ny: 2026-99-99\n", 2, "month must be in 1..12"),
        ("x: 1\ny: \x00\n", 2, r"the character '\x00' is not allowed"),
    ],
    ids=["sequence", "mapping", "tab", "no such alias", "star", "date", "character"],
)
def test_what_is_not_yaml_is_reported_with_its_line(text: str, line: int, what: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, env={})
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: not valid YAML: "), message
    assert what in message
    assert "<unicode string>" not in message


def test_bytes_that_are_not_utf_8_are_reported_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "warmroute.yaml"
    path.write_bytes(b"x: 1\ny: \xff\n")
    with pytest.raises(ConfigError, match=r"warmroute\.yaml:2: not valid YAML: the byte 0xff is not UTF-8"):
        load(path, {}, env={})


def test_aliases_are_no_error(tmp_path: Path) -> None:
    text = f"pools:\n- replicas: &r [{{url: '{URL}', name: a}}]\nprices: {{a: &p {{input: 1, output: 1}}, b: *p, c: *p}}"
    assert len(load(written(tmp_path, text), {}, env={}).prices) == 3


def test_of_many_problems_the_first_are_reported(tmp_path: Path) -> None:
    text = f"pools: [{{replicas: [{URL}]}}]\n" + "\n".join(f"key{number}: 1" for number in range(300))
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {}, env={})
    problems = caught.value.problems
    assert (len(problems), str(problems[-1])) == (101, "and 200 more problems")
    assert str(problems[99]).endswith("written.yaml:101: key99: unknown key" + str(problems[99]).partition("unknown key")[2])


def test_of_many_problems_in_the_yaml_the_first_are_reported(tmp_path: Path) -> None:
    text = f"pools: [{{replicas: [{URL}]}}]\n" + "price_of_mistakes: 1\n" * 300
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {}, env={})
    assert "and 199 more problems in the YAML" in map(str, caught.value.problems)


def written(folder: Path, text: str) -> Path:
    path = folder / "written.yaml"
    path.write_text(text, "utf-8")
    return path


keys = st.sampled_from(["pools", "replicas", "url", "routing", "policy", "prices", "listen", "models", "memory_mb"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(URL)
anything = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner), max_leaves=12)


@given(st.dictionaries(keys, anything))
def test_any_yaml_gives_a_config_or_a_config_error(raw: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load(None, {**GOOD, **raw}, env={}), Config)


def test_a_price_for_cached_tokens_defaults_to_a_tenth() -> None:
    assert config(prices={"m": {"input": 2, "output": 1}}).prices["m"][0].cached_input == pytest.approx(0.2)
    assert config(prices={"m": {"input": 2, "output": 1, "cached_input": 0}}).prices["m"][0].cached_input == 0


def test_a_price_may_change(tmp_path: Path) -> None:
    text = f"""
pools: [{{replicas: [{URL}]}}]
prices:
  one: {{since: 2026-10-07, input: 1, output: 2}}
  two:
    - {{input: 2, cached_input: 0.2, output: 10}}
    - since: 2026-10-07T16:00:00Z
      input: 4
      output: 20
      image: 0.001
      tiers: [{{above: 200000, input: 8, output: 30}}]
      peak: [{{hours: "22:00-04:00", days: [mon, fri], factor: 2}}]
"""
    prices = load(written(tmp_path, text), {}, env={}).prices
    assert [price.since for price in prices["one"]] == ["2026-10-07"]
    assert [unix_time(price.since) for price in prices["two"][1:]] == [1791388800.0]
    assert prices["two"][1].tiers == (TierConfig(above=200_000, input=8, output=30),)
    assert prices["two"][1].peak == (PeakConfig(hours="22:00-04:00", days=("mon", "fri"), factor=2),)
    assert decode_config(WholeConfig, encode_config(load(written(tmp_path, text), {}, env={}))).prices == prices


@pytest.mark.parametrize(
    ("prices", "text"),
    [
        ("[]", "a price, or a list of them, is expected, got none"),
        ("5", "a mapping is expected, got 5"),
        ("[{input: 1, output: 1}, {input: 1, output: 1}]", r"\[1\].since: missing: from when on"),
        (
            "[{input: 1, output: 1, since: 2026-02-02}, {input: 1, output: 1, since: 2026-02-02}]",
            r"\[1\].since: .* is not after",
        ),
        ("{input: 1, output: 1, since: soon}", "since: a date such as 2026-10-07, .* is expected, got 'soon'"),
        ("{input: 1, output: 1, since: 20261301}", "since: a date such as .* is expected, got 20261301"),
        ("{input: 1, output: 1000001}", "output: 0 to 1,000,000 are possible"),
        ("{input: 1, output: 1, tiers: [{above: 0, input: 1, output: 1}]}", r"tiers\[0\].above: must be greater than 0"),
        ("{input: 1, output: 1, tiers: [&t {above: 9, input: 1, output: 1}, *t]}", "two tiers begin above the same number"),
        ("{input: 1, output: 1, peak: [{hours: 24:00-01:00, factor: 2}]}", r"peak\[0\].hours: hours such as 01:00-04:00"),
        ("{input: 1, output: 1, peak: [{hours: 01:00-01:00, factor: 2}]}", r"peak\[0\].hours: hours such as 01:00-04:00"),
        ("{input: 1, output: 1, peak: [{hours: 01:00-02:00, factor: 101}]}", r"peak\[0\].factor: "),
        ("{input: 1, output: 1, peak: [{hours: 01:00-02:00, factor: 2, days: [Monday]}]}", "is not one of mon, tue, wed"),
    ],
)
def test_a_wrong_price_is_named(tmp_path: Path, prices: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"prices.m.*{text}"):
        load(written(tmp_path, f"pools: [{{replicas: [{URL}]}}]\nprices: {{m: {prices}}}"), {}, env={})


def test_base_urls_may_end_as_engines_print_them() -> None:
    for url in (URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"):
        assert config(pools=[{"replicas": [url]}]).pools[0].replicas[0].url == URL
    assert config(pools=[{"replicas": [f"{URL}/team/v1"]}]).pools[0].replicas[0].url == f"{URL}/team"


def test_a_configuration_is_the_same_in_another_process() -> None:
    """It is sent to workers; a base URL or a price is not brought into its final form twice."""
    one = config(pools=[{"replicas": ["http://a:1/v1/v1"]}], prices={"m": {"input": 1, "output": 2}}, admin_key="k")
    assert one.pools[0].replicas[0].url == "http://a:1/v1"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=WholeConfig) == one


def test_no_text_of_a_configuration_shows_the_admin_key() -> None:
    one = config(admin_key="hidden")
    assert "hidden" not in f"{one} {one!r} {one.__rich_repr__()}"
    assert "workers=1" in repr(one)


class Odd(msgspec.Struct, frozen=True):
    """Constraints that no key has today."""

    step: Annotated[int, msgspec.Meta(multiple_of=8)] = 8
    share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    name: Annotated[str, msgspec.Meta(pattern="^[a-z]+$")] = "a"
    names: Annotated[Mapping[str, str], msgspec.Meta(min_length=1)] = {}


@pytest.mark.parametrize(
    "raw", [{"step": 7}, {"share": 1}, {"name": "A"}, {"names": {}}, {"step": "x", "share": -1, "name": 3}]
)
def test_every_constraint_of_a_new_key_has_a_message(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(Odd, raw)
    assert [problem.key for problem in caught.value.problems] == [(name,) for name in raw]
    for problem, value in zip(caught.value.problems, raw.values(), strict=True):
        assert re.search(r"[Ee]xpected|must be", problem.text)
        assert problem.text.endswith(f", got {value!r}")


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


@pytest.mark.parametrize("text", ["a: [", "just text", "\x00", "a: 2026-99-99", "a: " + "9" * 5000, "[" * 5000])
def test_a_broken_file_is_an_error_not_a_traceback(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_check_prints_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr()
    assert "good: pools: 1, replicas: 1, policy: cost" in printed.out
    assert printed.err == ""
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


BAD = """\
listen: 127.0.0.1
workers: 0
pools:
  - models: [m]
    queue_s: -1
    max_queue: -2
    replicas:
      - http://127.0.0.1:9001/v1/chat/completions
      - url: http://127.0.0.1:9002
        capacity_tokens: 0
        name: a b
      - {nmae: x}
  - replicas: []
rooting: {}
routing:
  policy: best
  ttl_s: long
  memory_mb: -1
prices:
  m: {input: -1, cached_input: -1}
log_level: loud
log_level: info
"""


def test_check_prints_all_errors_at_once_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, BAD)
    assert main(["check", str(path)]) == 2
    printed = capsys.readouterr().err.replace(f"warmroute: {path}:", "")
    assert [line.partition(" is not one of")[0] for line in printed.splitlines()] == [
        "1: listen: '127.0.0.1' is not host:port, for example 0.0.0.0:8000",
        "2: workers: 1 to 64 are possible, got 0",
        "5: pools[0].queue_s: must be greater than 0, got -1",
        "6: pools[0].max_queue: 0 (no queue) or more is expected, got -2",
        "8: pools[0].replicas[0].url: 'http://127.0.0.1:9001/v1/chat/completions' is the URL of an API path, not a base URL;"
        " write 'http://127.0.0.1:9001'",
        "10: pools[0].replicas[1].capacity_tokens: must be greater than 0, got 0",
        "11: pools[0].replicas[1].name: 1 to 100 printable ASCII characters, no spaces and no quotes, are expected, got 'a b'",
        "12: pools[0].replicas[2].nmae: unknown key; did you mean 'name'?",
        "12: pools[0].replicas[2].url: missing",
        "13: pools[1].replicas: at least one replica URL is expected, or a source in `discovery`",
        "14: rooting: unknown key; did you mean 'routing'?",
        "16: routing.policy: 'best'",
        "17: routing.ttl_s: a finite number is expected, got 'long'",
        "18: routing.memory_mb: must be greater than 0, got -1",
        "20: prices.m.input: 0 to 1,000,000 are possible, got -1",
        "20: prices.m.cached_input: 0 to 1,000,000 are possible, got -1",
        "20: prices.m.output: missing",
        "22: the key 'log_level' is given twice, first in line 21",
    ]


def test_one_bad_replica_does_not_hide_what_is_wrong_with_others(tmp_path: Path) -> None:
    text = """\
listen: 0.0.0.0:9001
pools:
  - queue_s: -1
    models: [a]
    replicas: [http://h:1/v1/chat/completions, http://localhost:9001, http://b:1, {url: http://c:1, capacity_tokens: x}]
  - models: [a]
    replicas: [7, http://b:1]
"""
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {}, env={})
    found = [str(problem).rpartition("written.yaml:")[2].partition(", got")[0] for problem in caught.value.problems]
    assert found == [
        "3: pools[0].queue_s: must be greater than 0",
        "5: pools[0].replicas[0].url: 'http://h:1/v1/chat/completions' is the URL of an API path, not a base URL;"
        " write 'http://h:1'",
        "5: pools[0].replicas[3].capacity_tokens: a whole number is expected",
        "5: pools[0].replicas[1].url: 'http://localhost:9001' is this gateway itself (listen: 0.0.0.0:9001)",
        "6: pools[1].models[0]: the model prefix 'a' is claimed twice, first by pools[0].models[0]",
        "7: pools[1].replicas[0]: a mapping is expected",
        "7: pools[1].replicas[1]: the replica 'b:1' is listed twice, first as pools[0].replicas[2]",
    ]


def test_a_value_from_the_environment_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, f"listen: 127.0.0.1:1\npools: [{{replicas: [{URL}]}}]\nlog_level: loud")
    with pytest.raises(ConfigError) as caught:
        load(path, {}, env={"WARMROUTE_LISTEN": "nowhere"})
    found = [str(problem) for problem in caught.value.problems]
    assert found[0].startswith("listen: 'nowhere' is not host:port")
    assert found[0].endswith("(from the environment variable WARMROUTE_LISTEN)")
    assert found[1].startswith(f"{path}:3: log_level: 'loud'")


def test_a_flag_is_not_blamed_on_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"listen: 'here' is not host:port[^(]*\Z"):
        load(None, {**GOOD, "listen": "here"}, env={"WARMROUTE_LISTEN": "nowhere"})


CLASHES = f"""\
pools:
  - models: [a, b, a]
    replicas:
      - {URL}
      - {{url: {URL}, name: one}}
      - {{url: http://b:1, name: one}}
      - {URL}
      - url: http://c:1
        name: one
"""


def test_every_repeated_replica_name_and_prefix_is_named_with_its_own_line(tmp_path: Path) -> None:
    path = written(tmp_path, CLASHES)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, env={})
    already = "the name 'one' is that of pools[0].replicas[1] already; give each replica its own `name`"
    assert [str(problem).replace(f"{path}:", "") for problem in caught.value.problems] == [
        "2: pools[0].models[2]: the model prefix 'a' is claimed twice, first by pools[0].models[0]",
        f"6: pools[0].replicas[2]: {already}",
        "7: pools[0].replicas[3]: the replica '127.0.0.1:9001' is listed twice, first as pools[0].replicas[0]",
        f"8: pools[0].replicas[4]: {already}",
    ]


@pytest.mark.parametrize("word", ["off", "Off", "false", "'off'"])
def test_a_listener_is_off_whether_or_not_off_is_quoted(word: str, tmp_path: Path) -> None:
    """YAML reads `off` without quotes as false."""
    text = f"pools: [{{replicas: [{URL}]}}]\nadmin_listen: {word}\nmetrics_listen: {word}\n"
    loaded = load(written(tmp_path, text), {}, env={})
    assert (loaded.admin, loaded.metrics) == (None, None)


@pytest.mark.parametrize("word", ["off", "no", "'off'"])
def test_what_is_kept_and_what_is_shared_is_off_by_one_word(word: str, tmp_path: Path) -> None:
    text = f"pools: [{{replicas: [{URL}]}}]\nstate: {word}\nsharing: {word}\nsnapshot: {word}\n"
    loaded = load(written(tmp_path, text), {}, env={})
    assert (loaded.state.url, loaded.sharing.url, loaded.snapshot.file) == ("off", "off", "off")
    editor = jsonschema.Draft202012Validator(editor_schema(WholeConfig))
    assert editor.is_valid(yaml.safe_load(text))
    assert not editor.is_valid(yaml.safe_load(text.replace(word, "yes")))


@given(st.dictionaries(keys, anything))
def test_each_problem_has_its_place_and_none_is_reported_twice(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {**GOOD, **raw, "log_level": 7}, env={})
    error = caught.value
    assert len(set(error.problems)) == len(error.problems) > 0
    assert str(error) == "; ".join(map(str, error.problems))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"listen": "127.0.0.1:9001"},
            r"pools\[0\].replicas\[0\].url: .*:9001' is this gateway itself \(listen: 127.0.0.1:9001",
        ),
        ({"listen": "0.0.0.0:9001"}, "is this gateway itself"),
        ({"metrics_listen": "0.0.0.0:9001"}, r"is this gateway itself \(metrics_listen"),
        ({"listen": "h:1", "admin_listen": "h:1", "admin_key": "k"}, "admin_listen: 'h:1' is the address of listen already"),
        ({"listen": "0.0.0.0:1", "metrics_listen": "127.0.0.1:1"}, "metrics_listen: .* is the address of listen already"),
        ({"admin_listen": "0.0.0.0:8001"}, "admin_listen: '0.0.0.0:8001' can be reached from other hosts: set WARMROUTE_ADMIN"),
        ({"admin_listen": "gateway:8001"}, "admin_listen: .* can be reached from other hosts"),
        ({"admin_listen": "8001"}, "admin_listen: '8001' is not host:port, .* nor 'unix:/path', nor 'off', nor 'auto'"),
        ({"metrics_listen": "auto"}, "metrics_listen: 'auto' is not host:port, for example 0.0.0.0:8000, nor 'off'"),
        ({"routing": {"isolation": "user"}}, "routing.isolation: 'user' is not one of none, tenant"),
        ({"routing": {"isolation": True}}, "routing.isolation: True is not one of none, tenant"),
        ({"routing": {"expose_headers": "some"}}, "routing.expose_headers: 'some' is not one of operators, all"),
    ],
)
def test_listeners_that_cannot_be(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**raw)


def test_operators_may_be_answered_on_any_address_with_a_key() -> None:
    assert str(config(admin_listen="0.0.0.0:8001", admin_key="k").admin) == "0.0.0.0:8001"
    assert str(config(admin_listen="localhost:8001").admin) == "localhost:8001"
    assert str(config().admin) == "127.0.0.1:18000"


DOUBTFUL = """\
pools:
  - models: [llama-*, qwen]
    replicas: [http://a:1, {url: http://a:1, name: again}]
prices:
  gpt-: {input: 1, output: 1}
  qwen-2: {input: 1, output: 1, cached_input: 2}
  mist?: {input: 1, output: 1}
  llama-: {input: 1, output: 1}
"""


def test_what_cannot_be_meant_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, DOUBTFUL)
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr()
    assert "good" in printed.out
    assert printed.err.replace(f"warmroute: warning: {path}:", "").splitlines() == [
        "2: pools[0].models[0]: 'llama-*' is a prefix, not a pattern: it fits no model; for all models that begin with 'llama-'"
        " write 'llama-'",
        "3: pools[0].replicas[1].url: http://a:1 is the URL of the replica 'a:1', too: its load is counted per entry",
        "5: prices.gpt-: no pool serves a model whose name begins with 'gpt-'",
        "6: prices.qwen-2.cached_input: 2 is above the price of uncached input (1): each hit would cost money",
        "7: prices.mist?: 'mist?' is a prefix, not a pattern: it fits no model",
    ]
    assert main(["check", "--strict", str(path)]) == 1


def test_decoders_without_a_prefiller_are_a_warning() -> None:
    (warning,) = warnings_of(read(None, {"pools": [{"decode": [URL]}]}, env={}))
    assert str(warning).startswith("pools[0].decode: without `prefill`, or prefillers that `discovery` finds")
    assert not warnings_of(read(None, {"pools": [{"decode": [URL], "prefill": ["http://p:1"]}]}, env={}))


def test_a_variable_that_is_set_but_empty_is_a_warning(tmp_path: Path) -> None:
    """A secret that is mounted empty protects nothing."""
    path = written(tmp_path, f"pools: [{{replicas: [{URL}]}}]")
    loaded = read(path, {}, env={"WARMROUTE_ADMIN_KEY": "", "WARMROUTE_LISTEN": "127.0.0.1:1"})
    assert loaded.config.admin_key == ""
    (warning,) = map(str, warnings_of(loaded))
    assert warning == "the variable WARMROUTE_ADMIN_KEY is set, but empty: it counts as not set"


def test_a_budget_where_nothing_has_a_price_is_a_warning(tmp_path: Path) -> None:
    issuer = "{issuer: 'https://login.example.org', audience: a, tenant_claim: t, budget_usd_month: 5}"
    text = f"pools: [{{replicas: [{URL}]}}]\nkeys:\n  oidc:\n  - {issuer}\n"
    path = written(tmp_path, text)
    (warning,) = map(str, warnings_of(read(path, {}, env={})))
    where = f"{path}:4: keys.oidc[0].budget_usd_month: "
    assert warning == f"{where}a tenant with a budget may use no model without a price, and there are no prices"
    assert warnings_of(read(written(tmp_path, text + "prices: {'*': {input: 1, output: 1}}"), {}, env={})) == []


def test_prices_are_not_doubted_where_any_model_may_be_served(tmp_path: Path) -> None:
    for models in ("", "models: ['*']"):
        text = f"pools:\n  - {models or 'queue_s: 1'}\n    replicas: [{URL}]\nprices: {{gpt-: {{input: 1, output: 1}}}}"
        assert warnings_of(read(written(tmp_path, text), {}, env={})) == []


@pytest.mark.parametrize(
    ("limits", "workers", "enough"),
    [("inflight_mb: 20, body_mb: 64", 2, 480), ("inflight_mb: 239", 1, 240), ("inflight_mb: 40, body_mb: 11", 1, 42)],
)
def test_a_body_limit_that_the_memory_budget_refuses_is_a_warning(
    limits: str, workers: int, enough: int, tmp_path: Path
) -> None:
    text = f"pools: [{{replicas: [{URL}]}}]\nworkers: {workers}\nlimits:\n  {{{limits}}}\n"
    path = written(tmp_path, text)
    (warning,) = map(str, warnings_of(read(path, {}, env={})))
    assert warning.startswith(f"{path}:4: limits.inflight_mb: bodies of")
    assert f"Set inflight_mb to {enough} or more" in warning
    raised = re.sub("inflight_mb: [0-9]+", f"inflight_mb: {enough}", text)
    assert warnings_of(read(written(tmp_path, raised), {}, env={})) == []
    lowered = re.sub("inflight_mb: [0-9]+", f"inflight_mb: {enough - 1}", text)
    assert len(warnings_of(read(written(tmp_path, lowered), {}, env={}))) == 1


def test_a_body_limit_is_not_doubted_where_the_budget_is_not_configured(tmp_path: Path) -> None:
    text = f"pools: [{{replicas: [{URL}]}}]\nlimits: {{body_mb: 100000}}\n"
    assert warnings_of(read(written(tmp_path, text), {}, env={})) == []


def test_lines_are_found_through_aliases_and_merges(tmp_path: Path) -> None:
    text = f"""\
pools: [{{replicas: [{URL}]}}]
prices:
  small: &small
    input: 1
    output: -2
  large: {{<<: *small, input: -3}}
"""
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {}, env={})
    assert [str(problem).rpartition("written.yaml:")[2] for problem in caught.value.problems] == [
        "5: prices.small.output: 0 to 1,000,000 are possible, got -2",
        "5: prices.large.output: 0 to 1,000,000 are possible, got -2",
        "6: prices.large.input: 0 to 1,000,000 are possible, got -3",
    ]


@pytest.mark.parametrize(("block_bytes", "block_tokens"), [(256, 64), (64, 16), (1, 1)])
def test_a_block_of_token_ids_has_a_quarter_of_the_bytes_of_one_of_text(block_bytes: int, block_tokens: int) -> None:
    assert RoutingConfig(block_bytes=block_bytes).block_tokens == block_tokens
