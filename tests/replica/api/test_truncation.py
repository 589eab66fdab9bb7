"""As few of the oldest turns as makes the rest fit, and never half a turn."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from replica.api.prepare import truncated

MESSAGE = st.builds(
    lambda role, size: {"role": role, "content": "x" * size},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.integers(1, 9),
)


def size(messages: list[dict[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)


def dropped_by_hand(messages: list[dict[str, Any]], limit: int) -> int:
    """The oracle: one turn after the other, until it fits or only the last turn is left."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    for at in users[:-1]:
        if size(messages[: users[0]] + messages[at:]) <= limit:
            return at - users[0]
    return users[-1] - users[0] if users else 0


@given(st.lists(MESSAGE, min_size=1, max_size=12), st.integers(0, 60))
def test_the_fewest_whole_turns_are_left_out(messages: list[dict[str, Any]], limit: int) -> None:
    kept, dropped = truncated(messages, lambda rest: size(rest) <= limit)
    assert dropped == dropped_by_hand(messages, limit)
    assert len(kept) == len(messages) - dropped
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), len(messages))
    assert kept == messages[:first] + messages[first + dropped :]
    if dropped:
        assert kept[first]["role"] == "user"


def test_a_long_conversation_is_tokenised_a_few_times_only() -> None:
    asked: list[int] = []

    def fits(messages: list[dict[str, Any]]) -> bool:
        asked.append(len(messages))
        return len(messages) <= 31

    messages = [{"role": role, "content": "x"} for _ in range(1000) for role in ("user", "assistant")]
    kept, dropped = truncated(messages, fits)
    assert (len(kept), dropped) == (30, 1970)
    assert len(asked) <= 10
