"""The key `discovery`: what is accepted, what is refused, and how it goes to other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.messages import decode_config, encode_config
from gateway.commands.cli import main
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.features.discovery.dns import DnsSource
from gateway.features.discovery.file import FileSource
from gateway.features.discovery.kubernetes.source import KubernetesSource
from gateway.features.discovery.section import KubernetesConfig
from gateway.features.discovery.table import sources_of
from gateway.features.table import WholeConfig
from tests.support.configs import load

GOOD: list[dict[str, Any]] = [
    {"kubernetes": "vllm"},
    {"kubernetes": {"service": "vllm", "namespace": "models", "port": 8000}},
    {"kubernetes": {"pods": "app=vllm,tier in (gpu, cpu),!old", "port": "http"}},
    {"kubernetes": {"service": "a", "server": "https://10.0.0.1:6443/", "token_file": "/t", "ca_file": "/c"}},
    {"dns": "_http._tcp.VLLM.test", "tls": True},
    {"dns": {"name": "vllm.test", "port": 8000, "servers": ["10.0.0.10", "[fd00::1]:5353", "fd00::2"]}},
    {"file": "/etc/replicas.yaml"},
]


def config_of(discovery: Any, **raw: Any) -> Config:
    return load(None, {"discovery": discovery, **raw}, env={})


def refusal(discovery: Any, **raw: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config_of(discovery, **({"pools": [{}]} | raw))
    return str(refused.value)


def read(tmp_path: Path, text: str) -> Config:
    (tmp_path / "c.yaml").write_text(text)
    return load(tmp_path / "c.yaml", {}, env={})


@pytest.mark.parametrize("source", GOOD, ids=range(len(GOOD)))
def test_it_goes_to_other_processes_as_it_is(source: dict[str, Any]) -> None:
    config = config_of([source], pools=[{}])
    assert decode_config(WholeConfig, encode_config(config)) == config


def test_each_has_a_source_of_its_kind_and_a_name() -> None:
    sources = sources_of(config_of(GOOD, pools=[{"name": "p"}]))
    assert [type(source) for source in sources] == [KubernetesSource] * 4 + [DnsSource] * 2 + [FileSource]
    assert [source.name for source in sources] == [
        "kubernetes service vllm",
        "kubernetes service vllm:8000 in models",
        "kubernetes pods app=vllm,tier in (gpu, cpu),!old:http",
        "kubernetes service a at https://10.0.0.1:6443",
        "dns _http._tcp.vllm.test",
        "dns vllm.test:8000 by 10.0.0.10:53",
        "file /etc/replicas.yaml",
    ]
    assert {source.pool for source in sources} == {"p"}


def test_what_is_written_in_other_ways_is_one_thing() -> None:
    dns, kubernetes = GOOD[5], GOOD[3]
    config = config_of([dns, kubernetes], pools=[{}])
    assert config.discovery[0].dns
    assert config.discovery[0].dns.servers == ("10.0.0.10:53", "[fd00::1]:5353", "[fd00::2]:53")
    assert config.discovery[1].kubernetes
    assert config.discovery[1].kubernetes.server == "https://10.0.0.1:6443"


@pytest.mark.parametrize(
    ("server", "files", "error"),
    [
        ("http://10.0.0.1:6443", {"token_file": "/t"}, "the token would go over the network unencrypted"),
        ("HTTP://api.test", {"token_file": "/t"}, "the token would go over the network unencrypted"),
        ("http://10.0.0.1:6443", {"ca_file": "/c"}, "TLS needs an https URL"),
        ("http://127.0.0.1:8001", {"ca_file": "/c"}, "TLS needs an https URL"),
        ("http://127.0.0.1:8001", {"token_file": "/t"}, ""),
        ("http://localhost:8001", {"token_file": "/t"}, ""),
        ("http://10.0.0.1:6443", {}, ""),
        ("", {"token_file": "/t", "ca_file": "/c"}, ""),
        ("https://10.0.0.1:6443", {"token_file": "t"}, "the absolute path of a file is expected"),
    ],
)
def test_an_api_server_gets_a_token_over_tls_only(server: str, files: dict[str, str], error: str) -> None:
    source = {"kubernetes": {"service": "vllm", **({"server": server} if server else {}), **files}}
    if error:
        assert error in refusal([source])
    else:
        config_of([source], pools=[{}])


def test_a_source_that_is_wrong_in_itself_hides_no_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read(
            tmp_path,
            "discovery:\n  - dns: vllm\n  - consul: x\n  - {kubernetes: {port: 1}, pool: 7}\n  - file: /a\n    pool: q\n",
        )
    assert [str(problem).partition("/c.yaml:")[2].partition(";")[0] for problem in refused.value.problems] == [
        "2: discovery[0].dns.port: it is needed, or a name of SRV records such as _http._tcp.vllm",
        "3: discovery[1].consul: unknown key",
        "4: discovery[2].pool: a text is expected, got 7",
        "4: discovery[2].kubernetes: either service or pods is expected",
        "6: discovery[3].pool: 'q' is no pool's name",
    ]


def test_pools_may_be_left_out(tmp_path: Path) -> None:
    for text in ("discovery: [{kubernetes: vllm}]", "discovery: [{kubernetes: vllm}]\npools: []"):
        config = read(tmp_path, text)
        assert [(pool.name, pool.replicas) for pool in config.pools] == [("default", ())]
        assert config.discovery[0].kubernetes == KubernetesConfig("vllm")
    with pytest.raises(ConfigError, match="at least one pool with a replica"):
        read(tmp_path, "discovery: []")
    with pytest.raises(ConfigError, match="pools: a list is expected, got 0"):
        read(tmp_path, "discovery: [{kubernetes: vllm}]\npools: 0")


@pytest.mark.parametrize(
    ("discovery", "problem"),
    [
        ([{}], "discovery[0]: one of dns, kubernetes, file is expected, got none"),
        ([{"dns": "_a.b", "file": "c"}], "discovery[0]: one of dns, kubernetes, file is expected, got dns and file"),
        ([{"kubernetes": {}}], "discovery[0].kubernetes: either service or pods is expected"),
        ([{"kubernetes": {"service": "a", "pods": "b"}}], "discovery[0].kubernetes: either service or pods is expected"),
        ([{"kubernetes": "Upper"}], "discovery[0].kubernetes.service: "),
        ([{"kubernetes": {"pods": "app=vllm&x=1"}}], "discovery[0].kubernetes.pods: a label selector such as"),
        ([{"kubernetes": {"service": "a", "port": 0}}], "discovery[0].kubernetes.port: "),
        ([{"kubernetes": {"service": "a", "server": "a"}}], "discovery[0].kubernetes.server: 'a' is not a base URL"),
        ([{"dns": "10.0.0.1"}], "discovery[0].dns.name: '10.0.0.1' is not a DNS name"),
        ([{"dns": "a b"}], "discovery[0].dns.name: 'a b' is not a DNS name"),
        ([{"dns": {"name": "a.b", "port": 65536}}], "discovery[0].dns.port: "),
        ([{"dns": {"name": "a.b", "servers": ["ns.test"]}}], "'ns.test' is not the address of a name server"),
        ([{"dns": {"name": "a.b", "servers": ["1.1.1.1:0"]}}], "'1.1.1.1:0' has no valid port"),
        ([{"dns": {"name": "a.b", "servers": ["1.1.1.1"] * 9}}], "discovery[0].dns.servers"),
        ([{"dns": "_a.b"}, {"dns": "_A.b"}], "discovery[1]: the same source as discovery[0]"),
        ([{"dns": "_a.b", "pool": "none"}], "discovery[0].pool: 'none' is no pool's name"),
        ([{"dns": "a.b"}], "discovery[0].dns.port: it is needed, or a name of SRV records such as _http._tcp.a.b"),
        ([{"file": "a", "tls": True}], "discovery[0].tls: a file has the whole URLs of its replicas"),
        ([{"dns": {"name": "a.b", "port": 1, "servers": ["fe80::1%eth0"]}}], "is not the address of a name server"),
        ([{"kubernetes": {"service": "a", "port": "8000"}}], "discovery[0].kubernetes.port: "),
        ([{"file": "a", "role": "decoder"}], "discovery[0].role: 'decoder' is not one of prefill, decode"),
        ([{"file": "a"}] * 65, "discovery"),
        ([{"kubernetse": "a"}], "discovery[0].kubernetse: unknown key; did you mean 'kubernetes'?"),
    ],
)
def test_what_is_refused(discovery: Any, problem: str) -> None:
    assert problem in refusal(discovery)


def test_with_several_pools_each_source_names_its_own() -> None:
    pools = [{"name": "a", "models": ["x"]}, {"name": "b"}]
    assert "discovery[0].pool: the name of the replicas' pool is needed: one of a, b" in refusal([{"dns": "_a.b"}], pools=pools)
    assert config_of([{"dns": "_a.b", "pool": "b"}], pools=pools).discovery[0].pool == "b"


def test_sources_that_differ_in_what_they_watch_may_be_together() -> None:
    server = {"server": "https://a"}
    kinds = [{"service": "a"}, {"service": "a", "port": 1}, {"service": "a", "port": 2}, {"service": "a", **server}]
    config = config_of([{"kubernetes": each} for each in kinds], pools=[{}])
    assert len({source.name for source in sources_of(config)}) == 4


def test_check_counts_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("discovery: [{kubernetes: vllm}, {dns: _a.b}]")
    assert main(["check", str(tmp_path / "c.yaml")]) == 0
    assert "good: pools: 1, replicas: 0, sources: 2, policy: cost" in capsys.readouterr().out
