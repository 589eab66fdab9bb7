"""Every token that ends an answer is found, wherever it is named."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replica.endings import end_tokens

pytestmark = pytest.mark.model  # not the model, but transformers: seconds to import

WORDS = ["<|end_of_text|>", "<|eot_id|>", "<|head|>", "user", "assistant", "warmroute"]
LLAMA = "{% for m in messages %}<|head|> {{ m.role }} {{ m.content | trim }} <|eot_id|>{% endfor %}"


def tokenizer(template: str | None) -> Any:
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="warmroute"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<|end_of_text|>", "extra_special_tokens": ["<|eot_id|>", "<|head|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **special)


def model(generation: Any, config: Any = None) -> Any:
    return SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(eos_token_id=config)
    )


@pytest.mark.parametrize(
    ("generation", "config", "template", "ends"),
    [
        (None, None, None, [0]),
        (None, None, LLAMA, [0, 1]),
        ([1, 5], 0, None, [1, 5, 0]),
        (0, [0, 1], LLAMA, [0, 1]),
        (None, None, "{{ raise_exception('no') }}", [0]),
        (None, None, "{% for m in messages %}{{ m.content }} user {% endfor %}", [0]),  # no special token: part of a text
        (None, None, "{% for m in messages %}{{ m.content }}{% endfor %}", [0]),
    ],
)
def test_what_is_named_anywhere_ends(generation: Any, config: Any, template: str | None, ends: list[int]) -> None:
    assert end_tokens(model(generation, config), tokenizer(template)) == ends
