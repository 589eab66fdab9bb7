"""Attention over paged keys and values on a CPU, and the forward pass around it, instead of transformers' own.

Theory of operation. transformers (5.23) puts the keys of all requests of a step side by side and masks, for each token, the
keys of the other requests: a mask of step x cache, built for each step, and work that grows with the square of the number of
requests. Here each request is computed separately. A step's work is planned once (`plan`) and done in every layer
(`AttentionStep.attend`):

    new K, V rows ──► pages         at the same places as in transformers
    prompts           query rows in blocks of ROWS: a block's scores for all keys before its end fit into the processor's
                      cache, and half of the square is never computed
    answers           one query row each: requests of similar length together, padded to the longest and masked, and no
                      more at once than what keeps their keys in the processor's cache

Heads that share their keys are rows of one matrix. Numbers stay in the model's type, except for softmax and sums inside.
`PATCHED` lists the methods that this depends on; `install` refuses a transformers release in which they look different.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from replica.torch_engine.paged import check_signatures

PATCHED: Mapping[type, Mapping[str, tuple[str, ...]]] = {
    ModelRunner: {
        "_forward_process_and_sample": ("model", "batch_data", "carry_over_ids", "prev_output_ids", "output_ids"),
        "_sample": ("scores", "output_ids"),
    },
    FullAttentionCacheAllocator: {
        "get_read_indices": ("request_id", "past_length", "query_length"),
        "get_cache_for_block_table": ("layer_idx",),
    },
    ContinuousBatchingIOs: {"get_model_kwargs": ("use_padding",)},
}
ROWS = 128  # tokens of a prompt whose scores are computed at once
PADDING = 192  # padding tokens in a group; reading them costs about as much as one group more
GROUP = 4096  # the most tokens whose keys are read for one group, unless the group is a single request
WIDE = 768  # the least tokens of a group that is computed by one product for all heads

Single = tuple[int, int, list[int]]  # a row, its request's length in tokens and blocks
Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "AttentionStep"], torch.Tensor
]  # tokens, positions, wanted rows -> scores


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows `begin` to `end` of a step are one request's tokens, after `past` earlier ones; `pages` hold all of these."""

    begin: int
    end: int
    past: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """Rows of a step, one per request; the same number of pages for each request, and a mask for the positions after its end.
    `beyond`: the masked rows of all pages together. They hold data of other requests or uninitialised memory, which may be NaN.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor
    beyond: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's work, the same in every layer. `slots`: the index in the cache for each row's K and V."""

    allocator: Any
    slots: torch.Tensor
    prompts: Items[PromptRows]
    answers: Items[AnswerRows]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[rows, heads, size] of each -> [rows, heads x size]. The query is scaled already."""
        keys, values = self.allocator.get_cache_for_block_table(layer)
        for cache, fresh in ((keys, key), (values, value)):
            cache.view(-1, *fresh.shape[1:]).index_copy_(0, self.slots, fresh)
        result = torch.empty(query.shape, dtype=query.dtype)
        for prompt in self.prompts:
            rows = slice(prompt.begin, prompt.end)
            read_keys, read_values = key[rows], value[rows]
            if prompt.past:
                length = prompt.past + prompt.end - prompt.begin
                read_keys, read_values = (_gathered(cache, prompt.pages)[:length] for cache in (keys, values))
            _attend_causally(query[rows], read_keys.transpose(0, 1), read_values.transpose(0, 1), result[rows])
        for answers in self.answers:
            result[answers.rows] = _attend_each(query[answers.rows], keys, values, answers)
        return result.flatten(1)


def install(manager: Any, forward: Forward) -> None:
    """Compute with `forward`. Call before the manager's thread starts, and only if no layer has a sliding window."""
    for owner, methods in PATCHED.items():
        check_signatures(owner, owner.__name__, methods)
    processor = manager.batch_processor
    (allocator,) = processor.cache.cache_allocators.values()
    batch = processor.inputs_and_outputs
    batch.attention_mask = None  # PATCHED: no mask is built if it is None
    allocator.get_read_indices = lambda *_: []  # PATCHED: we read whole pages
    # PATCHED: what a step may read is bounded by transformers' tables, which we do not fill. A page that is shared is read by
    # each request that has it.
    processor.cache.max_tokens_read *= processor.scheduler.max_requests_per_batch

    def run(model: object, data: Mapping[str, Any], _carried: object, _previous: object, output_ids: torch.Tensor) -> None:
        step = plan(allocator, data["write_index"][0], batch.requests_in_batch)
        scores = forward(data["input_ids"][0], data["position_ids"][0], data["logits_indices"], step)
        runner._sample(scores.float()[None], output_ids)

    runner = processor.model_runner
    runner._forward_process_and_sample = run  # PATCHED: the forward pass


def plan(allocator: Any, slots: torch.Tensor, requests: Items[Any]) -> AttentionStep:
    """Plan a step's attention. O(rows + pages)."""
    size, stride = allocator.tokens_per_page, allocator.block_physical_stride // allocator.tokens_per_page
    prompts, single, row = [], list[Single](), 0
    for future in requests:
        length = future.state.position_offset  # transformers has counted this step's tokens already
        blocks = allocator.block_table[future.state.request_id][: -(-length // size)]
        if future.query_length == 1:
            single.append((row, length, blocks))
        else:
            pages = torch.tensor(blocks) * stride
            prompts.append(PromptRows(row, row + future.query_length, length - future.query_length, pages))
        row += future.query_length
    groups = grouped(single, PADDING // size, GROUP // size)
    return AttentionStep(allocator, slots, prompts, [_padded(group, size, stride, allocator.cache_dtype) for group in groups])


def grouped(single: list[Single], padding: int, most: int) -> list[list[Single]]:
    """Groups with at most `padding` blocks of padding in total, and `most` blocks with it; the longest request of a group
    first."""
    groups, left = list[list[Single]](), 0
    for one in sorted(single, key=lambda one: one[1], reverse=True):
        longest = len(groups[-1][0][2]) if groups else 0
        left -= longest - len(one[2])
        if not groups or left < 0 or (len(groups[-1]) + 1) * longest > most:
            groups.append([])
            left = padding
        groups[-1].append(one)
    return groups


def _padded(group: Items[Single], size: int, stride: int, dtype: torch.dtype) -> AnswerRows:
    """The rows of a group, from rows with their lengths and blocks, the longest first."""
    rows, lengths, blocks = zip(*group, strict=True)
    most = len(blocks[0])
    pages = torch.tensor([[*own, *[0] * (most - len(own))] for own in blocks]) * stride
    beyond = torch.arange(most * size) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)
    return AnswerRows(torch.tensor(rows), pages.flatten(), mask[:, None, None], beyond.flatten().nonzero()[:, 0])


def _gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The rows of these pages, concatenated: [rows, heads, size]."""
    return cache.flatten(1).index_select(0, pages).view(-1, *cache.shape[2:])


def _attend_each(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, answers: AnswerRows) -> torch.Tensor:
    count, heads, size = query.shape
    gathered = (_gathered(cache, answers.pages).index_fill_(0, answers.beyond, 0.0) for cache in (keys, values))
    read_keys, read_values = (each.view(count, -1, *keys.shape[2:]) for each in gathered)
    by_key_head = query.view(count, keys.shape[2], -1, size)
    if answers.mask.numel() < WIDE:
        read = read_keys.transpose(1, 2), read_values.transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(by_key_head, *read, attn_mask=answers.mask, scale=1.0)
        return attended.reshape(query.shape)
    # All heads in one product with the keys as they lie in memory: a query has zeros where the other heads' keys are. That is
    # more arithmetic, and twice as fast (five times, if no heads share their keys) as to read every n-th piece of each row.
    wide = torch.zeros(*by_key_head.shape[:3], keys.shape[2], size, dtype=query.dtype)
    wide.diagonal(dim1=1, dim2=3).copy_(by_key_head.permute(0, 2, 3, 1))
    scores = torch.bmm(wide.view(count, heads, -1), read_keys.flatten(2).transpose(1, 2))
    weights = torch.softmax(scores.add_(answers.mask[:, 0]), -1)
    attended = torch.bmm(weights, read_values.flatten(2)).view(wide.shape)
    return attended.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(query.shape)


def _attend_causally(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, result: torch.Tensor) -> None:
    """The queries [rows, heads, size] are the last rows of the keys [key heads, all rows, size]. Writes into `result`, shaped
    as the queries."""
    rows, size, shared = len(query), query.shape[-1], len(keys)
    past = keys.shape[1] - rows
    by_head = query.view(rows, shared, -1, size).permute(1, 2, 0, 3)
    out = result.view(rows, shared, -1, size).permute(1, 2, 0, 3)
    ahead = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    for begin in range(0, rows, ROWS):
        end = min(begin + ROWS, rows)
        seen = past + end
        scores = torch.bmm(by_head[:, :, begin:end].reshape(shared, -1, size), keys[:, :seen].transpose(1, 2))
        own = scores.view(shared, -1, end - begin, seen)[..., past + begin :]
        own.masked_fill_(ahead[: end - begin, : end - begin], -torch.inf)
        weights = torch.softmax(scores, -1, out=scores)
        out[:, :, begin:end] = torch.bmm(weights, values[:, :seen]).view(shared, -1, end - begin, size)
