"""A model folder, or a shape alone, becomes a model and its tokenizer; or a message that says what is wrong with it."""

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

# What transformers raises for files that are not what they should be, besides OSError.
BROKEN = (OSError, ValueError, KeyError, TypeError, RuntimeError, ArithmeticError, SafetensorError, StrictDataclassError)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
SEED = 0


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A model of which there is only the config: its weights are drawn when it is loaded, so that a size can be measured that
    nobody has downloaded. `tokenizer` is the folder of one."""

    config: Path
    tokenizer: Path

    def __str__(self) -> str:
        return str(self.config)


def random_weights(path: Path, bundled: Callable[[], Path]) -> RandomWeights:
    """Of a config, or of a folder with one. Its tokenizer is the one beside it, else `bundled`'s. Raises SetupError."""
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        raise SetupError(f"--random-weights: there is no {config}")
    beside = any((config.parent / name).is_file() for name in TOKENIZER_FILES)
    return RandomWeights(config, config.parent if beside else bundled())


def load(model: str | Path | RandomWeights, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """The tokenizer and the model, on the device. Raises SetupError."""
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
    # Straight to where it is to be: a GPU's model need not fit into the host's memory.
    place = {} if device.type == "cpu" else {"device_map": {"": device}}
    loaded, report = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True, **place
    )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers would make these weights up, at random.
        raise SetupError(f"cannot load the model {model}: its files lack {len(missing)} weights, such as {missing[0]}")
    return loaded


def _drawn(model: RandomWeights, tokenizer: Any, dtype: str, device: torch.device) -> Any:
    """The same weights whenever the config, the type and the kind of device are the same. A CPU draws a billion in 11 s."""
    config, tokens = _config(model.config), max(tokenizer.get_vocab().values()) + 1
    if config.vocab_size < tokens:
        raise SetupError(
            f"{model}: a vocab_size of {config.vocab_size} is less than the {tokens} tokens of {model.tokenizer}'s tokenizer"
        )
    config.eos_token_id = tokenizer.eos_token_id  # the config may have another tokenizer in mind
    torch.manual_seed(SEED)
    with torch.device(device), no_init_weights():  # made where they are to be, in their type, and drawn once, below
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    made.initialize_weights()
    made.tie_weights()
    with torch.no_grad():
        # A greedy answer has text: what the tokenizer has no token for is never the best.
        made.get_output_embeddings().weight[tokens:] = 0
    return made


def _config(file: Path) -> Any:
    try:
        fields = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise SetupError(f"{file} is no config: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise SetupError(f"{file} is no config: it names no model_type")
    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SetupError(f"{file}: transformers knows no language model {kind!r}")
    return CONFIG_MAPPING[kind].from_dict(fields)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if not text or isinstance(error, KeyError):
        return f"{type(error).__name__}: {error}"
    return f"{text[0]} {text[1].strip()}" if text[0].endswith(":") and len(text) > 1 else text[0]
