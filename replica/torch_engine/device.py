"""Device, attention implementation and KV memory of a model.

On a GPU the engine is the same as on a CPU. All work of a step is put on one CUDA stream, so that sampling, saving and
restoring need no synchronization of their own. Neither CUDA graphs nor asynchronous batching are used: a graph is replayed
without our sampling, which is Python, and a step that begins before the last one's tokens are known cannot apply penalties or
follow a grammar. Flash attention copies a request's blocks together in each step; its kernel that reads them in place needs
blocks of 256 tokens, which is too coarse for prefixes.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler, group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from replica.engine import SetupError

log = logging.getLogger(__name__)
CPU_KV_TOKENS = 32_768  # host memory is shared with other processes
GPU_SHARE = 0.85  # of the memory left by the weights; transformers itself refuses to start above 0.9


def device_named(name: str) -> torch.device:
    """The device with this name: auto, cpu or cuda. Raises SetupError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    # With its index: transformers' thread then selects it.
    return torch.device("cuda", torch.cuda.current_device())


def use_fastest_attention(model: Any) -> None:
    """Select the fastest attention implementation that works with paged memory on the model's device."""
    if model.device.type == "cpu":
        return
    # cuDNN's implementation is excluded: it takes 40 ms to plan each new shape, and each step of an answer has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if model.dtype != torch.float32 and model._supports_flash_attn:
        generation, _ = torch.cuda.get_device_capability(model.device)
        # With the package `kernels` transformers fetches the kernels from the Hub if they are not installed.
        flash_2 = partial(is_flash_attn_2_available, kernels_fallback_ok=True)
        flash_3 = partial(is_flash_attn_3_available, kernels_fallback_ok=True)
        model.set_attn_implementation(fastest_attention(generation, flash_2, flash_3))
    log.info("on %s with %s", torch.cuda.get_device_name(model.device), model.config._attn_implementation)


def fastest_attention(generation: int, flash_2: Callable[[], bool], flash_3: Callable[[], bool]) -> str:
    """transformers' name of the fastest attention for 16-bit types. `generation`: the GPU's major compute capability; `flash_2`
    and `flash_3` report whether they are installed and are called only if the GPU can run them.
    """
    if generation == 9 and flash_3():  # Hopper only
        return "flash_attention_3"
    return "flash_attention_2" if generation >= 8 and flash_2() else "sdpa"


def batching_config(
    block_size: int, kv_tokens: int, batch_tokens: int, max_batch: int, share: bool = True
) -> ContinuousBatchingConfig:
    """transformers' configuration; kv_tokens 0: not known yet."""
    return ContinuousBatchingConfig(
        page_size=block_size,
        num_blocks=kv_tokens // block_size or None,
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=max_batch,
        max_blocks_per_request=0,
        allow_block_sharing=share,
        safety_margin=0.0,  # admission is ours
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )


def default_kv_tokens(model: Any, batching: ContinuousBatchingConfig) -> int:
    """As many tokens as fit into the GPU's memory; a fixed number on a CPU. Raises SetupError."""
    tokens = CPU_KV_TOKENS if model.device.type == "cpu" else kv_tokens_that_fit(model, batching, GPU_SHARE)
    if tokens < 4 * batching.page_size:
        raise SetupError(f"{tokens} tokens of KV memory are not four blocks: choose --kv-tokens, or a smaller --block-size")
    return tokens


def kv_tokens_that_fit(model: Any, batching: ContinuousBatchingConfig, share: float) -> int:
    """Tokens whose K and V fit into this share of the free memory, computed by transformers: it includes the memory of a step
    that reads the whole cache. Raises SetupError."""
    config = model.config.get_text_config()
    page = FullAttentionCacheAllocator.get_bytes_per_page(
        find_num_key_value_heads(config), find_head_dim(config), model.dtype, batching.page_size
    )
    block = config.num_hidden_layers * page
    sector = math.lcm(block, 128)
    batching.max_memory_percent = share
    plan = PagedAttentionMemoryHandler(
        config=config,
        cb_config=batching,
        dtype=model.dtype,
        bytes_per_sector=sector,
        tokens_per_sector=sector // block * batching.page_size,
        bytes_per_block=block,
        attn_types=list(group_layers_by_attn_type(config)),
        model_supports_logits_to_keep=model._supports_logits_to_keep(),
    )
    try:
        _, sectors = plan.infer_max_batch_tokens_and_num_sectors()
    except (MemoryError, ValueError) as error:
        raise SetupError("there is no room for KV memory beside the model; choose a smaller one, or --device cpu") from error
    return int(sectors * plan.tokens_per_sector)
