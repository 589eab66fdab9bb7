"""A parsed request's prompt for the router: its block keys, in units of bytes of its canonical text, or of token ids."""

from __future__ import annotations

from gateway.api.openai import ApiRequest
from router import Prompt, seed, text_keys, token_keys


def router_prompt(
    api: ApiRequest, block_bytes: int, block_tokens: int, session: str = "", scope: tuple[str, ...] = ()
) -> Prompt:
    """Seeded so that models and cache salts never match each other, nor do different scopes (names that the caller adds).

    O(length of the prompt), but for a request whose keys came with it: these were made with the blocks and the scope of then.
    """
    if (made := api.made) is not None:
        return Prompt(made.keys, made.units, made.block_units, made.scale, session)
    prompt = api.prompt
    if prompt is None:
        return Prompt(b"", 0, block_bytes, api.model, session)
    name = seed(api.model, api.salt, *scope)
    if isinstance(prompt, bytes):
        return Prompt(text_keys(prompt, block_bytes, name), len(prompt), block_bytes, api.model, session)
    return Prompt(token_keys(prompt, block_tokens, name), len(prompt), block_tokens, "", session)
