"""Streamed text has whole characters only, however the tokens arrive; every token that ends an answer is found."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replica.engine import PromptTooLong, SetupError, TemplateOverride
from replica.torch_engine.tokenizer import BEGINNING, LONGEST_HELD, ModelTokenizer, StreamDetokenizer, end_tokens

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


def byte_tokenizer() -> Tokenizer:
    """A vocabulary of single bytes, the hardest for whole characters, and a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|special|>"])
    return made


BYTES = byte_tokenizer()
SPECIAL = BYTES.token_to_id("<|special|>")


def pieces_of(tokens: list[int], sizes: list[int], special: bool = False) -> list[str]:
    """The text after each push, and at last after `finish`."""
    detokenizer, pieces = StreamDetokenizer(BYTES, special), []
    for size in [*sizes, len(tokens)]:
        pieces.append(detokenizer.push(tokens[:size]))
        tokens = tokens[size:]
    return [*pieces, detokenizer.finish()]


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str, sizes: list[int]) -> None:
    pieces = pieces_of(BYTES.encode(text).ids, sizes)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, SPECIAL), max_size=30), st.lists(st.integers(1, 3), max_size=30), st.booleans())
def test_tokens_that_are_no_text_come_out_as_if_decoded_at_once(tokens: list[int], sizes: list[int], special: bool) -> None:
    assert "".join(pieces_of(tokens, sizes, special)) == BYTES.decode(tokens, skip_special_tokens=not special)


def test_half_a_character_comes_out_at_the_end_only() -> None:
    half = BYTES.encode("abé").ids[:3]
    assert pieces_of(half, [2, 1]) == ["ab", "", "", "\ufffd"]


def test_a_broken_byte_run_is_recovered_from() -> None:
    """Vocabularies with byte tokens (Llama 2's): tokenizers' stream raises on them, ours goes on."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    llama = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    llama.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = StreamDetokenizer(llama)
    pieces = [detokenizer.push([token]) for token in (256, 0xE2, 257, 0x62, 0xC3, 0xA9)]
    assert "".join(pieces) + detokenizer.finish() == " a\ufffdbbé"


def test_special_tokens_without_end_do_not_make_the_window_grow() -> None:
    detokenizer = StreamDetokenizer(BYTES)
    text = [detokenizer.push([SPECIAL]) for _ in range(3 * LONGEST_HELD)]
    assert "".join(text) == ""
    assert len(detokenizer._held) <= LONGEST_HELD
    assert detokenizer.push(BYTES.encode("a").ids) == "a"


def test_a_tokenizer_that_cannot_stream_is_refused() -> None:
    with pytest.raises(SetupError, match=r"needs a tokenizer\.json"):
        ModelTokenizer(object())


def test_of_a_text_that_is_too_long_only_a_beginning_is_tokenized() -> None:
    class Counting:
        chat_template = ""

        """A tokenizer of letters."""

        backend_tokenizer = None

        def __init__(self) -> None:
            self.longest = 0

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            self.longest = max(self.longest, len(text))
            return [0] * len(text)

    counting = Counting()
    tokenizer = ModelTokenizer(counting)
    with pytest.raises(PromptTooLong):
        tokenizer.encode("a" * 10_000_000, special=True, most=100_000)
    assert counting.longest == BEGINNING
    assert len(tokenizer.encode("a" * 100_000, special=True, most=100_000)) == 100_000
    with pytest.raises(PromptTooLong):
        tokenizer.encode("a" * 100_001, special=True, most=100_000)
    assert len(tokenizer.encode("a" * 1_000_000, special=True)) == 1_000_000


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}\n{{ m.content }", r"--chat-template: line 2: "),
        ("", "writes nothing"),
        ("{# tools #}", "writes nothing"),
    ],
)
def test_a_template_that_cannot_be_is_refused_at_the_start(template: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        ModelTokenizer(tokenizer(None), template)
    ModelTokenizer(tokenizer(None), "{{ raise_exception('a system message comes first') }}")
    assert ModelTokenizer(tokenizer(None), LLAMA).encode_chat(
        [{"role": "user", "content": "user"}], None, "none", TemplateOverride()
    )


def test_a_template_without_tools_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "replica.torch_engine.tokenizer"):
        ModelTokenizer(tokenizer(LLAMA))
        assert "prints no tools" in caplog.text
        caplog.clear()
        ModelTokenizer(tokenizer(LLAMA + "{{ tools }}"))
        assert not caplog.text
