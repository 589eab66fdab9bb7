"""An answer token by token: what it would be if it were made at once, as long as was known before, and no memory before it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.cache.prefix import Scope
from replica.engine import EngineRequest, FinishReason, Grammar
from replica.sim import text as sim_text
from replica.sim.answer import LOOKAHEAD, Answer, Task

CALLING = sim_text.encode_chat([{"role": "user", "content": '<|call|>find {"what": "it"}'}], [{"name": "find"}])
CALL = sim_text.requested_calls(CALLING)
FORCED = Grammar("calls", json.dumps([{"name": "find"}]))
FORCED_LENGTH = len(sim_text.forced_call(FORCED.text))


def answer_to(request: EngineRequest) -> Answer:
    return Answer(Task.of(request, 16), request)


def at_once(request: EngineRequest, call: list[int]) -> tuple[list[int], FinishReason, bool]:
    """The tokens, why they end, whether the last is a stop token."""
    seed = 0 if request.greedy else request.seed or 0
    tokens, ended = call[: request.max_tokens], len(call) <= request.max_tokens
    if not call:
        least, endless = request.min_tokens, request.ignore_eos
        tokens, ended = sim_text.answer(request.prompt, request.max_tokens, endless=endless, least=least, seed=seed)
    cut = next((at for at in range(request.min_tokens, len(tokens)) if tokens[at] in request.stop_tokens), None)
    if cut is not None:
        return tokens[: cut + 1], "stop", True
    return tokens, "stop" if ended else "length", False


@given(st.data())
def test_its_tokens_come_in_any_pieces_and_their_number_is_known_before(data: st.DataObject) -> None:
    prompt, grammar, call = data.draw(
        st.sampled_from(
            [(CALLING, None, CALL), ([1], FORCED, sim_text.forced_call(FORCED.text)), ([1, 2], None, []), ([3], None, [])]
        )
    )
    most = data.draw(st.integers(1, 120))
    request = EngineRequest(
        prompt,
        most,
        grammar=grammar,
        seed=data.draw(st.integers(0, 1 << 40)) or None,
        temperature=data.draw(st.sampled_from([0.0, 1.0])),
        ignore_eos=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, most)),
        stop_tokens=tuple(data.draw(st.lists(st.sampled_from([*sorted(sim_text.DRAWN)[::9], *CALL[::3], 7]), max_size=3))),
    )
    answer, tokens = answer_to(request), list[int]()
    known = (answer.least, answer.most)
    while answer.finish is None:
        tokens += answer.take(data.draw(st.integers(1, 60)))
    assert (tokens, answer.finish, answer.stopped) == at_once(request, call)
    assert known == (len(tokens), len(tokens))
    assert answer.tokens.tolist() == tokens
    assert answer.take(5) == []


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (0, " rate map line leaf fig snow moon hill"),
        (7, " sand task sand note slot door hand key"),
    ],
)
def test_a_seed_gives_the_same_words_in_every_release(seed: int, text: str) -> None:
    request = EngineRequest(sim_text.encode("Once upon a time,"), 8, ignore_eos=True, temperature=1.0, seed=seed)
    assert sim_text.decode(answer_to(request).take(8)) == text


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"ignore_eos": True}, 90_000, 90_000),
        ({"ignore_eos": True, "stop_tokens": (5,)}, 90_000, 90_000),
        ({"min_tokens": 90_000}, 90_000, 90_000),
        ({"min_tokens": 2_000}, 2_000, 90_000),
        ({"min_tokens": LOOKAHEAD - 1}, None, None),
        ({"grammar": FORCED, "min_tokens": 2_000}, FORCED_LENGTH, FORCED_LENGTH),
    ],
)
def test_how_long_an_answer_gets_is_known_or_has_bounds(
    options: dict[str, object], least: int | None, most: int | None
) -> None:
    answer = answer_to(EngineRequest([1, 2, 3], 90_000, **options))  # type: ignore[arg-type]
    bounds = answer.least, answer.most
    length = len(answer.take(90_000))
    assert bounds[0] <= length <= bounds[1]
    assert bounds == (least or bounds[0], most or bounds[1])


def test_answers_to_one_prompt_share_a_task_and_others_do_not() -> None:
    prompt = [1, 2, 3]
    request = EngineRequest(prompt, 5, seed=1)
    task = Task.of(request, 16)
    assert task.covers(EngineRequest(prompt, 5, seed=2))
    assert not task.covers(EngineRequest([1, 2, 3], 5))
    assert not task.covers(EngineRequest(prompt, 5, Scope(salt="a")))
    assert not task.covers(EngineRequest(prompt, 5, stop_tokens=(7,)))
    assert not task.covers(EngineRequest(prompt, 5, grammar=FORCED))
