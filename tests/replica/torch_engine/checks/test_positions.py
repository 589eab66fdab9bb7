"""How far frequencies are constant."""

import pytest

pytest.importorskip("transformers")

from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config

from replica.torch_engine.checks.positions import constant_until

pytestmark = pytest.mark.model
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}


def test_kinds_that_depend_on_the_length() -> None:
    assert constant_until(LlamaConfig(max_position_embeddings=2048)) is None
    assert constant_until(LlamaConfig(rope_parameters=DYNAMIC | {"rope_type": "linear"})) is None
    assert constant_until(LlamaConfig(max_position_embeddings=2048, rope_parameters=DYNAMIC)) == (2048, "dynamic")
    longrope = LONGROPE | {"original_max_position_embeddings": 4096}
    assert constant_until(Phi3Config(max_position_embeddings=131_072, rope_parameters=longrope)) == (4096, "longrope")


def test_one_for_each_type_of_layer() -> None:
    parameters = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = Gemma3TextConfig(max_position_embeddings=8192, rope_parameters=parameters)
    assert constant_until(config) == (8192, "dynamic")
