"""A model's tokenizer as the engine uses it: prompts to tokens, tokens to text, and the tokens that end an answer.

A token of a byte-level vocabulary can end in the middle of a character, and a token's text depends on the tokens before it.
So streamed answers are decoded by tokenizers' `DecodeStream`, which decodes a short window of tokens with and without the new
tokens, and returns the difference once it ends in a whole character.

A model can have several end tokens: Llama 3's chat template ends a turn with `<|eot_id|>`, its tokenizer names
`<|end_of_text|>`, its generation config may name both, or one. So all named tokens count, and the token that the chat
template itself writes after an assistant's message, if that is a special token.
"""

import inspect
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import jinja2
import transformers
from tokenizers.decoders import DecodeStream

from replica.engine import Message, PromptEnd, PromptError, PromptTooLong, SetupError, TemplateOverride

PROBE = "warmroute"  # the content of the messages with which a template is tested
UNFINISHED = "\ufffd"
LONGEST_HELD = 64  # tokens without text (special ones) after which a window is closed, so that it does not grow
OWN_PARAMETERS = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents"}
BEGINNING = 1 << 18  # characters of a text that are tokenized first, to see whether the text is too long
ANY = 1 << 62  # tokens
CUT = 64  # tokens: a beginning of a text has at most this many more than the same part of the whole text
log = logging.getLogger(__name__)
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, KeyError)


class ModelTokenizer:
    """transformers' tokenizer of a model; `chat_template` replaces the model's own. Safe for several threads."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """Raises SetupError."""
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise SetupError(f"{type(tokenizer).__name__} cannot decode streams: the model needs a tokenizer.json")
        self._tokenizer = tokenizer
        if chat_template is not None:
            tokenizer.chat_template = _sound(tokenizer, chat_template)
        if "tools" not in str(tokenizer.chat_template):
            log.info("the chat template of this model prints no tools: the model does not know those of a request")
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # in characters, of which a byte is at most one

    def encode(self, text: str, special: bool, most: int = ANY) -> list[int]:
        """The tokens of a text. Raises PromptTooLong if there are more than `most`. A long text is tokenized in beginnings of
        doubling length: a few tokens at the end of a beginning may differ, but it never has many more tokens than the whole
        text.
        """
        for size in _beginnings(len(text)):
            if len(self._ids(text[:size], special)) - CUT > most:
                raise PromptTooLong(most)
        tokens = self._ids(text, special)
        if len(tokens) > most:
            raise PromptTooLong(most)
        return tokens

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        end: PromptEnd,
        template: TemplateOverride,
        most: int = ANY,
    ) -> list[int]:
        """The tokens of a conversation. Raises PromptError, and PromptTooLong as `encode` does."""
        if reserved := OWN_PARAMETERS & template.variables.keys():
            raise PromptError(f"chat_template_kwargs are the template's, and may not set {', '.join(sorted(reserved))}")
        options = {**template.variables, "chat_template": template.text, "tokenize": False}
        options |= {"add_generation_prompt": end == "answer", "continue_final_message": end == "open"}
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except TEMPLATE_ERRORS as error:
            raise PromptError(str(error)) from error
        return self.encode(text, special=False, most=most)

    def decode(self, tokens: list[int], special: bool) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def detokenizer(self, special: bool) -> "StreamDetokenizer":
        return StreamDetokenizer(self._tokenizer.backend_tokenizer, special)

    def token_strings(self, tokens: list[int]) -> list[str]:
        # A vocabulary can be larger than the tokenizer's: tokens beyond it have no text.
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(tokens)]


def _sound(tokenizer: Any, template: str) -> str:
    """The template, if a conversation can be written with it. Raises SetupError if not."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template, tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise SetupError(f"--chat-template: line {error.lineno}: {error}") from error
    except TEMPLATE_ERRORS:
        return template  # it may need other messages than this one
    if not text:
        raise SetupError("--chat-template: it writes nothing of a message")
    return template


class StreamDetokenizer:
    """Incremental decoding of one answer; `tokenizer` is a `tokenizers.Tokenizer`. `push` is O(window), not O(answer)."""

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._tokenizer, self._skip_special = tokenizer, not special
        self._stream: Any = DecodeStream(skip_special_tokens=self._skip_special)
        self._context: list[int] = []  # the tokens of the last text that was returned
        self._held: list[int] = []  # the tokens since then

    def push(self, tokens: Items[int]) -> str:
        self._held += tokens
        text = self._step(list(tokens))
        if text is None:
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special)
        text: str = self._tokenizer.decode(self._context + self._held, skip_special_tokens=self._skip_special)
        return text[len(before) :]

    def _step(self, tokens: list[int]) -> str | None:
        """The text of the held tokens, None while it ends in half a character."""
        if self._stream is not None:
            try:
                text: str | None = self._stream.step(self._tokenizer, tokens)
            except Exception:  # noqa: BLE001 - tokenizers has no class for it: bytes that are no UTF-8 after half a character
                text, self._stream = None, None
            if self._stream is not None and (text is not None or len(self._held) <= LONGEST_HELD):
                return text
        text = self.finish()
        if text.endswith(UNFINISHED):
            return None
        self._stream = DecodeStream(ids=self._held, skip_special_tokens=self._skip_special)
        return text


def _beginnings(length: int) -> Iterator[int]:
    """The lengths of the beginnings to tokenize before a text of this length, in characters."""
    size = BEGINNING
    while size < length:
        yield size
        size *= 2


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """All tokens that end an answer, in order and once each; both arguments are transformers' objects."""
    ids = (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id, _turn_end(tokenizer))
    lists = [[one] if isinstance(one, int) else one or [] for one in ids]
    return list(dict.fromkeys(token for several in lists for token in several))


def _turn_end(tokenizer: Any) -> int | None:
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=False)
    except TEMPLATE_ERRORS:
        return None  # the template has no such turn: only the named tokens count
    after = tokenizer.encode(text.rpartition(PROBE)[2].lstrip(), add_special_tokens=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return after[0] if after and after[0] in special else None
