"""Whatever order commands are answered in, and whenever workers come and go: a new worker ends up as the others are."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from functools import cache

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.cluster.messages import Drain, Join, Leave
from gateway.config.schema import AddedReplica, Config
from gateway.features.workers.channel import HUB
from gateway.features.workers.command_log import CommandLog, ReplicaCommand
from tests.support.configs import load

OWN = "http://127.0.0.1:8000"  # where the gateway listens: no replica can be there
URLS = st.sampled_from(["http://one", "http://two"])
NAMES = st.sampled_from(["a", "b"])
COMMANDS = st.one_of(
    st.builds(
        lambda name, url, pool: Join(pool, AddedReplica(url, name)), NAMES, URLS | st.just(OWN), st.sampled_from(["p", "q"])
    ),
    st.builds(Leave, NAMES),
    st.builds(Drain, NAMES, st.booleans()),
)
ASKER = 7


@cache
def config_of(urls: frozenset[tuple[str, str]], second_pool: bool) -> Config:
    """urls: by name, of the first pool's replicas."""
    listed = [{"url": "http://always", "name": "always"}, *[{"url": url, "name": name} for name, url in sorted(urls)]]
    pools = [{"name": "p", "models": ["p"], "replicas": listed}]
    if second_pool:
        pools.append({"name": "q", "models": ["q"], "replicas": [{"url": "http://other", "name": "other"}]})
    return load(None, {"listen": OWN.removeprefix("http://"), "pools": pools}, env={})


CONFIGS = st.builds(
    lambda urls, second: config_of(frozenset(urls.items()), second), st.dictionaries(NAMES, URLS), st.booleans()
)


@dataclass
class Oracle:
    """A worker. inbox: the commands that it has not executed, by number; added: pool and URL by name."""

    config: Config
    inbox: deque[int] = field(default_factory=deque)
    added: dict[str, tuple[str, str]] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)

    @property
    def urls(self) -> dict[str, str]:
        listed = {replica.name: replica.url for pool in self.config.pools for replica in pool.replicas}
        return {name: url for name, (_, url) in self.added.items()} | listed

    def execute(self, command: ReplicaCommand | Config) -> bool:
        match command:
            case Config():
                before, self.config = self.urls, command
                pools, listed = {pool.name for pool in command.pools}, [r.name for p in command.pools for r in p.replicas]
                self.added = {name: it for name, it in self.added.items() if name not in listed and it[0] in pools}
                self.drained = {name for name in self.drained if before[name] == self.urls.get(name)}
            case Join(pool, replica):
                if replica.name in self.urls or replica.url == OWN or pool not in {each.name for each in self.config.pools}:
                    return False
                self.added[replica.name] = pool, replica.url
            case Leave(name):
                if name not in self.added:
                    return False
                del self.added[name]
                self.drained.discard(name)
            case Drain(name, on):
                if name in self.urls:
                    (self.drained.add if on else self.drained.discard)(name)
        return True


class Workers(RuleBasedStateMachine):
    """The hub's part: commands go to all workers, their answers come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = CommandLog()
        self.config = config_of(frozenset(), second_pool=True)
        self.sent: list[ReplicaCommand | Config] = []
        self.workers = {1: Oracle(self.config), 2: Oracle(self.config)}
        self.started = 2
        self.answers: list[tuple[int, int, bool]] = []  # worker, command, accepted

    @rule(command=COMMANDS)
    def command(self, command: ReplicaCommand) -> None:
        self.log.send(ASKER, len(self.sent), command, b"%d" % len(self.sent), self.workers)
        self._to_all(command)

    @rule(config=CONFIGS)
    def reload(self, config: Config) -> None:
        self.log.apply_config(self.config, config)
        self.config = config
        self._to_all(config)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers[who]
        if worker.inbox:
            number = worker.inbox.popleft()
            accepted = worker.execute(self.sent[number])
            if not isinstance(self.sent[number], Config):
                self.answers.append((who, number, accepted))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker, number, accepted = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if self.log.is_pending(ASKER, number):
            self.log.note_answer(worker, ASKER, number, accepted=accepted)

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def start(self) -> None:
        self.started += 1
        self.workers[self.started] = worker = Oracle(self.config)
        for asker, number in self._replay(self.log, worker, self.started):
            if asker != HUB:
                self.answers.append((self.started, *number))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[worker]
        self.answers = [answer for answer in self.answers if answer[0] != worker]
        self.log.note_end(worker)

    @invariant()
    def a_new_worker_is_as_the_others_will_be(self) -> None:
        new = Oracle(self.config)
        self._replay(copy.deepcopy(self.log), new, -1)
        for worker in self.workers.values():
            later = Oracle(worker.config, deque(), dict(worker.added), set(worker.drained))
            for number in worker.inbox:
                later.execute(self.sent[number])
            assert (later.urls, later.drained) == (new.urls, new.drained)

    def _replay(self, log: CommandLog, worker: Oracle, who: int) -> list[tuple[int, tuple[int, bool]]]:
        """The worker executes what the log has for it. Returns its answers, by asker."""
        found = []
        for asker, payload in log.replay(who):
            command = self.sent[int(payload)]
            found.append((asker, (int(payload), worker.execute(command))))
        return found

    def _to_all(self, command: ReplicaCommand | Config) -> None:
        for worker in self.workers.values():
            worker.inbox.append(len(self.sent))
        self.sent.append(command)


TestWorkers = Workers.TestCase


def test_at_a_reload_an_addition_that_all_will_refuse_takes_the_place_of_no_other() -> None:
    log, config = CommandLog(), config_of(frozenset(), second_pool=True)
    for number, replica in enumerate(
        (AddedReplica(OWN, "a"), AddedReplica("http://one", "n" * 101), AddedReplica("http://one", "a"))
    ):
        log.send(ASKER, number, Join("p", replica), b"%d" % number, [1])
    log.apply_config(config, config_of(frozenset(), second_pool=False))
    assert list(log.replay(2)) == [(ASKER, b"2")]
