"""What engines report, read from excerpts of their real answers and from the answers themselves where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.fleet.engines import (
    ENGINES,
    LLAMACPP,
    MAX_PAGE_BYTES,
    OURS,
    SGLANG,
    SLICE_BYTES,
    TGI,
    UNKNOWN,
    VLLM,
    EngineProfile,
    Facts,
    PageReader,
    Sample,
    kv_of,
    read,
    recognise,
    samples_of,
    slices,
)
from replica.api.metrics import ReplicaMetrics
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from tests.support.pages import parse_page
from tests.support.paths import CAPTURES

VLLM_PAGE = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79524588185e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="smollm2"} 1.0
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="capacity"} 77.0
vllm:num_requests_running_created{engine="0",model_name="smollm2"} 1.79e+09
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="0",kv_cache_dtype_skip_layers="[]",\
kv_cache_size_tokens="11648",num_cpu_blocks="None",num_gpu_blocks="364"} 1.0
"""
LLAMACPP_PAGE = b"""\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
"""
PROPS = {"default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": 4096}, "total_slots": 2, "is_sleeping": False}


def facts(page: bytes, *owners: object) -> Facts:
    parsed = parse_page(page)
    return read(recognise(owners, parsed), parsed)


def info(engine: str = "0", **labels: object) -> bytes:
    written = ",".join(f'{name}="{value}"' for name, value in {"engine": engine, **labels}.items())
    return f"vllm:cache_config_info{{{written}}} 1.0\n".encode()


# -- each engine's own answers


def test_vllm() -> None:
    assert facts(VLLM_PAGE, "vllm") == Facts(VLLM, 11648, 1795245881.85, 1, 4, True)


def test_vllm_keeps_a_series_for_each_set_of_adapters_that_has_run() -> None:
    series = b"".join(
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%d"} 1.7e+09\n' % each for each in range(5000)
    )
    assert facts(series + VLLM_PAGE, "vllm") == replace(facts(VLLM_PAGE, "vllm"), adapters=4)
    absurd = (b'vllm:lora_requests_info{max_lora="%s"} 1\n' % each for each in (b"0", b"-1", b"nan", b"1e9", b"x", b""))
    assert all(facts(line + VLLM_PAGE, "vllm").adapters is None for line in absurd)


def test_vllm_before_it_reported_its_size_in_tokens() -> None:
    old = info(block_size=32, num_gpu_blocks=364, enable_prefix_caching=False)
    assert facts(old, "vllm") == Facts(VLLM, 32 * 364, caching=False)


def test_vllm_with_several_ranks_has_the_sum_of_their_caches() -> None:
    ranks = info("0", kv_cache_size_tokens=1000) + info("1", kv_cache_size_tokens=2000)
    running = b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    each = Facts(VLLM, 1000, running=3), Facts(VLLM, 2000, running=4)
    assert facts(ranks + running, "vllm") == Facts(VLLM, 3000, running=7, caches=2, ranks=each)
    twice = b'sglang:max_total_num_tokens{tp_rank="0"} 1000\nsglang:max_total_num_tokens{tp_rank="1"} 1000\n'
    assert facts(twice, "sglang").kv_tokens == 1000, "tensor-parallel ranks share one cache"
    assert facts(ranks + info("2", num_gpu_blocks="None"), "vllm").kv_tokens is None, "a sum with a gap is no size"


def test_requests_that_wait_for_a_transfer_are_no_queue_of_vllms() -> None:
    page = b'vllm:num_requests_waiting{engine="0"} 9\n'
    kinds = [
        b'vllm:num_requests_waiting_by_reason{engine="0",reason="%b"} %d\n' % kind
        for kind in ((b"capacity", 2), (b"deferred", 7))
    ]
    assert facts(page, "vllm").waiting == 9
    assert facts(page + b"".join(kinds), "vllm").waiting == 2
    absurd = b'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 10\n'
    assert facts(page + absurd, "vllm").waiting == 9


def test_whether_prefix_caching_is_on_is_known_where_all_ranks_agree() -> None:
    on, off = info("0", enable_prefix_caching=True), info("1", enable_prefix_caching=False)
    assert [facts(page, "vllm").caching for page in (on, off, on + off, info())] == [True, False, None, None]


def test_our_own_replica_speaks_vllms_names() -> None:
    page = parse_page(ReplicaMetrics([SimEngine(SimConfig(kv_tokens=1600))], "m").text())
    found = read(recognise(["warmroute"], page), page)
    assert (found.engine, found.kv_tokens, found.running, found.waiting) == (OURS, 1600, 0, 0)
    assert found.started is not None
    assert found.started > 1.7e9


@pytest.mark.parametrize("prefix", [b"sglang:", b"sglang_"])
def test_sglang(prefix: bytes) -> None:
    page = b'X:num_running_reqs{model_name="m"} 5.0\nX:num_queue_reqs{model_name="m"} 0.0\n'.replace(b"X:", prefix)
    assert facts(page) == Facts(SGLANG, running=5, waiting=0)
    assert facts(page + prefix + b"max_total_num_tokens 444500.0\n").kv_tokens == 444500
    assert facts(page + prefix + b'cache_config_info{num_pages="1000",page_size="64"} 1.0\n').kv_tokens == 64000


@pytest.mark.parametrize("name", [b"my_engine:running", b"my_engine_running", b"my:engine:running"])
def test_a_colon_of_a_metrics_name_may_be_anywhere(name: bytes) -> None:
    found = samples_of([b"my_engine_running", b"other"]).search(b"# HELP\n" + name + b'{a="b"} 3\n')
    assert found
    assert found["value"] == b"3"


def test_sglang_reports_its_size_elsewhere_too() -> None:
    loads = [{"dp_rank": 0, "max_total_num_tokens": 1000}, {"dp_rank": 1, "max_total_num_tokens": 500}]
    assert kv_of(SGLANG, {"dp_rank_count": 2, "loads": loads}) == 1500
    assert kv_of(SGLANG, {"max_total_num_tokens": 444500, "version": "0.5"}) == 444500
    for unclear in ({"loads": []}, {"loads": [*loads, {}]}, {"loads": [1]}, {"loads": None}, []):
        assert kv_of(SGLANG, unclear) is None


def test_llamacpp() -> None:
    assert facts(LLAMACPP_PAGE) == Facts(LLAMACPP, running=2, waiting=3)
    assert kv_of(LLAMACPP, PROPS) == 8192


def test_what_llamacpp_can_hold_is_more_than_its_kv_cache() -> None:
    assert Facts(LLAMACPP, 8192).capacity_tokens is None
    assert Facts(VLLM, 8192).capacity_tokens == 8192


def test_tgi() -> None:
    assert facts(b"tgi_batch_current_size 3\ntgi_queue_size 9\n") == Facts(TGI, running=3, waiting=9)


def test_the_model_list_takes_precedence_over_the_page() -> None:
    assert recognise([None, "somebody", "llamacpp"], parse_page(VLLM_PAGE)) is LLAMACPP
    assert recognise(["somebody", 7, ""], parse_page(VLLM_PAGE)) is VLLM
    assert recognise(["somebody", ""], {}) is UNKNOWN


def test_every_engine_has_its_hints() -> None:
    assert len({engine.name for engine in (*ENGINES, UNKNOWN)}) == len(ENGINES) + 1
    for engine in (*ENGINES, UNKNOWN):
        assert engine.silent
        assert engine.zero


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_an_engines_page_has_what_is_read_of_it(engine: EngineProfile) -> None:
    asked = AskedPage()
    assert engine.page_kv(asked, engine.rank) is None
    assert asked.names == set(engine.kv_metrics)
    read(engine, asked)
    assert asked.names == set(parse_page(b"".join(b"%b 1\n" % name.encode() for name in asked.names)))


class AskedPage(dict[str, Sequence[Sample]]):
    """A page without samples that notes the names it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default


at_hand = pytest.mark.skipif(not CAPTURES.is_dir(), reason="the recorded answers are not at hand")


def owners(file: Path) -> list[str]:
    return [entry["owned_by"] for entry in json.loads(file.read_text("utf-8"))["response"]["data"]]


@at_hand
@pytest.mark.parametrize(
    ("engine", "page", "expected"),
    [
        ("vllm", "metrics_idle", Facts(VLLM, 11648, 1795245881.85, 0, 0, True, (0.0, 0.0, 0.0))),
        ("vllm", "metrics_under_load", Facts(VLLM, 11648, 1795245881.85, 1, 0, True, (162.0, 21968.0, 0.06060606060606055))),
        ("llamacpp", "metrics_idle", Facts(LLAMACPP, running=0, waiting=0, progress=(0.0, 0.0, 0.0))),
        ("llamacpp", "metrics_under_load", Facts(LLAMACPP, running=1, waiting=0, progress=(160.0, 5466.0, 0.0))),
    ],
)
def test_recorded_pages(engine: str, page: str, expected: Facts) -> None:
    folder = CAPTURES / engine
    recorded = (folder / f"{page}.txt").read_bytes()
    assert facts(recorded) == facts(recorded, *owners(folder / "models.json")) == expected


@at_hand
def test_recorded_props() -> None:
    assert kv_of(LLAMACPP, json.loads((CAPTURES / "llamacpp" / "props.json").read_bytes())["response"]) == 8192


# -- doubt

NONSENSE = ["NaN", "+Inf", "-Inf", "-1", "1e300", "9" * 400, "many", "", "0x10", "1 2 3", "12.5.1", "\xff"]


@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_is_not_reported(value: str) -> None:
    page = "\n".join(
        [
            f"process_start_time_seconds {value}",
            f"vllm:num_requests_running {value}",
            f'vllm:num_requests_waiting{{engine="0"}} {value}',
            f'vllm:cache_config_info{{kv_cache_size_tokens="{value}",block_size="{value}",num_gpu_blocks="364"}} 1.0',
        ]
    )
    found = facts(page.encode("latin-1"), "vllm")
    if value == "1 2 3":  # a sample may have a time behind it
        assert found == Facts(VLLM, None, 1.0, 1, 1)
    else:
        assert found == Facts(VLLM)


@pytest.mark.parametrize("value", [None, True, -1, 0, 1e300, float("nan"), float("inf"), "many", [], {}, 10**12, 10**400])
def test_nonsense_in_json_is_not_reported(value: Any) -> None:
    assert kv_of(LLAMACPP, {"default_generation_settings": {"n_ctx": value}, "total_slots": 2}) is None
    assert kv_of(LLAMACPP, {"default_generation_settings": {"n_ctx": 4096}, "total_slots": value}) is None
    assert kv_of(LLAMACPP, {"default_generation_settings": value}) is None
    assert kv_of(SGLANG, {"max_total_num_tokens": value}) is None
    assert kv_of(SGLANG, value) is None
    assert kv_of(VLLM, PROPS) is None


def test_labels_may_hold_anything() -> None:
    odd = rb'vllm:num_requests_running{model_name="a}b\"c, d=\\",engine="0"} 5' + b"\n"
    assert facts(odd, "vllm").running == 5
    assert facts(odd.replace(b"} 5", b" 5"), "vllm").running is None


def test_a_page_beyond_reason_is_not_read_to_its_end() -> None:
    assert facts(b"#" * MAX_PAGE_BYTES + b"\n" + VLLM_PAGE, "vllm") == Facts(VLLM)


fragments = st.sampled_from(
    [
        b"vllm:num_requests_running",
        b"sglang_num_running_reqs",
        b"vllm:cache_config_info",
        b'{engine="0"',
        b'kv_cache_size_tokens="1',
        b'"',
        b"\\",
        b"}",
        b",",
        b" 1",
        b" NaN",
        b"\n",
        b"process_start_time_seconds ",
        b"-9e99",
    ]
) | st.binary(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["loads", "max_total_num_tokens", "default_generation_settings", "n_ctx", "total_slots"]), inner
        )
    ),
)


@given(st.lists(fragments, max_size=20).map(b"".join), st.lists(st.none() | st.text(max_size=5)))
@example(VLLM_PAGE, [])
def test_no_page_raises_or_gives_impossible_values(page: bytes, some: list[str | None]) -> None:
    sane(facts(page, *some))
    for engine in ENGINES:
        sane(read(engine, parse_page(page)))


@given(
    st.lists(st.sampled_from([b"\n", b"x" * 1000, b"x" * 70_000, b'vllm:num_requests_running{engine="0"} 3\n']), max_size=25)
)
def test_a_page_is_read_in_slices_of_whole_lines(parts: list[bytes]) -> None:
    page = b"".join(parts)
    made = list(slices(page))
    lines = [line for line in page.splitlines(keepends=True) if len(line) <= SLICE_BYTES]
    assert [line for each in made for line in each.splitlines(keepends=True)] == lines
    assert all(len(each) <= SLICE_BYTES for each in made)
    at_once = PageReader()
    at_once.feed(b"".join(lines))
    assert parse_page(page) == at_once.page


def sane(found: Facts) -> None:
    assert found.kv_tokens is None or 1 <= found.kv_tokens <= 10**10
    assert found.started is None or 0 < found.started <= 1e11
    for count in (found.running, found.waiting):
        assert count is None or 0 <= count <= 10**6


@given(st.sampled_from([*ENGINES, UNKNOWN]), json_values)
def test_no_answer_raises_or_gives_impossible_values(engine: EngineProfile, answer: Any) -> None:
    sane(Facts(engine, kv_of(engine, answer)))
