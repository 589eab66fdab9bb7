"""The cache on disk: a restart is warm and right, and whatever does not fit is refused as a whole."""

import json
import logging
import os
import stat
import weakref
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.cache.blocks import BlockLedger
from replica.cache.prefix import BlockRun, Prefix, Scope
from replica.engine import EngineRequest
from replica.torch_engine.paged import BATCH

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from replica.torch_engine import checkpoint
from replica.torch_engine.checkpoint import Checkpoint, CheckpointError, Contents, SavedBlocks, is_ours, read, write
from tests.replica.cache.test_blocks import Follower
from tests.replica.tiny import answer, recorded_scores, running, tiny_model
from tests.replica.torch_engine.test_paged import prompt, sliding_model

pytestmark = pytest.mark.model

HEADER = {"format": checkpoint.FORMAT, "model": "m", "block_size": "2"}
ROW = 6


def saved(blocks: int = 4) -> SavedBlocks:
    prefix = Prefix(range(2 * blocks), 2, Scope(salt="tenant"))
    runs = [
        BlockRun((key,), prefix.parent(at), prefix.tokens[2 * at : 2 * at + 2], prefix.scope)
        for at, key in enumerate(prefix.keys)
    ]
    rows = torch.arange(blocks * ROW, dtype=torch.uint8).reshape(blocks, ROW)
    return SavedBlocks([(run, 7.5) for run in reversed(runs)], rows)


def stored(path: Path, saved: SavedBlocks) -> None:
    write(path, HEADER, saved.blocks, [saved.rows], ROW)


@pytest.mark.parametrize("part", [1, 3, 9])
def test_what_is_written_is_read(tmp_path: Path, part: int) -> None:
    path = tmp_path / "cache"
    for blocks in (4, 0):
        write(path, HEADER, saved(blocks).blocks, saved(blocks).rows.split(part), ROW)
        again = read(path, HEADER, ROW)
        assert again.blocks == saved(blocks).blocks
        assert torch.equal(again.rows, saved(blocks).rows)
        assert is_ours(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["cache"], "nothing is left beside it"


def test_no_more_than_two_parts_of_the_rows_are_in_memory(tmp_path: Path) -> None:
    parts: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def rows() -> Iterator[torch.Tensor]:
        nonlocal most
        for row in range(8):
            part = saved(8).rows[row : row + 1].clone()
            parts.append(weakref.ref(part))
            most = max(most, sum(each() is not None for each in parts))
            yield part

    write(tmp_path / "cache", HEADER, saved(8).blocks, rows(), ROW)
    assert torch.equal(read(tmp_path / "cache", HEADER, ROW).rows, saved(8).rows)
    assert most <= 2


class Counting(Scope):
    """Counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counting.compared += 1
        return isinstance(other, Scope) and self.salt == other.salt

    __hash__ = Scope.__hash__


def test_a_salt_for_each_block_takes_no_longer_and_no_larger_header(tmp_path: Path) -> None:
    prefixes = [Prefix([1, 2], 2, Counting(salt=f"{number:04d}" * 256)) for number in range(500)]
    blocks = [(BlockRun((prefix.keys[0],), None, prefix.tokens, prefix.scope), 0.0) for prefix in prefixes]
    write(tmp_path / "cache", HEADER, blocks, [torch.zeros((500, ROW), dtype=torch.uint8)], ROW)
    assert Counting.compared < 500
    assert int.from_bytes((tmp_path / "cache").read_bytes()[:8], "little") < 2000
    again = read(tmp_path / "cache", HEADER, ROW)
    assert [run.scope.salt for run, _ in again.blocks] == [prefix.scope.salt for prefix in prefixes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "cache"
    stored(path, saved())
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_is_refused(whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError):
        read(path, HEADER, ROW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "n"}, "its model is m, ours is n"),
        ({"block_size": "4"}, "its block_size is 2, ours is 4"),
        ({"format": "warmroute-kv-cache-3"}, "its format is warmroute-kv-cache-2, ours is warmroute-kv-cache-3"),
        ({"dtype": "float32"}, "its dtype is missing, ours is float32"),
    ],
)
def test_what_is_for_something_else_is_refused(tmp_path: Path, wrong: dict[str, str], message: str) -> None:
    stored(tmp_path / "cache", saved())
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "cache", HEADER | wrong, ROW)
    with pytest.raises(CheckpointError, match="its rows are"):
        read(tmp_path / "cache", HEADER, ROW + 1)


def test_blocks_that_do_not_match_their_keys_are_refused(tmp_path: Path) -> None:
    """With a right checksum: made on purpose, or by a fault of ours."""
    path, whole = tmp_path / "cache", saved()
    run, keep_until = whole.blocks[0]
    other = BlockRun(run.keys, run.parent, array("I", [90, 91]), run.scope)
    stored(path, SavedBlocks([(other, keep_until), *whole.blocks[1:]], whole.rows))
    with pytest.raises(CheckpointError, match="a block's key is not that of its tokens"):
        read(path, HEADER, ROW)
    stored(path, SavedBlocks(whole.blocks[:-1], whole.rows[:-1]))
    with pytest.raises(CheckpointError, match="a block's parent is missing"):
        read(path, HEADER, ROW)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cache"
    path.write_bytes(whole)
    broken = SavedBlocks([*saved().blocks, (BlockRun((b"short",), None, array("I", [1, 2]), Scope()), 0.0)], saved().rows)
    with pytest.raises(ValueError, match="expected sequence of length"):
        stored(path, broken)
    with pytest.raises(ValueError, match="18 bytes of rows, not 24"):
        stored(path, SavedBlocks(saved().blocks, saved().rows[:3]))
    assert path.read_bytes() == whole
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        stored(tmp_path / "folder", saved())
    assert sorted(os.listdir(tmp_path)) == ["cache", "folder"], "nothing is left beside it"


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    killed = tmp_path / ".cache.unfinished"

    def rows() -> Iterator[torch.Tensor]:
        assert sorted(os.listdir(tmp_path)) == [killed.name]
        yield saved().rows

    killed.write_bytes(bytes(1000))
    write(tmp_path / "cache", HEADER, saved().blocks, rows(), ROW)
    assert os.listdir(tmp_path) == ["cache"]


class FailingBlocks:
    """A ledger with idle blocks, whose rows cannot all be had."""

    row_bytes = ROW

    def __init__(self, checkpoint: Checkpoint, error: Exception) -> None:
        self.ledger, self._error = BlockLedger(4, 2, (checkpoint.contents,)), error
        self.ledger.adopt(saved().blocks, 0.0)

    def rows(self, blocks: Items[int]) -> Iterator[torch.Tensor]:
        yield saved().rows[:1]
        raise self._error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        (ValueError("no"), "no"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_save_that_fails_is_a_line_and_leaves_the_old_file(
    tmp_path: Path, whole: bytes, error: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache"
    path.write_bytes(whole)
    checkpoint = Checkpoint(path, AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model")), 2)
    blocks: Any = FailingBlocks(checkpoint, error)
    checkpoint.save(blocks)
    assert caplog.messages == [f"the cache is not saved: {message}"]
    assert path.read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == ["cache", "model"], "nothing is left beside it"


def test_contents_are_what_the_ledger_holds() -> None:
    contents, prefix = Contents(), Prefix(range(6), 2)
    contents.stored(BlockRun(tuple(prefix.keys), None, prefix.tokens, prefix.scope))
    contents.removed(prefix.keys[2])
    assert set(contents._known) == set(prefix.keys[:2])
    contents.cleared()
    assert not contents._known


# -- with an engine around it


async def test_a_restart_is_warm_and_its_answers_are_the_same(tmp_path: Path) -> None:
    model, path, follower = tiny_model(tmp_path / "model"), tmp_path / "cache", Follower()
    requests = [
        EngineRequest(prompt(50 + seed, seed, 20), 3, ignore_eos=True, scope=Scope(salt="ab"[seed % 2])) for seed in range(12)
    ]
    async with running(model, cache_file=path) as engine:
        scores = recorded_scores(engine)
        first = [(await answer(engine, request))[0] for request in requests]
        held = {idle.key for idle in engine.batching.blocks.ledger.idle()}
    assert len(held) > BATCH, "they are copied in several parts"
    async with running(model, [follower], cache_file=path) as engine:
        assert follower.held == held
        again = recorded_scores(engine)
        for at, request in enumerate(requests):
            tokens, cached = await answer(engine, request)
            assert (tokens, cached) == (first[at], (len(request.prompt) - 1) // 4 * 4)
            assert (torch.stack(again[f"r{at}"]) - torch.stack(scores[f"r{at}"])).abs().max() < 1e-4
        engine.batching.blocks.ledger.check()


async def test_into_a_smaller_cache_goes_what_was_used_last_and_wishes_go_with_it(tmp_path: Path) -> None:
    model, path = tiny_model(tmp_path / "model"), tmp_path / "cache"
    async with running(model, cache_file=path) as engine:
        for seed in range(8):
            await answer(engine, EngineRequest(prompt(40, seed), 1, keep_s=3600 if seed == 6 else 0))
    async with running(model, cache_file=path, kv_tokens=120) as engine:
        engine.batching.blocks.ledger.check()
        assert engine.cache_counts().idle == 30
        for seed in (20, 21, 22):
            await answer(engine, EngineRequest(prompt(40, seed), 1))
        assert (await answer(engine, EngineRequest(prompt(40, 6), 1)))[1] == 36
        assert (await answer(engine, EngineRequest(prompt(40, 7), 1)))[1] == 0


async def test_what_does_not_fit_is_refused_with_a_line_and_replaced_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache"
    one, two = tiny_model(tmp_path / "one", seed=1), tiny_model(tmp_path / "two", seed=2)
    request = EngineRequest(prompt(50, 1), 1)
    for folder, block_size, message in ((one, 4, None), (two, 4, "its model is "), (two, 8, "its block_size is 4, ours is 8")):
        caplog.clear()
        async with running(folder, cache_file=path, block_size=block_size) as engine:
            assert engine.cache_counts().idle == 0
            assert (await answer(engine, request))[1] == 0
        records = [record for record in caplog.records if record.name == "replica.torch_engine.checkpoint"]
        lines = [record.getMessage() for record in records if record.levelno == logging.WARNING]
        assert len(lines) == (message is not None)
        assert all("is not used, the cache starts empty" in line and str(message) in line for line in lines)
    async with running(two, cache_file=path, block_size=8) as engine:
        assert (await answer(engine, request))[1] == 48


async def test_somebody_elses_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(tmp_path / "model")
    weights = model / "model.safetensors"
    before = weights.read_bytes()
    async with running(model, cache_file=weights) as engine:
        assert "is not a cache file of warmroute: name another --cache-file, or remove this one" in caplog.text  # at the start
        await answer(engine, EngineRequest(prompt(50, 1), 1))
    assert caplog.text.count("is not a cache file of warmroute") == 2  # and at the end
    assert weights.read_bytes() == before
    assert "its format is pt, ours is " in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder", "nested"])
async def test_what_is_no_file_of_anybodys_does_not_stop_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model, path = tiny_model(tmp_path / "model"), tmp_path / "cache"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    async with running(model, cache_file=path) as engine:
        assert "is not a cache file of warmroute: name another --cache-file, or remove this one" in caplog.text
        await answer(engine, EngineRequest(prompt(50, 1), 1))
    assert caplog.text.count("is not a cache file of warmroute") == 2


async def test_an_engine_that_has_failed_saves_nothing(tmp_path: Path) -> None:
    model, path = tiny_model(tmp_path / "model"), tmp_path / "cache"
    async with running(model, cache_file=path) as engine:
        await answer(engine, EngineRequest(prompt(50, 1), 1))
        engine.router.manager.background_thread_status.record_fatal_error(MemoryError("no memory left"))
        assert engine.failure() is not None
    assert not path.exists()


async def test_a_model_without_a_prefix_cache_has_no_use_for_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, path = sliding_model(tmp_path / "model"), tmp_path / "cache"
    async with running(model, cache_file=path) as engine:
        await answer(engine, EngineRequest(prompt(50, 1), 1))
    assert not path.exists()
    assert caplog.text.count(f"--cache-file has no effect: {model} (MistralForCausalLM) is served without a prefix cache") == 1


def test_a_header_without_sense_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in (b"", b"12345678", (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"null"):
        path.write_bytes(text)
        assert not is_ours(path)
    about = json.dumps({"__metadata__": {"format": "warmroute-kv-cache-9"}}).encode()
    path.write_bytes(len(about).to_bytes(8, "little") + about)
    assert is_ours(path)


FORGED: list[tuple[str, Any]] = [
    ("keep_until", torch.zeros(4, 2, dtype=torch.float64)),
    ("keep_until", torch.zeros(4, dtype=torch.complex64)),
    ("keys", torch.full((4, 16), 1 << 60)),
    ("tokens", torch.full((4, 2), -1)),
    ("scopes", torch.full((4,), 99)),
    ("scopes", torch.zeros(4, 1, dtype=torch.int64)),
    *(
        ("salts", torch.tensor(list(salts), dtype=torch.uint8))
        for salts in (b"[[[[1]]]]", b"5", b'[{"a": 1}]', b"[[1, 2]]", b"[1]", b"[]", b"", b"\xff")
    ),
]


@pytest.mark.parametrize(("name", "tensor"), FORGED)
def test_a_forged_file_with_a_right_checksum_is_refused(tmp_path: Path, name: str, tensor: Any) -> None:
    path = tmp_path / "cache"
    stored(path, saved())
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {each: file.get_tensor(each) for each in checkpoint.TENSORS}
    tensors[name] = tensor
    digest = xxhash.xxh3_128()
    for each in checkpoint.TENSORS:
        digest.update(tensors[each].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    save_file(tensors, path, {**about, "checksum": digest.hexdigest()})
    with pytest.raises(CheckpointError, match=r"cannot be read|its rows are"):
        read(path, HEADER, ROW)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache")
    with pytest.raises(CheckpointError, match="no regular file"):
        read(tmp_path / "cache", HEADER, ROW)
