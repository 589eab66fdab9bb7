"""Folders that are broken, each in its own way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replica.engine import SetupError

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from replica.engine import EngineRequest
from replica.torch_engine.checkpoint import fingerprint
from replica.torch_engine.loading import RandomWeights, load, multiplies_bfloat16, random_weights
from tests.replica.tiny import VOCABULARY, answer, running, tiny_model

pytestmark = pytest.mark.model  # not the model, but transformers: seconds to import
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("good"))


def configured(**changed: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def scaled(folder: Path) -> None:
    file = folder / "model.safetensors"
    scale = {"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(64, 1)}
    save_file(load_file(file) | scale, file, {"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (configured(model_type="unheard_of"), "does not recognize this architecture"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot load the model"),
        (cut, "file not fully covered"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot load the tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot load the tokenizer"),
        (configured(hidden_size=32), "cannot load the model"),
        (scaled, "weights are quantised, and its config does not say how: model.layers.0.self_attn.q_proj.weight_scale"),
        (configured(num_hidden_layers=5), "lack 27 weights, such as model.layers.2"),
        (configured(hidden_size="64"), "'hidden_size': TypeError: .* expected int, got str"),
    ],
)
def test_what_is_broken_is_an_error(good: Path, tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    load(folder, "float32", CPU)
    damage(folder)
    with pytest.raises(SetupError, match=message):
        load(folder, "float32", CPU)


# -- random weights


def bundled(folder: Path) -> Callable[[], Path]:
    return lambda: folder


def nothing_bundled() -> Path:
    raise AssertionError("the tokenizer beside the config is enough")


def shape(folder: Path, **changed: object) -> Path:
    """A config without anything beside it."""
    fields = {"model_type": "llama", "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | changed))
    return folder


def test_weights_are_in_bfloat16_where_the_processor_multiplies_it(good: Path) -> None:
    assert load(good, "auto", CPU)[1].dtype == (torch.bfloat16 if multiplies_bfloat16() else torch.float32)


def test_a_folder_that_has_a_tokenizer_is_enough(good: Path) -> None:
    assert random_weights(good, nothing_bundled) == RandomWeights(good / "config.json", good)
    assert random_weights(good / "config.json", nothing_bundled) == RandomWeights(good / "config.json", good)


def test_random_weights_are_the_same_again_and_others_for_another_shape(good: Path, tmp_path: Path) -> None:
    def drawn(dtype: str, **changed: object) -> str:
        model = load(random_weights(shape(tmp_path / "shape", **changed), bundled(good)), dtype, CPU)[1]
        assert model.dtype == getattr(torch, dtype)
        return fingerprint(model)

    assert drawn("bfloat16") == drawn("bfloat16")
    prints = [drawn("bfloat16"), drawn("float32"), drawn("bfloat16", num_hidden_layers=4), drawn("bfloat16", rope_theta=5e5)]
    assert len(set(prints)) == 4


def test_random_weights_are_those_that_transformers_would_begin_a_training_with(good: Path, tmp_path: Path) -> None:
    for tied in (False, True):
        config = shape(tmp_path / "shape", vocab_size=VOCABULARY, tie_word_embeddings=tied)
        model = load(random_weights(config, bundled(good)), "float32", CPU)[1]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert 0.19 < float(model.model.layers[2].mlp.up_proj.weight.detach().std()) < 0.21
        assert model.model.norm.weight.eq(1).all()
        assert model.model.rotary_emb.inv_freq[0] == 1


async def test_what_the_tokenizer_has_no_token_for_is_never_the_best_and_has_no_text(good: Path, tmp_path: Path) -> None:
    async with running(random_weights(shape(tmp_path / "shape", eos_token_id=399), bundled(good))) as engine:
        assert engine._eos == []  # the tokenizer's: 399 is of another one
        greedy, _ = await answer(engine, EngineRequest([1, 2, 3], 100, ignore_eos=True))
        assert max(greedy) < 256
        drawn, _ = await answer(engine, EngineRequest([1, 2, 3], 100, ignore_eos=True, temperature=5.0, seed=1, logprobs=2))
        assert max(drawn) >= 256
        letters = [token for token in drawn if token < 256]
        assert engine.decode(drawn, special=True) == engine.decode(letters, special=True)
        assert [bool(text) for text in engine.token_strings(drawn)] == [token < 256 for token in drawn]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not a model config"),
        ("[]", "it has no model_type"),
        ("{}", "it has no model_type"),
        ('{"model_type": "unheard_of"}', "knows no language model 'unheard_of'"),
        ('{"model_type": "clip"}', "knows no language model 'clip'"),
        ('{"model_type": "llama", "vocab_size": 200}', "a vocab_size of 200 is less than the 256 tokens"),
        ('{"model_type": "llama", "vocab_size": 300, "num_attention_heads": 0}', "cannot load the model .* by zero"),
    ],
)
def test_what_is_no_shape_is_an_error(good: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SetupError, match=message):
        load(random_weights(tmp_path, bundled(good)), "bfloat16", CPU)


def test_a_shape_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(SetupError, match=r"--random-weights: there is no .*json"):
            random_weights(path, nothing_bundled)
