"""A toy topic of two workers: questions, messages, a command, and their ends."""

from __future__ import annotations

from gateway.cluster.messages import Perform
from gateway.features.workers.channel import HUB
from tests.gateway.conftest import eventually
from tests.gateway.features.workers.conftest import Worker, star
from tests.support.fakes import FakeReplica


class Toy:
    """Remembers what reaches it at one worker."""

    def __init__(self, worker: Worker) -> None:
        self.received = list[tuple[int, bytes]]()
        self.executed = list[bytes]()
        self.ended = list[int]()
        self.joined = 0
        self._who = worker.who
        topics = worker.gateway.local.topics
        topics.answers("toy", lambda question: b"%b of %d" % (question, self._who))
        topics.receives("toy", lambda sender, message: self.received.append((sender, message)))
        topics.executes("toy", self._execute)
        topics.follows(self._join, self.ended.append)

    async def _execute(self, argument: bytes) -> None:
        self.executed.append(argument)

    def _join(self) -> None:
        self.joined += 1


async def test_questions_messages_and_commands_of_a_toy_reach_all_workers() -> None:
    async with FakeReplica() as replica, star(replica) as (made, (first, second)):
        one, two = Toy(first), Toy(second)
        control = first.gateway.control
        assert await control.ask("toy", b"answer") == {1: b"answer of 1", 2: b"answer of 2"}
        assert await control.ask("unknown", b"answer") == {}

        for message in (b"a", b"b"):
            control.publish("toy", message)
        control.publish("unknown", b"c")
        await control.execute(Perform("toy", b"now"))  # all that was sent before it has come
        assert (one.received, two.received) == ([], [(1, b"a"), (1, b"b")])
        assert one.executed == two.executed == [b"now"]
        assert control.unsent == 0

        made.hub.topics.answers("hub", lambda question: b"hub: " + question)
        assert await control.ask("hub", b"?") == {HUB: b"hub: ?"}, "no worker is asked"

        third = await made.join()
        await eventually(lambda: one.joined == two.joined == 1)
        assert await control.ask("toy", b"answer") == {1: b"answer of 1", 2: b"answer of 2"}, "the third one does not know it"
        made.hub.leave(third.who)
        await eventually(lambda: one.ended == two.ended == [third.who])
