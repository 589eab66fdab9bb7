"""The prefix cache on disk, so that a restarted replica has a warm cache.

Theory of operation. At a clean shutdown every idle block is written: its rows of K and V, its key, its parent's key, its
tokens, its scope, and the end of its retention; the least recently used first, as in the ledger. The file is one safetensors
file, written beside its final path and then renamed, readable only by its owner: it contains prompts. The rows are its last
tensor and are written in parts, since all together may be larger than the host's memory. Its header identifies the model and
the layout of the rows: a hash of the model's configuration and of all weights, the type, the block size and the release of
transformers, which defines the layout.

At start the whole file is read and checked before a single block is used: the header matches, the checksum is right, and
every key is the hash of its tokens. Any problem is one log line, and the cache starts empty. A file that is not one of our
cache files is not overwritten at shutdown either: it may be a model.
"""

import json
import logging
import os
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import transformers
import xxhash
from safetensors import SafetensorError, safe_open

from replica.cache.blocks import IdleBlock
from replica.cache.prefix import KEY_BYTES, BlockRun, Key, Scope, chained
from replica.torch_engine.paged import PagedBlocks
from replica.torch_engine.patches import message_of

log = logging.getLogger(__name__)
FORMAT = "warmroute-kv-cache-2"
NOT_OURS = "the cache is not saved: %s is not a cache file of warmroute"
TENSORS = ("rows", "keys", "parents", "tokens", "scopes", "salts", "keep_until")  # salts: JSON
NAMES = {torch.uint8: "U8", torch.int64: "I64", torch.float64: "F64"}  # safetensors' names of types
Retained = tuple[BlockRun, float]  # a run of one block, and the end of its retention


class CheckpointError(Exception):
    """A file cannot be used; the message states the reason."""


class Contents:
    """A ledger's listener that keeps the tokens and the scope of each cached block, which the ledger does not keep."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[array[int], Scope]] = {}

    def stored(self, run: BlockRun) -> None:
        size = len(run.tokens) // len(run.keys)
        for at, key in enumerate(run.keys):
            self._known[key] = (run.tokens[at * size : (at + 1) * size], run.scope)

    def removed(self, key: Key) -> None:
        del self._known[key]

    def cleared(self) -> None:
        self._known.clear()

    def run(self, idle: IdleBlock) -> BlockRun:
        tokens, scope = self._known[idle.key]
        return BlockRun((idle.key,), idle.parent, tokens, scope)


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """Blocks in the ledger's order, and their rows."""

    blocks: list[Retained]
    rows: torch.Tensor


class Checkpoint:
    """One file for one model. `contents` must be one of the ledger's listeners."""

    def __init__(self, path: Path, model: Any, block_size: int) -> None:
        self._path = path
        self.contents = Contents()
        self._header = {
            "format": FORMAT,
            "model": fingerprint(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "block_size": str(block_size),
            "transformers": transformers.__version__,
        }

    def restore(self, blocks: PagedBlocks) -> None:
        """Fill an empty cache; leave it empty, and log the reason, if the file does not match."""
        try:
            saved = read(self._path, self._header, blocks.row_bytes)
        except FileNotFoundError:
            return
        except (CheckpointError, OSError) as error:
            log.warning("the cache file %s is not used, the cache starts empty: %s", self._path, error)
            if not is_ours(self._path):
                log.warning("%s: name another --cache-file, or remove this one", NOT_OURS % self._path)
            return
        room = blocks.ledger.capacity  # the last blocks are kept: they were used last, and their parents are among them
        numbers = blocks.ledger.adopt(saved.blocks[-room:], blocks.now())
        blocks.write(numbers, saved.rows[-room:])
        log.info("%d cached blocks restored from %s", len(numbers), self._path)

    def save(self, blocks: PagedBlocks) -> None:
        """Write the idle blocks; a failure is a log line. Memory: two parts of the rows."""
        try:
            if self._path.exists() and not is_ours(self._path):
                log.warning(NOT_OURS, self._path)
                return
            idle = blocks.ledger.idle()
            retained = [(self.contents.run(block), block.keep_until) for block in idle]
            write(self._path, self._header, retained, blocks.rows([block.block for block in idle]), blocks.row_bytes)
        except Exception as error:  # noqa: BLE001 - after any error the shutdown continues
            log.warning("the cache is not saved: %s", message_of(error))


def fingerprint(model: Any) -> str:
    """A hash of a model's configuration and all its weights. O(weights)."""
    digest = xxhash.xxh3_128()
    unrelated = ("_name_or_path", "transformers_version")
    config = {name: value for name, value in model.config.to_dict().items() if name not in unrelated}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(_raw(weight.detach()))
    return digest.hexdigest()


def write(path: Path, header: Mapping[str, str], blocks: Items[Retained], rows: Iterable[torch.Tensor], row_bytes: int) -> None:
    """Write a file completely or not at all: it appears by a rename. `rows`: the rows of all blocks in their order, in parts of
    any size. Raises OSError, ValueError, and the errors of `rows`.
    """
    runs, block_size = [run for run, _ in blocks], int(header["block_size"])
    scopes = {scope: at for at, scope in enumerate(dict.fromkeys(run.scope for run in runs))}
    salts = json.dumps([scope.salt for scope in scopes]).encode()
    tensors = {  # tensors of bytes last, so that the others are aligned
        "tokens": torch.tensor([list(run.tokens) for run in runs], dtype=torch.int64).reshape(len(runs), block_size),
        "scopes": torch.tensor([scopes[run.scope] for run in runs], dtype=torch.int64),
        "keep_until": torch.tensor([keep_until for _, keep_until in blocks], dtype=torch.float64),
        "keys": _table([run.keys[0] for run in runs]),
        "parents": _table([run.parent or bytes(KEY_BYTES) for run in runs]),
        "salts": torch.frombuffer(bytearray(salts), dtype=torch.uint8),
    }
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # left by a process that was killed while it wrote
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            _fill(file, header, tensors, rows, row_bytes)
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _fill(
    file: BinaryIO, header: Mapping[str, str], tensors: dict[str, torch.Tensor], rows: Iterable[torch.Tensor], row_bytes: int
) -> None:
    """Write a safetensors file. The checksum in its head is written last; its length is known from the beginning."""
    shapes = tensors | {"rows": torch.empty((len(tensors["keys"]), row_bytes), dtype=torch.uint8, device="meta")}
    digest, written = xxhash.xxh3_128(), 0
    file.write(_head({**header, "checksum": digest.hexdigest()}, shapes))
    for tensor in tensors.values():
        file.write(_raw(tensor))
    for part in rows:
        raw = _raw(part)
        digest.update(raw)
        written += file.write(raw)
    if written != shapes["rows"].nbytes:
        raise ValueError(f"{written} bytes of rows, not {shapes['rows'].nbytes}")
    for name in TENSORS[1:]:
        digest.update(_raw(tensors[name]))
    file.seek(0)
    file.write(_head({**header, "checksum": digest.hexdigest()}, shapes))
    file.flush()


def _head(about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The head of a safetensors file: the length of a JSON object, a multiple of 8, and that object."""
    entries: dict[str, object] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(path: Path, header: Mapping[str, str], row_bytes: int) -> SavedBlocks:
    """The contents of a file for this model. Raises CheckpointError or OSError. O(file)."""
    if path.exists() and not path.is_file():
        raise CheckpointError("it is no regular file")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            for name, value in header.items():
                if about.get(name) != value:
                    raise CheckpointError(f"its {name} is {about.get(name, 'missing')}, ours is {value}")
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        if _checksum(tensors.values()) != about.get("checksum"):
            raise CheckpointError("its checksum is wrong")
        rows, keys, parents, tokens, scopes, salts, keep_until = tensors.values()
        if (
            rows.dtype != torch.uint8
            or rows.shape != (len(keys), row_bytes)
            or tokens.shape != (len(keys), int(header["block_size"]))
            or (keep_until.shape, keep_until.dtype) != ((len(keys),), torch.float64)
        ):
            raise CheckpointError(f"its rows are {tuple(rows.shape)} {rows.dtype}, its tokens {tuple(tokens.shape)}")
        known = [Scope(salt) for salt in msgspec.json.decode(_raw(salts), type=list[str | None])]
        runs = [
            BlockRun((key,), parent if any(parent) else None, array("I", ids), known[scope])
            for key, parent, ids, scope in zip(_keys(keys), _keys(parents), tokens.tolist(), scopes.tolist(), strict=True)
        ]
        _check_keys(runs)
        return SavedBlocks(list(zip(runs, keep_until.tolist(), strict=True)), rows)
    except (
        SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        OverflowError,
        MemoryError,
    ) as error:
        raise CheckpointError(f"it cannot be read: {error}") from error


def is_ours(path: Path) -> bool:
    """Return whether a file's header is that of a cache file, for any model, even if the rest is damaged."""
    if not path.is_file():  # opening a FIFO would block
        return False
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            about = json.loads(file.read(min(size, 1 << 26)))["__metadata__"]
            return str(about["format"]).startswith("warmroute-kv-cache-")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _check_keys(runs: Items[BlockRun]) -> None:
    """Check that each key is the hash of its tokens, and that each block's parent is in the file and was used later. Raises
    CheckpointError.
    """
    seen: set[Key] = set()
    for run in reversed(runs):
        if run.parent is not None and run.parent not in seen:
            raise CheckpointError("a block's parent is missing")
        if run.keys[0] != chained(run.parent or run.scope.root(), run.tokens) or run.keys[0] in seen:
            raise CheckpointError("a block's key is not that of its tokens")
        seen.add(run.keys[0])


def _raw(tensor: torch.Tensor) -> memoryview:
    flat: memoryview = tensor.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data
    return flat


def _checksum(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _table(keys: Items[Key]) -> torch.Tensor:
    return torch.tensor([list(key) for key in keys], dtype=torch.uint8).reshape(len(keys), KEY_BYTES)


def _keys(table: torch.Tensor) -> list[Key]:
    return [bytes(row) for row in table.tolist()]
