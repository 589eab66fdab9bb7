"""A short run of the fuzzer (`python -m tests.replica.fuzz`) against both engines, and that it finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tests.replica.fuzz.bodies import KINDS, LARGEST, Sent, request
from tests.replica.fuzz.run import Found, fuzz, judge, options, replica

SECONDS = 6.0
SILENT_S = 1.0  # of a machine that runs other tests meanwhile


async def test_the_simulated_engine(tmp_path: Path) -> None:
    with replica(tmp_path / "log", *options("sim", [])) as server:
        found = await fuzz(server, SECONDS, seed=1)
    assert not [wrong for wrong in found.wrong if "MB at the end" not in wrong and "silent" not in wrong], found.report()
    assert found.silent_s < SILENT_S, found.report()
    assert found.outcomes.total() > 10


@pytest.mark.model
async def test_the_real_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.replica.tiny import spoken_model

    model = str(spoken_model(tmp_path / "model"))
    with replica(tmp_path / "log", *options("transformers", ["--model", model, "--dtype", "float32"])) as server:
        found = await fuzz(server, SECONDS, seed=1)
    assert not [wrong for wrong in found.wrong if "MB at the end" not in wrong and "silent" not in wrong], found.report()
    assert found.silent_s < SILENT_S, found.report()
    assert found.outcomes.total() > 10


def test_the_same_seed_gives_the_same_bodies() -> None:
    first, again = ([request(chance) for _ in range(40)] for chance in (Random(5), Random(5)))
    assert first == again
    assert all(len(one.body) <= LARGEST for one in first)
    assert len({one.kind for one in first}) > len(KINDS) / 2


@pytest.mark.parametrize(
    ("path", "status", "body", "wrong"),
    [
        ("/v1/completions", 200, b"{}", ""),
        ("/v1/completions", 0, b"", "no answer"),
        ("/v1/completions", 500, b'{"error":{"message":"x","type":"server_error"}}', "500"),
        ("/v1/completions", 500, b"the answer cannot follow this format any further: x", ""),
        ("/v1/completions", 200, b'data: {"error":{"message":"x","type":"server_error"}}', "200"),
        ("/v1/completions", 400, b"Bad Request", "in no API's shape"),
        ("/v1/completions", 400, b'{"error":{"message":"x","type":"y"}}', "in another API's shape"),
        ("/v1/messages", 400, b'{"error":{"message":"x","type":"y"}}', ""),
        ("/v1/messages", 400, json.dumps({"error": {"message": "x" * 3000, "type": "y"}}).encode(), "an error of 30"),
    ],
)
def test_what_is_wrong(path: str, status: int, body: bytes, wrong: str) -> None:
    found = Found()
    judge(found, Sent("kind", path, b"{}"), status, body)
    assert len(found.wrong) == bool(wrong)
    assert wrong in "".join(found.wrong)
