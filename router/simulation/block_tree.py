"""Prompts as paths of numbered blocks: a recorded trace shows the common beginnings of prompts without any hash.

A block key stands for its block and all before it, so the blocks of all prompts are the nodes of a tree. The writer numbers
them 1, 2, 3 ... in the order in which it meets them. A prompt is then two numbers: `parent`, the last block that it shares with
earlier prompts (0: none), and `new`, the number of its further blocks, which get the next numbers.

Rules: a block's number is above its parent's. Any sequence of pairs with parents that exist is a tree, so no file can describe
prompts that contradict each other. Two prompts have the same number at a place exactly if all blocks up to there are equal,
unless the writer has forgotten the block (its memory is bounded); then it gets a new number.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

from router.types import KEY_BYTES, BlockKeys

MAX_PROMPT_BLOCKS: Final = 1 << 20  # of one prompt; further blocks are omitted
KNOWN_BLOCKS: Final = 1 << 20  # in the writer's memory, at most: of about 64 million tokens, in some 200 MB


class BlockNumbers:
    """The writer: block keys in, (parent, new) out. O(blocks of the prompt)."""

    def __init__(self, known: int = KNOWN_BLOCKS) -> None:
        """known: maximum number of remembered blocks. The oldest half is forgotten at once."""
        self._half = max(1, known // 2)
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}
        self.last = 0  # the highest number so far
        self.forgotten = 0

    def add(self, keys: BlockKeys) -> tuple[int, int]:
        parent, at = 0, 0
        while at < len(keys) and (number := self._number(keys[at : at + KEY_BYTES])):
            parent, at = number, at + KEY_BYTES
        new = 0
        for start in range(at, len(keys), KEY_BYTES):
            new += 1
            self._remember(keys[start : start + KEY_BYTES], self.last + new)
        self.last += new
        return parent, new

    def _number(self, key: bytes) -> int:
        """The number of a known block; 0: it is unknown."""
        if number := self._recent.get(key, 0):
            return number
        if number := self._older.get(key, 0):
            self._remember(key, number)
        return number

    def _remember(self, key: bytes, number: int) -> None:
        if len(self._recent) >= self._half:
            self.forgotten += len(self._older.keys() - self._recent.keys())
            self._recent, self._older = {}, self._recent
        self._recent[key] = number

    def __len__(self) -> int:
        return len(self._recent.keys() | self._older.keys())


class BlockTree:
    """The reader: (parent, new) in, paths out. A run is the chain of blocks that one prompt has added.

    O(runs) memory. A path costs O(its runs x log of all runs).
    """

    def __init__(self) -> None:
        self._firsts = array("q")  # number of the first block of each run
        self._parents = array("q")
        self._depths = array("q")  # number of blocks before each run
        self.last = 0

    def add(self, parent: int, new: int) -> int:
        """The number of the prompt's last block; 0: it has none. Raises ValueError for an invalid pair."""
        if not 0 <= parent <= self.last:
            raise ValueError(f"parent {parent} is not one of the {self.last} blocks before")
        depth = self.depth(parent)
        if not 0 <= new <= MAX_PROMPT_BLOCKS - depth:
            raise ValueError(f"{depth} + {new} blocks: a prompt has 0 to {MAX_PROMPT_BLOCKS}")
        if not new:
            return parent
        self._firsts.append(self.last + 1)
        self._parents.append(parent)
        self._depths.append(depth)
        self.last += new
        return self.last

    def run_of(self, block: int) -> int:
        return bisect_right(self._firsts, block) - 1

    def first_of_run(self, block: int) -> int:
        return self._firsts[self.run_of(block)]

    def depth(self, block: int) -> int:
        """The number of blocks of a prompt that ends there."""
        if not block:
            return 0
        run = self.run_of(block)
        return self._depths[run] + block - self._firsts[run] + 1

    def path(self, block: int) -> list[tuple[int, int]]:
        """(first, last) of each run of numbers on the way to a block, the root's first."""
        path = list[tuple[int, int]]()
        while block:
            run = self.run_of(block)
            path.append((self._firsts[run], block))
            block = self._parents[run]
        return path[::-1]

    def leads_to(self, ancestor: int, block: int) -> bool:
        """True if a prompt that ends at `block` begins with all blocks up to `ancestor`."""
        while block > ancestor:
            run = self.run_of(block)
            if self._firsts[run] <= ancestor:
                return True
            block = self._parents[run]
        return block == ancestor

    def keys(self, block: int, most: int | None = None, shared: int = 0, copy: int = 0) -> BlockKeys:
        """Keys of the path to a block, of its first `most` blocks. copy: the keys beyond the first `shared` ones belong to this
        copy, and differ from other copies' keys.
        """
        numbers = array("Q")
        for first, last in self.path(block):
            numbers.extend(range(first, last + 1))
        if most is not None:
            del numbers[most:]
        if copy:
            for at in range(min(shared, len(numbers)), len(numbers)):
                numbers[at] += copy << _COPY_SHIFT
        return numbers.tobytes()


_COPY_SHIFT: Final = 44  # bits of a block's number
