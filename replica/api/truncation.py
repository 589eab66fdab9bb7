"""Leaving out the oldest turns of a conversation so that the rest fits. Pure.

A turn begins with a user's message and has all messages up to the next one: an answer, tool calls, their results. So what
remains never begins with an answer to nothing. The messages before the first user's message (the system prompt) and the last
turn always stay.
"""

from collections.abc import Callable

from replica.engine import Message


def truncated(messages: list[Message], fits: Callable[[list[Message]], bool]) -> tuple[list[Message], int]:
    """Drop as few of the oldest turns as necessary; returns the remaining messages and the number of dropped ones. If nothing
    fits, all turns but the last are dropped. Calls `fits` O(log turns) times."""
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return messages, 0
    head = messages[: users[0]]
    low, high = 0, len(users) - 1  # the number of turns to drop is in low to high
    while low < high:
        middle = (low + high) // 2
        if fits(head + messages[users[middle] :]):
            high = middle
        else:
            low = middle + 1
    return head + messages[users[low] :], users[low] - users[0]
