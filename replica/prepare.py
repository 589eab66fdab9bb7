"""From a checked body to the engine's requests, one a prompt: its tokens, what fits, what the engine can do."""

from dataclasses import fields, replace

from replica.calls import Call
from replica.engine import Engine, Message, PromptError, Request, Sampling
from replica.fields import ApiError
from replica.prompts import Prompt
from replica.truncation import truncated

MAX_ANSWER_TOKENS = 2048  # of a chat that names no max_tokens: engines set memory aside for the longest answer there can be
TOO_LONG = "context_length_exceeded"


def prompt_tokens(engine: Engine, prompt: Prompt) -> list[int]:
    """The tokens of a prompt, whatever it is made of. Raises ApiError."""
    if prompt.messages is not None:
        try:
            return engine.encode_chat(prompt.messages, prompt.tools, prompt.tail, prompt.template)
        except PromptError as error:
            raise ApiError(400, f"These messages do not fit the model's chat template: {error}.", "messages") from None
    if prompt.text is not None:
        return engine.encode(prompt.text, prompt.special)
    check_tokens(engine, prompt.tokens or [], "prompt")
    return prompt.tokens or []


def check_tokens(engine: Engine, tokens: list[int] | tuple[int, ...], name: str) -> None:
    if not all(0 <= token < engine.info.vocab_size for token in tokens):
        raise ApiError(400, f"{name} has token ids outside 0 to {engine.info.vocab_size - 1}.", name)


def prepare(engine: Engine, call: Call) -> tuple[list[Request], int]:
    """The engine's requests for a call, and how many of its messages had to be left out. It can take seconds, and asks the
    engine nothing that only the event loop's thread may ask."""
    _check_scores(engine, call)
    check_tokens(engine, call.sampling.stop_tokens, "stop_token_ids")
    check_tokens(engine, list(call.sampling.logit_bias), "logit_bias")
    prepared = [_prepared(engine, call, prompt) for prompt in call.prompts]
    return [request for request, _ in prepared], sum(dropped for _, dropped in prepared)


def _prepared(engine: Engine, call: Call, prompt: Prompt) -> tuple[Request, int]:
    dropped = 0
    tokens = prompt_tokens(engine, prompt)
    if prompt.truncation == "auto" and len(tokens) > _limit(engine, call):
        tokens, dropped = _truncate(engine, call, prompt)
    room = _room(engine, call, prompt, len(tokens))
    sampling = {field.name: getattr(call.sampling, field.name) for field in fields(Sampling)}
    most = call.max_tokens or min(room, MAX_ANSWER_TOKENS)
    if call.sampling.min_tokens > most:
        message = (
            f"min_tokens is {call.sampling.min_tokens}, but the answer has at most {most} tokens: ask for fewer, or for more."
        )
        raise ApiError(400, message, "min_tokens")
    return Request(tokens, most, scope=call.scope, keep_s=call.keep_s, **sampling), dropped


def echoed(engine: Engine, prompt: Prompt) -> str:
    """The prompt of a completion as a text."""
    return prompt.text if prompt.text is not None else engine.decode(prompt.tokens or [], special=True)


def choice(request: Request, index: int) -> Request:
    """The request of one of several answers: each has a seed of its own, as in vLLM."""
    return request if request.seed is None or not index else replace(request, seed=request.seed + index)


def _check_scores(engine: Engine, call: Call) -> None:
    if not engine.info.scores and call.sampling.logprobs is not None:
        raise ApiError(400, "The simulated engine has no scores to tell: leave out logprobs.", "logprobs")
    if call.sampling.grammar is not None:
        reason = engine.grammar_error(call.sampling.grammar)
        if reason is not None:
            raise ApiError(400, f"This shape of the answer cannot be followed: {reason}", "response_format")


def _limit(engine: Engine, call: Call) -> int:
    """The longest prompt that leaves room for the answer."""
    return engine.info.context - (call.max_tokens or 1)


def _truncate(engine: Engine, call: Call, prompt: Prompt) -> tuple[list[int], int]:
    limit = _limit(engine, call)

    def tokens(messages: list[Message]) -> list[int]:
        return prompt_tokens(engine, replace(prompt, messages=messages))

    kept, dropped = truncated(prompt.messages or [], lambda messages: len(tokens(messages)) <= limit)
    return tokens(kept), dropped


def _room(engine: Engine, call: Call, prompt: Prompt, length: int) -> int:
    """How many tokens an answer can have, at least one and what was asked for."""
    context = engine.info.context
    room = context - length
    param = "messages" if call.kind == "chat" else "prompt"
    if not length:
        raise ApiError(400, "The prompt has no tokens: there is nothing to go on with.", param)
    if room < 1:
        advice = (
            "Shorten it"
            if call.kind == "completion" or prompt.truncation == "auto"
            else "Shorten it, or send truncation: 'auto'"
        )
        message = f"The prompt has {length} tokens; at most {context - 1} leave room for an answer. {advice}."
        raise ApiError(400, message, param, TOO_LONG)
    if call.max_tokens is not None and call.max_tokens > room:
        message = (
            f"{length} prompt tokens and {call.max_tokens} for the answer are more than the {context} tokens of "
            f"this replica: ask for at most {room}, or shorten the prompt."
        )
        raise ApiError(400, message, "max_tokens", TOO_LONG)
    return room
