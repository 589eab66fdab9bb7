"""Leaving out the oldest turns of a conversation, so that the rest fits. Pure.

A turn begins with a user's message and has all that follows it up to the next one: an answer, tool calls, their results.
So what remains never begins with an answer to nothing. What stands before the first user's message (the system's) and the
last turn always stay.
"""

from collections.abc import Callable

from replica.engine import Message


def truncated(messages: list[Message], fits: Callable[[list[Message]], bool]) -> tuple[list[Message], int]:
    """The messages without as few of the oldest turns as makes them fit, and how many messages that were; all but what must
    stay if nothing fits. Calls `fits` O(log turns) times."""
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return messages, 0
    head = messages[: users[0]]
    few, many = 0, len(users) - 1  # turns to drop: fewer than `few` are too few, `many` may be enough
    while few < many:
        middle = (few + many) // 2
        if fits(head + messages[users[middle] :]):
            many = middle
        else:
            few = middle + 1
    return head + messages[users[few] :], users[few] - users[0]
