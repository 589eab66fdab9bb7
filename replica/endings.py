"""Which tokens end an answer of a model.

A model can have several: Llama 3's chat template ends a turn with `<|eot_id|>`, its tokenizer names `<|end_of_text|>`, its
generation config may name both, or one. So all that is named counts, and what the chat template itself writes behind an
assistant's message, if that is a special token.
"""

from typing import Any

import jinja2

MARK = "warmroute"


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """All of them, in order and once each."""
    named = (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id, _turn_end(tokenizer))
    lists = [[ids] if isinstance(ids, int) else ids or [] for ids in named]
    return list(dict.fromkeys(token for ids in lists for token in ids))


def _turn_end(tokenizer: Any) -> int | None:
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    try:
        text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=False)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError):
        return None  # a template that has no such turn: what the model names is all there is
    after = tokenizer.encode(text.rpartition(MARK)[2].lstrip(), add_special_tokens=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return after[0] if after and after[0] in special else None
