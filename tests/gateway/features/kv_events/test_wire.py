"""Batches of events in all forms that engines have published."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest

from gateway.features.kv_events.wire import DISK, GPU, HOST, BlocksRemoved, BlocksStored, CacheCleared, WireError, read

FIRST, SECOND = 0x0123456789ABCDEF, 0xFEDCBA9876543210
TOKENS = array("I", [1, 2, 3, 4, 5, 6, 128000, 70000]).tobytes()
# vLLM's map form (from 0.24 on), and its last array form, of the same events, and SGLang's array form: recorded bytes.
MAP = """
93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf0123456789abcdefcffedcba9876543210
b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398010203040506ce0001f400ce00011170aa626c6f636b5f73697a6504
a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800
b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564
ac626c6f636b5f68617368657391cf0123456789abcdefa66d656469756da3475055a967726f75705f6964780081a474797065
b0416c6c426c6f636b73436c656172656400
"""
ARRAY = """
93cb3ff8000000000000939cab426c6f636b53746f72656492cf0123456789abcdefcffedcba9876543210c098010203040506ce0001f400ce00011170
04c0a3475055c092c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cf0123456789abcdefa34750550091
b0416c6c426c6f636b73436c656172656400
"""
SGLANG = """
93cb3ff80000000000009397ab426c6f636b53746f72656491d3cf97adeedb59e05bc0940102030404c0a347505593ac426c6f636b52656d6f766564
91d3cf97adeedb59e05ba347505591b0416c6c426c6f636b73436c656172656400
"""


def of(*events: Any, envelope: Any = None) -> bytes:
    return msgspec.msgpack.encode(envelope or [0.5, list(events), 3])


def stored(**more: Any) -> dict[str, Any]:
    base = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    return {**base, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def only(payload: bytes) -> Any:
    batch = read(payload)
    assert batch.dropped == 0
    (event,) = batch.events
    return event


@pytest.mark.parametrize("form", [MAP, ARRAY])
def test_both_forms_of_vllm(form: str) -> None:
    batch = read(bytes.fromhex(form))
    assert batch.dropped == 0
    assert batch.events == [
        BlocksStored([FIRST, SECOND], None, TOKENS, 4, GPU, 0, "", "", None),
        BlocksRemoved([FIRST], GPU, 0, None),
        CacheCleared(),
    ]


def test_sglangs_form_with_signed_hashes() -> None:
    batch, number = read(bytes.fromhex(SGLANG)), -3488128144981237669 & (2**64 - 1)
    tokens = array("I", [1, 2, 3, 4]).tobytes()
    assert batch.events == [
        BlocksStored([number], None, tokens, 4, GPU, 0, "", "", None),
        BlocksRemoved([number], GPU, 0, None),
        CacheCleared(),
    ]


def test_raw_hashes_count_by_their_last_bytes() -> None:
    event = only(of(stored(block_hashes=[b"\xab" * 32], parent_block_hash=b"\xcd" * 32)))
    assert (event.hashes, event.parent) == ([0xABABABABABABABAB], 0xCDCDCDCDCDCDCDCD)


def test_a_batch_may_be_a_map_or_lack_its_rank() -> None:
    for envelope in ({"ts": 1.0, "events": [{"type": "AllBlocksCleared"}]}, [1.0, [["AllBlocksCleared"]]]):
        assert only(of(envelope=envelope)) == CacheCleared()


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", GPU),
        (None, GPU),
        ("", GPU),
        ("cpu", HOST),
        ("CPU_PINNED", HOST),
        ("CPU_TIER2", HOST),
        ("DISK", DISK),
        ("STORAGE", DISK),
    ],
)
def test_media_are_tiers(medium: str | None, tier: int) -> None:
    assert only(of(stored(medium=medium))).tier == tier


def test_adapters_and_salts() -> None:
    assert only(of(stored(lora_name="a", extra_keys=[["a", "salt"]]))).salt == "salt"
    assert only(of(stored(lora_name="a", extra_keys=[["a"]]))).adapter == "a"
    assert only(of(stored(lora_id=7))).adapter == "\0007", "a number is no name"
    assert only(of(stored(cache_salt="s"))).salt == "s", "SGLang's"
    assert only(of(["BlockStored", [1], None, [1, 2], 2, None, "GPU", {"cache_salt": "s"}])).salt == "s", (
        "SGLang's, in summer 2026"
    )
    image = only(of(stored(extra_keys=[[["image", 3]]])))
    assert (image.salt, list(image.extras)) == ("", [0])
    assert only(of(stored(parent_block_hash=5, extra_keys=[["text"]]))).salt == "", "only a first block has a salt"


@pytest.mark.parametrize(
    "event",
    [
        stored(kv_cache_spec_kind="sliding_window"),
        stored(kv_cache_spec_kind="mamba"),
        stored(kv_cache_spec_sliding_window=128),
        stored(token_ids=[1, 2, 3]),  # a part of a block, or sparse blocks
        stored(token_ids=[[1, 2], [2, 3]]),  # pairs, with speculation
        stored(token_ids=[-1, 2]),
        stored(token_ids=[1, 1 << 32]),
        stored(block_size=1 << 20, token_ids=[1]),
        stored(block_size="2"),
        stored(block_hashes=[]),
        stored(block_hashes="abc"),
        stored(block_hashes=[1.5]),
        stored(group_idx=-1),
        stored(group_idx=1 << 40),
        stored(extra_keys=[None, None]),
        stored(lora_name="a" * 5000),
        stored(lora_id=[1]),
        {"type": "BlockRemoved"},
        {"type": "BlockMoved", "block_hashes": [1]},
        ["LoadStat", 1, 2],
        [],
        "text",
        7,
    ],
)
def test_events_that_do_not_count_are_dropped_alone(event: Any) -> None:
    batch = read(of(event, {"type": "AllBlocksCleared"}))
    assert batch.dropped == 1
    assert batch.events == [CacheCleared()]


def test_unknown_keys_and_further_elements_are_skipped() -> None:
    assert only(of(stored(event_version=9, locality="LOCAL", session_id="s"))).hashes == [1]
    assert only(of(["BlockRemoved", [5], "CPU", 0, "further", 7])) == BlocksRemoved([5], HOST, 0, None)
    assert only(of(["BlockStored", [5], None, [1, 2], 2])).size == 2, "the oldest form"


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x01", b"\xa3abc", of(envelope=[1.0, 5]), of(envelope=[1.0]), b"\x91" * 9999]
)
def test_other_bytes_are_no_batch(payload: bytes) -> None:
    with pytest.raises(WireError):
        read(payload)


@pytest.mark.parametrize("form", ["map", "array"])
def test_large_events_are_read_like_small_ones(form: str) -> None:
    fields = stored(block_hashes=[*range(40_000)], token_ids=[*range(80_000)], medium="CPU", lora_name="a")
    event = fields if form == "map" else ["BlockStored", fields["block_hashes"], None, fields["token_ids"], 2, None, "CPU", "a"]
    found = only(of(event))
    assert (len(found.hashes), len(found.data), found.tier, found.adapter) == (40_000, 320_000, HOST, "a")
    removed = only(of({"type": "BlockRemoved", "block_hashes": [b"h" * 32] * 20_000, "later": "x"}))
    assert removed.hashes == [int.from_bytes(b"h" * 8, "big")] * 20_000


def test_large_batches_and_events_of_something_else_are_not_decoded() -> None:
    nothing = b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\x90" * (1 << 20)  # a million empty lists
    with pytest.raises(WireError):
        read(b"\x92\x00" + nothing)
    with pytest.raises(WireError):
        read(nothing)
    tracemalloc.start()
    try:
        for begin in (b"\x91", b"\x93\xabBlockStored\x91\x01", b"\x82\xa4type\xabBlockStored\xaaextra_keys"):
            assert read(b"\x92\x00\x91" + begin + nothing).dropped == 1
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
