"""Folders that are broken, each in its own way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replica.engine import SetupError

pytest.importorskip("torch")
pytest.importorskip("transformers")

from replica.loading import load

from .tiny import tiny_model

pytestmark = pytest.mark.model  # not the model, but transformers: seconds to import


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("good"))


def configured(**changed: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "says"),
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
        (configured(num_hidden_layers=5), "lack 27 weights, such as model.layers.2"),
    ],
)
def test_what_is_broken_is_said(good: Path, tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    load(folder, "float32")
    damage(folder)
    with pytest.raises(SetupError, match=says):
        load(folder, "float32")
