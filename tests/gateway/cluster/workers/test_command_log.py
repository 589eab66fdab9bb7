"""Whatever order commands are answered in, and whenever workers come and go: a new worker ends up as the others are."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.cluster.messages import Drain, Join, Leave
from gateway.cluster.workers.channel import HUB
from gateway.cluster.workers.command_log import CommandLog, Replayed
from gateway.config.schema import ReplicaConfig

CONFIGURED = "c"
NAMES = st.sampled_from(["a", "b", CONFIGURED])
COMMANDS = st.one_of(
    st.builds(lambda name: Join("default", ReplicaConfig(f"http://{name}", name)), NAMES),
    st.builds(Leave, NAMES),
    st.builds(Drain, NAMES, st.booleans()),
)
ASKER = 7


@dataclass
class Oracle:
    """A worker. inbox: the commands that it has not executed; members: true if an operator has added it."""

    inbox: deque[int]
    members: dict[str, bool] = field(default_factory=lambda: {CONFIGURED: False})
    drained: set[str] = field(default_factory=set)

    def execute(self, command: Replayed) -> bool:
        match command:
            case Join(_, replica):
                if replica.name in self.members:
                    return False
                self.members[replica.name] = True
                self.drained.discard(replica.name)
            case Leave(name):
                if not self.members.get(name):
                    return False
                del self.members[name]
                self.drained.discard(name)
            case Drain(name, on):
                if name in self.members:
                    (self.drained.add if on else self.drained.discard)(name)
        return True


class Workers(RuleBasedStateMachine):
    """The hub's part: commands go to all workers, their answers come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = CommandLog()
        self.sent: list[Replayed] = []
        self.workers = {1: Oracle(deque()), 2: Oracle(deque())}
        self.started = 2
        self.answers: list[tuple[int, int, bool]] = []  # worker, command, accepted

    @rule(command=COMMANDS)
    def command(self, command: Replayed) -> None:
        number = len(self.sent)
        self.sent.append(command)
        self.log.send(ASKER, number, command, b"%d" % number, self.workers)
        for worker in self.workers.values():
            worker.inbox.append(number)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self._execute(data.draw(st.sampled_from(sorted(self.workers))))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker, number, accepted = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if self.log.is_pending(ASKER, number):
            self.log.answered(worker, ASKER, number, accepted=accepted)

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def start(self) -> None:
        self.started += 1
        self.workers[self.started] = worker = Oracle(deque())
        for asker, payload in self.log.replay(self.started):
            accepted = worker.execute(self.sent[int(payload)])
            if asker != HUB:
                self.answers.append((self.started, int(payload), accepted))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[worker]
        self.answers = [answer for answer in self.answers if answer[0] != worker]
        self.log.ended(worker)

    @invariant()
    def a_new_worker_is_as_the_others_will_be(self) -> None:
        new, states = Oracle(deque()), []
        for _, payload in copy.deepcopy(self.log).replay(-1):
            new.execute(self.sent[int(payload)])
        for worker in (*self.workers.values(), new):
            later = Oracle(deque(), dict(worker.members), set(worker.drained))
            for number in worker.inbox:
                later.execute(self.sent[number])
            states.append((later.members, later.drained))
        assert all(state == states[0] for state in states)

    def _execute(self, who: int) -> None:
        worker = self.workers[who]
        if worker.inbox:
            number = worker.inbox.popleft()
            self.answers.append((who, number, worker.execute(self.sent[number])))


TestWorkers = Workers.TestCase
