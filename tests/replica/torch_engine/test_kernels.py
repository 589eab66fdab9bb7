"""What oneDNN keeps of each shape of a product is bounded: texts have all lengths."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.replica.fuzz.bodies import Sent
from tests.replica.fuzz.run import ask, options, replica
from tests.replica.tiny import spoken_model

pytestmark = pytest.mark.model


async def test_texts_of_many_lengths_take_no_memory(tmp_path: Path) -> None:
    model = str(spoken_model(tmp_path / "model"))
    with replica(tmp_path / "log", *options("transformers", ["--model", model, "--dtype", "float32"])) as server:
        memory = []
        for length in range(20, 170):
            body = {"prompt": [length, *[7] * length], "max_tokens": 2}
            reply = await ask(server.port, Sent("", "/v1/completions", json.dumps(body).encode()))
            assert reply.status == 200, reply
            memory.append(server.mb)
    assert memory[-1] < memory[40] + 40  # it was 2 MB for each length
