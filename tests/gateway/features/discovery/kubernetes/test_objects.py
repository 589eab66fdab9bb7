"""From EndpointSlices and pods to members."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.config.kinds import Role
from gateway.features.discovery.kubernetes.objects import (
    MAX_ENDPOINTS,
    MAX_NOTES,
    ObjectEndpoints,
    members_of,
    read_pod,
    read_slice,
)
from gateway.features.discovery.section import DiscoveryConfig, KubernetesConfig
from gateway.fleet.membership import Member, problem_of
from tests.support.kubernetes import endpoint, pod_of, slice_of

NO_NAME = "its name is not 1 to 100 printable ASCII characters without spaces and quotes"
SERVICE = DiscoveryConfig(kubernetes=KubernetesConfig(service="vllm"), pool="p")
PODS = DiscoveryConfig(kubernetes=KubernetesConfig(pods="app=vllm"), pool="p")


def over(config: DiscoveryConfig, **settings: Any) -> DiscoveryConfig:
    """With other settings of Kubernetes."""
    assert config.kubernetes
    return replace(config, kubernetes=replace(config.kubernetes, **settings))


def read(config: DiscoveryConfig, *objects: Any) -> list[ObjectEndpoints]:
    assert config.kubernetes
    reader, port = read_pod if config.kubernetes.pods else read_slice, config.kubernetes.port
    return [ObjectEndpoints(int(each["metadata"].get("resourceVersion", 0)), reader(each, port)) for each in objects]


def members(config: DiscoveryConfig, *objects: Any, prefix: str = "") -> list[Member]:
    return members_of(read(config, *objects), config, prefix)[0]


def notes(config: DiscoveryConfig, *objects: Any) -> list[str]:
    return members_of(read(config, *objects), config)[1]


def test_a_pod_of_a_slice_is_a_member_by_its_name() -> None:
    found = members(SERVICE, slice_of("s", endpoint("10.0.0.1", "vllm-0"), endpoint("10.0.0.2")))
    assert found == [
        Member("10.0.0.2:8000", "http://10.0.0.2:8000", ""),
        Member("vllm-0", "http://10.0.0.1:8000", "", instance="uid-of-vllm-0"),
    ]


def test_pods_of_another_namespace_are_named_with_it() -> None:
    (found,) = members(SERVICE, slice_of("s", endpoint("10.0.0.1", "vllm-0")), prefix="models/")
    assert found.name == "models/vllm-0"


def test_a_name_that_is_too_long_is_cut_and_stays_one_of_its_own() -> None:
    pods = [endpoint(f"10.0.0.{number}", f"{'vllm-' * 20}{number}") for number in range(3)]
    found = members(SERVICE, slice_of("s", *pods), prefix="models/")
    assert [len(member.name) for member in found] == [100] * 3
    assert len({member.name for member in found}) == 3
    assert not any(problem_of(replaced(member, pool="p"), {"p"}) for member in found)


def test_tls_and_addresses_of_ipv6() -> None:
    config = DiscoveryConfig(kubernetes=KubernetesConfig(service="vllm"), pool="p", tls=True)
    (found,) = members(config, slice_of("s", endpoint("fd00::1"), family="IPv6"))
    assert (found.name, found.url) == ("[fd00::1]:8000", "https://[fd00::1]:8000")


@pytest.mark.parametrize(
    ("conditions", "draining"),
    [
        ({}, False),
        ({"ready": False}, True),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": True, "terminating": True}, True),  # publishNotReadyAddresses
    ],
)
def test_what_is_not_ready_or_terminates_drains(conditions: dict[str, bool], draining: bool) -> None:
    (found,) = members(SERVICE, slice_of("s", endpoint("10.0.0.1", "a", **conditions)))
    assert found.draining == draining


def test_an_unknown_readiness_counts_as_ready() -> None:
    (found,) = members(SERVICE, slice_of("s", {"addresses": ["10.0.0.1"], "conditions": {}}))
    assert not found.draining
    (found,) = members(SERVICE, slice_of("s", {"addresses": ["10.0.0.1"]}))
    assert not found.draining


def test_an_address_that_a_pod_inherits_is_the_new_pod_s() -> None:
    old, new = endpoint("10.0.0.1", "old", ready=False, terminating=True), endpoint("10.0.0.1", "new")
    for order in ((old, new), (new, old)):
        (found,) = members(SERVICE, slice_of("s", *order))
        assert (found.name, found.draining) == ("new", False)


def test_a_name_that_a_pod_inherits_is_the_new_pod_s() -> None:
    old = endpoint("10.0.0.1", "vllm-0", "uid-1", ready=False, terminating=True)
    for order in ((old, endpoint("10.0.0.2", "vllm-0", "uid-2")), (endpoint("10.0.0.2", "vllm-0", "uid-2"), old)):
        (found,) = members(SERVICE, slice_of("s", *order))
        assert (found.url, found.instance) == ("http://10.0.0.2:8000", "uid-2")


def test_a_pod_with_addresses_of_both_kinds_is_one_member_in_the_worse_state_of_the_two() -> None:
    """Their slices change one after the other: it must not become another replica in between."""
    well, leaving = endpoint("10.0.0.1", "a"), endpoint("10.0.0.1", "a", ready=False, terminating=True)
    six, six_leaving = endpoint("fd00::1", "a"), endpoint("fd00::1", "a", ready=False)
    six_ending = endpoint("fd00::1", "a", terminating=True)  # publishNotReadyAddresses: it stays ready
    for first, second, draining in (
        (well, six, False),
        (leaving, six, True),
        (well, six_leaving, True),
        (leaving, six_leaving, True),
        (well, six_ending, True),
    ):
        slices = [slice_of("six", second, family="IPv6"), slice_of("four", first)]
        for order in (slices, slices[::-1]):
            (found,) = members(SERVICE, *order)
            assert (found.url, found.draining) == ("http://10.0.0.1:8000", draining)


def test_an_endpoint_in_two_slices_is_one_member_and_the_newer_one_counts() -> None:
    old, new = slice_of("one", endpoint("10.0.0.1", "a", ready=False)), slice_of("two", endpoint("10.0.0.1", "a"))
    for order in ((old, new), (new, old)):
        for versions, draining in ((("9", "10"), False), (("10", "9"), True)):
            old["metadata"]["resourceVersion"], new["metadata"]["resourceVersion"] = versions
            (found,) = members(SERVICE, *order)
            assert found.draining == draining


PORTS = [
    {"name": "metrics", "port": 9090},
    {"name": "http", "port": 8000},
    {"name": "grpc", "port": 50051},
    {"name": "udp", "port": 53, "protocol": "UDP"},
]


@pytest.mark.parametrize(
    ("ports", "wanted", "number"),
    [
        (PORTS, None, 8000),
        (PORTS[2:], None, 50051),
        (PORTS, "grpc", 50051),
        (PORTS, 7000, 7000),
        (PORTS, "none", None),
        (PORTS, "udp", None),
        ([], None, None),
        (None, 7000, 7000),
        ([{"port": None}], None, None),
        ([{"port": 8000}, {"port": 9090}], None, 8000),  # none has a name
        ([{"name": "http", "port": 8000}, {"name": "http", "port": 15020}], "http", 8000),
        ([{"port": 99_999}, {"port": 9090}], None, 9090),
    ],
)
def test_the_port(ports: Any, wanted: int | str | None, number: int | None) -> None:
    slice_ = {**slice_of("s", endpoint("10.0.0.1")), "ports": ports}
    found = members(over(SERVICE, port=wanted), slice_)
    assert [each.url for each in found] == ([f"http://10.0.0.1:{number}"] if number else [])
    reason = "it has no port" if wanted is None else f"it has no port named {wanted}"
    assert notes(over(SERVICE, port=wanted), slice_) == ([] if number else [f"10.0.0.1: {reason}"])


def test_a_pod_says_what_its_annotations_say() -> None:
    plain, full = (
        pod_of("a", "10.0.0.1"),
        pod_of("b", "10.0.0.2", pool="q", model="m", port="9000", weight="5", capacity_tokens="400000", drain="true"),
    )
    full["metadata"]["annotations"].update({"warmroute.io/role": "prefill", "warmroute.io/bootstrap-port": "9"})
    assert members(PODS, plain, full) == [
        Member("a", "http://10.0.0.1:8000", "", instance="uid-of-a"),
        Member(
            *("b", "http://10.0.0.2:9000", "q", 400_000),
            draining=True,
            instance="uid-of-b",
            model="m",
            weight=5,
            role="prefill",
            bootstrap_port=9,
        ),
    ]


@pytest.mark.parametrize(
    ("label", "annotations", "source", "role"),
    [
        ("prefill", {}, None, "prefill"),
        ("decode", {}, "prefill", "decode"),
        ("prefill-decode", {}, None, ""),
        ("decode", {"role": "prefill"}, None, "prefill"),
        ("decode", {"role": "both"}, None, "decode"),
        ("", {}, "prefill", "prefill"),
    ],
)
def test_the_role_of_a_pod_is_its_annotation_s_or_llm_d_s_label_or_its_source_s(
    label: str, annotations: dict[str, str], source: Role | None, role: str
) -> None:
    pod = pod_of("a", "10.0.0.1", **annotations)
    pod["metadata"]["labels"]["llm-d.ai/role"] = label
    assert [member.role for member in members(replace(PODS, role=source), pod)] == [role]


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": "http"},
        {"port": "99999"},
        {"port": "0"},
        {"weight": "0"},
        {"weight": "101"},
        {"weight": "0.5"},
        {"capacity_tokens": "-1"},
        {"capacity_tokens": "400k"},
        {"capacity_tokens": "9" * 30},
        {"drain": "True"},
        {"role": "both"},
        {"bootstrap_port": "0"},
    ],
)
def test_an_annotation_that_is_wrong_is_named_and_changes_nothing(wrong: dict[str, str]) -> None:
    pod = pod_of("a", "10.0.0.1", **wrong)
    assert members(PODS, pod) == [Member("a", "http://10.0.0.1:8000", "", instance="uid-of-a")]
    (note,) = notes(PODS, pod)
    assert note.startswith(f"a: the annotation warmroute.io/{next(iter(wrong)).replace('_', '-')} is ")


def test_a_bootstrap_port_of_a_decoder_is_named() -> None:
    pod = pod_of("a", "10.0.0.1", bootstrap_port="9")
    pod["metadata"]["labels"]["llm-d.ai/role"] = "decode"
    assert notes(PODS, pod) == ["a: the annotation warmroute.io/bootstrap-port is for prefillers only, and its role is decode"]


def test_an_address_that_is_none_is_no_member() -> None:
    for address in ("10.0.0.1/evil", "host.test", "", "10.0.0.1:80", "fd00::1%eth0"):
        found = members(SERVICE, slice_of("s", endpoint(address)))
        assert not found or found[0].url == "http://[fd00::1%eth0]:8000"


def test_what_is_wrong_is_noted_for_some_only() -> None:
    pods = [pod_of(f"{'p' * 1000}{number}", f"10.0.0.{number}", capacity_tokens="x") for number in range(250)]
    found = notes(PODS, *pods)
    assert len(found) == MAX_NOTES
    assert max(map(len, found)) < 400


def test_a_slice_has_no_more_endpoints_than_kubernetes_allows() -> None:
    addresses = [endpoint(f"10.0.{number >> 8}.{number & 255}") for number in range(MAX_ENDPOINTS + 50)]
    assert len(read_slice(slice_of("s", *addresses), None)) == MAX_ENDPOINTS


def test_a_pod_that_is_deleted_drains_at_once_and_one_that_is_not_ready_too() -> None:
    deleted = pod_of("a", "10.0.0.1")
    deleted["metadata"]["deletionTimestamp"] = "2026-11-25T00:00:00Z"
    assert [each.draining for each in members(PODS, deleted, pod_of("b", "10.0.0.2", ready=False))] == [True, True]


@pytest.mark.parametrize("change", [{"phase": "Succeeded"}, {"phase": "Failed"}, {"podIP": ""}, {"podIP": None}])
def test_a_pod_that_has_ended_or_has_no_address_is_no_member(change: dict[str, Any]) -> None:
    pod = pod_of("a", "10.0.0.1")
    pod["status"].update(change)
    assert not members(PODS, pod)


PORT_CHOICES = st.sampled_from([None, "http", 8000])
odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["[]", "{}", "[[{}]]"])


def parts(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in it."""
    found = list[tuple[Any, Any]]()
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *parts(value[key])]
    return found


@st.composite
def damaged(draw: st.DrawFn, sound: Callable[[], list[Any]]) -> list[Any]:
    """Sound objects, with something else in a few places."""
    objects = sound()
    for _ in range(draw(st.integers(1, 4))):
        container, key = draw(st.sampled_from(parts(objects)))
        other = draw(odd)
        container[key] = json.loads(other) if other in ("[]", "{}", "[[{}]]") else other
    return [each for each in objects if isinstance(each, dict)]


def slices() -> list[Any]:
    return [slice_of("s", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2")), slice_of("t", endpoint("fd00::1", "a"))]


def pods() -> list[Any]:
    return [pod_of("a", "10.0.0.1", pool="q", capacity_tokens="7", port="9"), pod_of("b", "10.0.0.2")]


@given(damaged(slices), PORT_CHOICES)
def test_no_slice_raises(objects: list[Any], port: int | str | None) -> None:
    check(members_of([ObjectEndpoints(1, read_slice(each, port)) for each in objects], SERVICE))


@given(damaged(pods), PORT_CHOICES)
def test_no_pod_raises(objects: list[Any], port: int | str | None) -> None:
    check(members_of([ObjectEndpoints(1, read_pod(each, port)) for each in objects], PODS))


def check(result: tuple[list[Member], list[str]]) -> None:
    """Names and URLs come once, and what is no member has a reason that can be logged."""
    found, _ = result
    for member in found:
        assert problem_of(replaced(member, pool="p"), {"p"}) in ("", NO_NAME)
    assert len({member.name for member in found}) == len({member.url for member in found}) == len(found)
