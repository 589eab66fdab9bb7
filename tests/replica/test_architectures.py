"""The table of architectures in docs/replica.md is what the command writes."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from scripts.architectures import PAGE, listed, page, rows
from tests.replica.architectures import KINDS
from tests.support.tiers import gate

pytestmark = pytest.mark.model
STALE = "run: python -m scripts.architectures"


def test_the_table_has_all_kinds_and_no_others() -> None:
    text = PAGE.read_text("utf-8")
    assert sorted(listed(text)) == sorted(KINDS), STALE
    assert page(text, list(listed(text).values())) == text, STALE
    assert sum("| refused |" not in line for line in listed(text).values()) >= 24


# Those that were once wrong or failed, and one of each way.
@pytest.mark.parametrize(
    "kind",
    [
        *("Llama", "Llama, dynamic NTK", "Mistral, sliding window", "Qwen3-MoE", "Gemma 2", "Phi-3, longrope", "gpt-oss"),
        *("StableLM", "Falcon, ALiBi", "Bloom", "DeepSeek-V3"),
    ],
)
@gate("Llama", "Gemma 2", "StableLM", "Bloom", reason="each kind of row")
def test_a_row_of_the_table_is_what_the_engine_does(kind: str) -> None:
    assert list(rows([kind])) == [listed(PAGE.read_text("utf-8"))[kind]], STALE
