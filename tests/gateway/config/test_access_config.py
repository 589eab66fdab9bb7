"""The keys `key`, `tls` and `engine`: what is accepted, what is refused without quoting it, how they go to other processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from gateway.cluster.messages import decode_config, encode_config
from gateway.commands.advice import warnings_of
from gateway.config.kinds import EngineName
from gateway.config.parse import ConfigError
from gateway.config.schema import AUTO_ENGINE, Config, KeyConfig, PoolConfig, TlsConfig
from gateway.features.discovery.connecting import connected_as
from gateway.features.discovery.dns import DnsSource, DnsTarget
from gateway.features.discovery.kubernetes.objects import ObjectEndpoints, PodEndpoint, members_of
from gateway.features.table import WholeConfig, read
from gateway.features.workers.messages import SourceMember, SourceMembers, decode_members, encode
from gateway.fleet.engines import ENGINES
from gateway.fleet.membership import CONFIGURATION, Member, configured, merge
from tests.support.configs import load

SECRET = "sk-the-secret-itself"
URL, HTTPS = "http://10.0.0.1:8000", "https://10.0.0.2:8000"


def pool(*replicas: Any, **more: Any) -> Config:
    return load(None, {"pools": [{"replicas": list(replicas), **more}]}, env={})


def refusal(*replicas: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        pool(*replicas, **more)
    return str(refused.value)


def test_they_go_to_other_processes_as_they_are() -> None:
    config = pool(
        {
            "url": HTTPS,
            "key": {"env": "A"},
            "tls": {"ca_file": "/ca", "cert_file": "/c", "key_file": "/k", "server_name": "A.test"},
        },
        {"url": URL, "key": {"file": "/run/key"}, "engine": "distributed-llama"},
    )
    assert decode_config(WholeConfig, encode_config(config)) == config
    one, two = configured(config)
    assert (one.key, one.tls) == (KeyConfig(env="A"), TlsConfig("/ca", "/c", "/k", "a.test"))
    assert (two.key, two.tls, two.engine) == (KeyConfig(file="/run/key"), None, "distributed-llama"), "TLS is for https only"


def test_what_sources_have_found_goes_to_other_workers_with_it() -> None:
    key, tls = KeyConfig(env="A"), TlsConfig("/ca", server_name="a.test")
    member = Member("r", HTTPS, "p", 7, draining=True, instance="u", key=key, tls=tls, engine="ollama", addresses=("10.0.0.7",))
    found = SourceMember(*(getattr(member, name) for name in SourceMember.__struct_fields__))
    (received,) = decode_members(encode(SourceMembers("s", (found,)))).members
    told = len(SourceMember.__struct_fields__)  # ranks and roles are known to each process
    assert SourceMember.__struct_fields__ == tuple(field.name for field in dataclasses.fields(Member))[:told]
    assert Member(*(getattr(received, name) for name in SourceMember.__struct_fields__)) == member


@pytest.mark.parametrize(
    "wrong",
    [
        SECRET,
        {"env": SECRET},
        {"file": SECRET},
        [SECRET],
        {"env": [SECRET]},
        {"env": {"x": SECRET}},
        {"file": 7, "env": SECRET},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_quoted(wrong: Any, tmp_path: Path) -> None:
    text = refusal({"url": URL, "key": wrong})
    assert SECRET not in text
    assert "key" in text


@pytest.mark.parametrize(
    ("replica", "error"),
    [
        ({"url": URL, "key": {}}, "pools[0].replicas[0].key: either env or file is expected, got neither"),
        ({"url": URL, "key": {"env": "A", "file": "/k"}}, "either env or file is expected, got both"),
        ({"url": URL, "key": {"env": "A-B"}}, "the name of an environment variable is expected"),
        ({"url": URL, "key": {"file": "relative"}}, "the absolute path of a file is expected"),
        ({"url": URL, "key": {"file": "/run/k\0"}}, "the absolute path of a file is expected"),
        ({"url": HTTPS, "tls": {"ca_file": "ca.pem"}}, "the absolute path of a file is expected, got 'ca.pem'"),
        ({"url": HTTPS, "tls": {"ca_file": "/ca\0"}}, "the absolute path of a file is expected"),
        ({"url": URL, "key": {"value": "x"}}, "unknown key"),
        ({"url": URL, "tls": {"ca_file": "/ca"}}, "pools[0].replicas[0].tls: TLS needs an https URL"),
        ({"url": HTTPS, "tls": {"key_file": "/k"}}, "tls.key_file: it is the key of a cert_file, which is missing"),
        ({"url": HTTPS, "tls": {"insecure": True}}, "unknown key"),
        ({"url": HTTPS, "tls": True}, "a mapping is expected"),
        ({"url": HTTPS, "tls": {"server_name": "a b"}}, "is not a DNS name"),
        ({"url": URL, "engine": "dllama"}, "is not one of auto, vllm"),
    ],
)
def test_what_is_wrong_is_named(replica: dict[str, Any], error: str) -> None:
    assert error in refusal(replica)


def test_one_replica_is_connected_to_in_one_way() -> None:
    error = "pools[0].replicas[0] has the same URL with another key"
    assert error in refusal({"url": URL, "name": "a", "key": {"env": "A"}}, {"url": URL, "name": "b"})
    assert error in refusal({"url": URL, "name": "a", "engine": "ollama"}, {"url": URL, "name": "b"})
    pool({"url": URL, "name": "a", "key": {"env": "A"}}, {"url": URL, "name": "b", "key": {"env": "A"}})
    listed = Member("a", URL, "p", key=KeyConfig(env="A"))
    rejected = merge({CONFIGURATION: [listed], "operators": [Member("b", URL, "p")]}, ["p"]).rejected
    assert [each.why for each in rejected] == ["a has the same URL with another key, other TLS options or another engine"]


def discovery(**source: Any) -> Any:
    return load(None, {"pools": [{}], "discovery": [{"dns": {"name": "a.test", "port": 1}, **source}]}, env={}).discovery[0]


def test_discovery_has_the_short_form_of_tls_and_a_mapping() -> None:
    assert [discovery(tls=short).tls for short in (False, True)] == [False, True]
    options = discovery(tls={"ca_file": "/ca"}, key={"env": "A"}, engine="vllm")
    assert (options.tls, options.key, options.engine) == (TlsConfig("/ca"), KeyConfig(env="A"), "vllm")
    found = connected_as(Member("r", HTTPS, ""), options)
    assert (found.tls, found.key, found.engine) == (TlsConfig("/ca"), KeyConfig(env="A"), "vllm")
    assert connected_as(Member("r", URL, "", engine="ollama"), options).tls is None
    assert connected_as(Member("r", URL, "", engine="ollama"), options).engine == "ollama", "its own word goes first"
    assert decode_config(WholeConfig, encode_config(WholeConfig((PoolConfig(),), discovery=(options,)))).discovery == (options,)
    for wrong in ("yes", 7, []):
        with pytest.raises(ConfigError, match="true, false or a mapping"):
            discovery(tls=wrong)


async def test_what_dns_finds_is_connected_to_as_its_source_says() -> None:
    async def look_up() -> list[DnsTarget]:
        return [DnsTarget("10.0.0.9", 8000)]

    source = DnsSource(discovery(tls={"ca_file": "/ca", "server_name": "a.test"}, key={"env": "A"}), look_up)
    (member,) = await anext(aiter(source.watch(expects=False)))
    assert (member.url, member.tls, member.key) == (
        "https://10.0.0.9:8000",
        TlsConfig("/ca", server_name="a.test"),
        KeyConfig(env="A"),
    )


def test_the_engines_are_those_of_the_table() -> None:
    assert set(get_args(EngineName)) == {AUTO_ENGINE, *(engine.name for engine in ENGINES)}


def test_keys_that_go_over_the_network_in_clear_are_warned_of() -> None:
    key, dns = {"env": "A"}, {"name": "a.test", "port": 1}
    raw = {
        "pools": [
            {
                "name": "p",
                "replicas": [
                    {"url": url, "key": key} for url in (URL, HTTPS, "http://localhost:1", "http://[::1]:1", "HTTPS://b:1")
                ],
            },
            {"name": "q", "models": ["q"], "replicas": [{"url": "http://c:1", "key": key}, "http://d:1"]},
        ],
        "discovery": [
            {"dns": dns, "pool": "p", "key": key},
            {"dns": {**dns, "port": 2}, "pool": "p", "key": key, "tls": True},
            {"dns": {**dns, "port": 3}, "pool": "p"},
        ],
    }
    assert [problem.key for problem in warnings_of(read(None, raw, env={})) if "unencrypted" in problem.text] == [
        ("pools", 0, "replicas", 0, "url"),
        ("pools", 1, "replicas", 0, "url"),
        ("discovery", 0, "key"),
    ]


def test_a_missing_key_is_no_error_of_the_file() -> None:
    """It may come later, as a mounted secret: the replica is down until then."""
    (replica,) = pool({"url": URL, "key": {"env": "NOT_SET_ANYWHERE"}}).pools[0].replicas
    assert replica.key == KeyConfig(env="NOT_SET_ANYWHERE")


def test_what_kubernetes_finds_is_connected_to_as_its_source_says() -> None:
    source = {"kubernetes": {"pods": "app=vllm"}, "tls": {"ca_file": "/ca"}, "key": {"env": "A"}, "engine": "vllm"}
    (config,) = load(None, {"pools": [{}], "discovery": [source]}, env={}).discovery
    endpoint = PodEndpoint("10.0.0.9", 8000, "pod", "uid", ready=True, terminating=False)
    ((member,), notes) = members_of([ObjectEndpoints(1, [endpoint])], config)
    assert (member.url, member.tls, member.key, member.engine) == (
        "https://10.0.0.9:8000",
        TlsConfig("/ca"),
        KeyConfig(env="A"),
        "vllm",
    )
    assert not notes
