"""A model folder becomes a model and its tokenizer, or a message that says what is wrong with it."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from replica.engine import SetupError

# What transformers raises for files that are not what they should be, besides OSError.
BROKEN = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)


def load(model: str | Path, dtype: str) -> tuple[Any, Any]:
    """The tokenizer and the model. Raises SetupError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except BROKEN as error:
        raise SetupError(f"cannot load the tokenizer of {model}: {_reason(error)}") from error
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True
        )
    except BROKEN as error:
        raise SetupError(f"cannot load the model {model}: {_reason(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would make these weights up, at random.
        raise SetupError(f"cannot load the model {model}: its files lack {len(missing)} weights, such as {missing[0]}")
    return tokenizer, loaded.eval()


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
