"""Loads a model and its tokenizer from a folder or the Hub, or with random weights; broken files are reported as SetupError."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights

from replica.engine import SetupError

# The errors that transformers raises for broken files.
BROKEN = (
    *(ImportError, OSError, ValueError, KeyError, TypeError, RuntimeError, ArithmeticError),
    *(SafetensorError, StrictDataclassError),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
SEED = 0
# Parts of quantised weights, by the names of compressed-tensors, FP8, GPTQ, AWQ and bitsandbytes.
SCALES = {"weight_scale", "weight_scale_inv", "weight_packed", "scale", "scales", "qweight", "qzeros", "g_idx", "SCB", "absmax"}


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A model given only by its config: its weights are drawn when it is loaded, so that a size can be measured without a
    download. `tokenizer` is a folder."""

    config: Path
    tokenizer: Path

    def __str__(self) -> str:
        return str(self.config)


def random_weights(path: Path, bundled: Callable[[], Path]) -> RandomWeights:
    """A model from a config, or from a folder with one. Its tokenizer is in the same folder, else that of `bundled`. Raises
    SetupError.
    """
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise SetupError(f"--random-weights: there is no {config}")
    beside = any((config.parent / name).is_file() for name in TOKENIZER_FILES)
    return RandomWeights(config, config.parent if beside else bundled())


def multiplies_bfloat16() -> bool:
    """True if this processor does. Others compute it some ten times slower than float32."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def load(model: str | Path | RandomWeights, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """The tokenizer and the model, on the device. dtype: its name, or "auto". Raises SetupError."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type != "cpu" or multiplies_bfloat16() else "float32"
    folder = model.tokenizer if isinstance(model, RandomWeights) else model
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except BROKEN as error:
        raise SetupError(f"cannot load the tokenizer of {folder}: {_reason(error)}") from error
    try:
        if isinstance(model, RandomWeights):
            return tokenizer, _drawn(model, tokenizer, dtype, device).eval()
        return tokenizer, _stored(model, dtype, device).eval()
    except BROKEN as error:
        raise SetupError(f"cannot load the model {model}: {_reason(error)}") from error


def _stored(model: str | Path, dtype: str, device: torch.device) -> Any:
    # Directly onto the device: a GPU's model need not fit into the host's memory.
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    loaded, report = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), output_loading_info=True, **placement
    )
    missing = sorted(report["missing_keys"])
    if missing:
        # Otherwise transformers would draw these weights at random.
        raise SetupError(f"cannot load the model {model}: its files lack {len(missing)} weights, such as {missing[0]}")
    scales = sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[2] in SCALES)
    if scales:
        # Otherwise transformers would use the weights without their scales.
        raise SetupError(
            f"cannot load the model {model}: its weights are quantised, and its config does not say how: {scales[0]}"
        )
    return loaded


def _drawn(model: RandomWeights, tokenizer: Any, dtype: str, device: torch.device) -> Any:
    """A model with random weights, the same for the same config, type and kind of device. A CPU draws a billion in 11 s."""
    config, tokens = _config(model.config), max(tokenizer.get_vocab().values()) + 1
    if config.vocab_size < tokens:
        raise SetupError(
            f"{model}: a vocab_size of {config.vocab_size} is less than the {tokens} tokens of {model.tokenizer}'s tokenizer"
        )
    config.eos_token_id = tokenizer.eos_token_id  # the config may be for another tokenizer
    torch.manual_seed(SEED)
    with torch.device(device), no_init_weights():  # on the device, in their type, and drawn once, below
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    made.initialize_weights()
    made.tie_weights()
    with torch.no_grad():
        # A greedy answer has text: ids that the tokenizer lacks are never the best.
        made.get_output_embeddings().weight[tokens:] = 0
    return made


def _config(file: Path) -> Any:
    try:
        fields = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise SetupError(f"{file} is not a model config: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise SetupError(f"{file} is not a model config: it has no model_type")
    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SetupError(f"{file}: transformers knows no language model {kind!r}")
    return CONFIG_MAPPING[kind].from_dict(fields)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if not text or isinstance(error, KeyError):
        return f"{type(error).__name__}: {error}"
    return f"{text[0]} {text[1].strip()}" if text[0].endswith(":") and len(text) > 1 else text[0]
