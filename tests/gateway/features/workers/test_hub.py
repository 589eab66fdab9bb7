"""What the hub keeps for those who come later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.messages import Command, Drain, EventBatch, Join, Leave, Reconfigure, RejectConfig, Reset, decode_config
from gateway.config.schema import MAX_REPLICAS, AddedReplica, Config, ReplicaConfig
from gateway.config.sections import MAX_SOURCES
from gateway.features.table import WholeConfig, new_metrics
from gateway.features.workers.channel import HEAD, HUB, Channel, Receive
from gateway.features.workers.command_log import MAX_DRAINS, MAX_PENDING
from gateway.features.workers.hub import SWEEP_S, Hub
from gateway.features.workers.hub_knowledge import MESSAGE_BYTES
from gateway.features.workers.messages import (
    COUNTERS,
    MEMBERS,
    Ask,
    CatchUpEnd,
    Execute,
    Heartbeat,
    Message,
    Publish,
    SourceMember,
    SourceMembers,
    TopicAnswer,
    Welcome,
    decode_members,
    encode,
    from_hub,
    from_worker,
)
from gateway.telemetry.exposition import packed
from tests.gateway.features.workers.test_channel import framed, messages
from tests.support.compiled import uncompiled
from tests.support.configs import load


class End:
    """A channel's end that remembers. sent: (worker, message)."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.closed = False
        self.unsent = 0  # it takes at once what it is sent

    def send(self, message: Message, worker: int = 0) -> None:
        self.forward(encode(message), worker)

    def forward(self, payload: bytes, worker: int) -> None:
        self.sent.append((worker, from_hub(payload)))

    def receive(self, receive: Receive, _lost: Any) -> None:
        self._receive = receive

    def receives(self, message: Message, worker: int = 0) -> None:
        """The worker has sent this."""
        self._receive(worker, message, encode(message))

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type) -> list[tuple[int, Any]]:
        return [(worker, message) for worker, message in self.sent if isinstance(message, kind)]

    @property
    def commands(self) -> list[Command]:
        return [message.command for _, message in self.of(Execute)]


def batch(name: str) -> EventBatch:
    return EventBatch(0.0, name.encode())


def config_of(*urls: str, ttl_s: float = 60.0, pool: str = "") -> Config:
    pools = [{"replicas": list(urls) or ["http://a:1"], "name": pool}]
    return load(None, {"pools": pools, "routing": {"ttl_s": ttl_s}, "workers": 2}, env={})


REPLICA_B, OTHER_B = (AddedReplica(url, "b:1") for url in ("http://b:1", "http://c:1"))


class Now:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def joined(made: Hub) -> tuple[int, End]:
    end = End()
    return made.join(end), end  # type: ignore[arg-type]


pytestmark = uncompiled


def test_a_newcomer_receives_the_past_in_its_order_between_its_welcome_and_now() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    first, end = joined(made)
    end.receives(batch("one"))
    end.receives(batch("two"))
    made.leave(first)
    made.command(Drain("a", on=True))
    _, late = joined(made)
    kinds = [(type(message), worker) for worker, message in late.sent]
    assert kinds == [(Welcome, 2), (Execute, 0), (EventBatch, first), (EventBatch, first), (Reset, first), (CatchUpEnd, 0)]
    assert late.of(EventBatch) == [(first, batch("one")), (first, batch("two"))]
    end.receives(batch("was on its way"))
    assert len(late.of(EventBatch)) == 2, "it has left"


def test_the_past_is_bounded_in_bytes_and_in_time() -> None:
    now = Now()
    size = MESSAGE_BYTES + len(encode(batch(f"{0:020}")))
    made = Hub(config_of(ttl_s=60), now, lambda _: None, history_bytes=5 * size + 1)
    _, end = joined(made)
    for number in range(50):
        end.receives(batch(f"{number:020}"))
        assert made.history.size == sum(MESSAGE_BYTES + len(kept) for _, kept in made.history.since(0)) <= 5 * size
    assert [int(message.events) for _, message in joined(made)[1].of(EventBatch)] == [45, 46, 47, 48, 49]
    now.time = 60.5
    end.receives(batch("new"))
    assert joined(made)[1].of(EventBatch) == [(1, batch("new"))]


def found(source: str, *names: str) -> Publish:
    members = tuple([SourceMember(name, f"http://{name}:1", "", None, draining=False, instance="") for name in names])
    return Publish(MEMBERS, encode(SourceMembers(source, members)))


def test_a_newcomer_receives_what_each_source_has_found_last_before_the_commands_about_it() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    first, end = joined(made)
    _, other = joined(made)
    end.receives(found("dns a", "x"))
    other.receives(found("dns b", "y"))
    made.command(Drain("x", on=True))
    end.receives(found("dns a", "x", "z"))
    made.leave(first)
    _, late = joined(made)
    assert [message for _, message in late.of(Publish)] == [found("dns b", "y"), found("dns a", "x", "z")]
    kinds = [type(message) for _, message in late.sent]
    assert max(at for at, kind in enumerate(kinds) if kind is Publish) < kinds.index(Execute)
    assert not other.of(Publish), "each worker that serves has sources of its own"


def test_what_sources_have_found_is_bounded_and_forgotten_with_them() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, end = joined(made)
    for number in range(3 * MAX_SOURCES):
        end.receives(found(f"file {number}"))
    kept = [decode_members(message.message).source for _, message in joined(made)[1].of(Publish)]
    assert kept == [f"file {number}" for number in range(2 * MAX_SOURCES - 1, 3 * MAX_SOURCES)]
    config = load(None, {"pools": [{}], "discovery": [{"file": f"{3 * MAX_SOURCES - 1}"}]}, env={})
    made.command(Reconfigure.to(config))
    assert [decode_members(message.message).source for _, message in joined(made)[1].of(Publish)] == [
        f"file {3 * MAX_SOURCES - 1}"
    ]


def test_only_the_last_command_on_each_matter_is_in_force() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, end = joined(made)
    done(made, end, Drain("a:1", on=True), Join("default", REPLICA_B), RejectConfig("no"), Drain("b:1", on=True))
    assert replayed(made) == [Join("default", REPLICA_B), Drain("a:1", on=True), Drain("b:1", on=True)]
    done(made, end, Drain("a:1", on=False))
    assert replayed(made) == [Join("default", REPLICA_B), Drain("b:1", on=True)], "as if it had never drained"
    done(made, end, Leave("b:1"))
    assert replayed(made) == []
    for number in range(MAX_DRAINS + 100):
        done(made, end, Drain(f"r{number}", on=True))
    assert len(replayed(made)) == MAX_DRAINS, "of names that are no more, too"


def test_additions_outlive_a_reload_unless_it_names_the_replica_or_has_its_pool_no_more() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, end = joined(made)
    done(made, end, Join("default", REPLICA_B), Drain("b:1", on=True), Drain("a:1", on=True), Drain("z", on=True))
    other = config_of(ttl_s=5)
    made.command(Reconfigure.to(other))
    who, late = joined(made)
    made.leave(who)
    added = [Join("default", REPLICA_B), Drain("b:1", on=True), Drain("a:1", on=True)]
    assert late.commands == [*added, Drain("z", on=True)], "z may be the member of a source"
    done(made, end, Drain("z", on=False))
    assert decode_config(WholeConfig, late.of(Welcome)[0][1].config) == other
    made.command(Reconfigure.to(config_of("http://a:1", "http://b:1")))
    assert replayed(made) == [Drain("b:1", on=True), Drain("a:1", on=True)], "b:1 is in the configuration now"
    made.command(Reconfigure.to(config_of()))
    assert replayed(made) == [Drain("a:1", on=True)]
    done(made, end, Join("default", REPLICA_B))
    made.command(Reconfigure.to(config_of(pool="other")))
    assert replayed(made) == [Drain("a:1", on=True)]


def done(made: Hub, end: End, *commands: Command) -> None:
    """The only worker has executed these commands."""
    for command in commands:
        made.command(command)
        answers(end, HUB, end.of(Execute)[-1][1].number)


# -- commands that are not executed everywhere yet


def asks(end: End, number: int, command: Command, until: float = 99.0) -> None:
    end.receives(Execute(number, command, until))


def answers(end: End, asker: int, number: int, error: str | None = None) -> None:
    end.receives(TopicAnswer(number, error=error), asker)


def replayed(made: Hub) -> list[Command]:
    """What a new worker would begin with."""
    who, end = joined(made)
    made.leave(who)
    return end.commands


def test_a_command_that_a_worker_refused_is_not_for_its_successor() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    (first, one), (second, two) = joined(made), joined(made)
    asks(one, 1, Join("default", REPLICA_B))
    asks(two, 1, Join("default", OTHER_B))
    assert replayed(made) == [Join("default", REPLICA_B), Join("default", OTHER_B)], (
        "a worker that starts now executes what the others do"
    )
    for end in (one, two):
        answers(end, first, 1)
        answers(end, second, 1, "listed twice")
    made.leave(first)
    assert replayed(made) == [Join("default", REPLICA_B)]
    assert two.of(TopicAnswer)[1:] == [(worker, TopicAnswer(1, error="listed twice")) for worker in (first, second)], (
        "answers reach the asker"
    )


def test_a_worker_that_ends_without_an_answer_is_not_waited_for() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    (first, one), (second, two) = joined(made), joined(made)
    asks(one, 1, Drain("a:1", on=True))
    asks(one, 2, Join("default", REPLICA_B))
    answers(two, first, 1)
    answers(two, first, 2)
    assert repr(made._commands) == "<CommandLog: 0 in force, 2 pending>"
    made.leave(first)
    assert repr(made._commands) == "<CommandLog: 2 in force, 0 pending>"
    asks(two, 1, Join("default", OTHER_B))
    made.leave(second)
    in_force = [Join("default", REPLICA_B), Drain("a:1", on=True)]
    third, three = joined(made)
    assert three.commands == [*in_force, Join("default", OTHER_B)], "what no worker has answered is asked of the next one"
    three.receives(TopicAnswer(1, error="its name is taken"), second)
    made.leave(third)
    assert replayed(made) == in_force, "the first of that name stays"


def test_the_drain_of_a_replica_ends_when_a_reload_drops_it_and_not_while_it_is_being_added() -> None:
    made = Hub(config_of("http://a:1", "http://c:1"), Now(), lambda _: None)
    _, one = joined(made)
    done(made, one, Drain("c:1", on=True))
    asks(one, 1, Join("default", REPLICA_B))
    asks(one, 2, Drain("b:1", on=True))
    made.command(Reconfigure.to(config_of()))
    assert replayed(made) == [Join("default", REPLICA_B), Drain("b:1", on=True)]
    made.command(Reconfigure.to(config_of("http://a:1", "http://c:1")))
    assert Drain("c:1", on=True) not in replayed(made)


def test_a_drain_ends_with_its_replica_whichever_way_that_leaves_and_comes_back() -> None:
    made = Hub(config_of("http://a:1", "http://c:1"), Now(), lambda _: None)
    _, one = joined(made)
    done(made, one, Join("default", REPLICA_B), Leave("b:1"), Drain("b:1", on=True), Join("default", REPLICA_B))
    assert replayed(made) == [Join("default", REPLICA_B)], "it was drained while it was leaving"
    made.command(Reconfigure.to(config_of("http://a:1")))
    done(made, one, Drain("c:1", on=True), Drain("a:1", on=True))
    made.command(Reconfigure.to(config_of("http://a:1", "http://c:1")))
    assert replayed(made) == [Join("default", REPLICA_B), Drain("a:1", on=True)], "so was this"
    other = load(None, {"pools": [{"replicas": [{"url": "http://z:1", "name": "a:1"}]}], "workers": 2}, env={})
    made.command(Reconfigure.to(other))
    assert replayed(made) == [Join("default", REPLICA_B)], "another URL is another replica"


def test_a_pending_addition_is_over_when_a_reload_names_its_replica() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    first, one = joined(made)
    asks(one, 1, Join("default", REPLICA_B))
    asks(one, 2, Leave("b:1"))
    made.command(Reconfigure.to(config_of("http://a:1", "http://b:1")))
    answers(one, first, 1)
    answers(one, first, 2)
    assert replayed(made) == []


def test_a_command_that_is_read_too_late_is_ignored() -> None:
    now = Now()
    made = Hub(config_of(), now, lambda _: None)
    _, one = joined(made)
    now.time = 5.0
    asks(one, 1, Drain("a:1", on=True), until=4.0)
    assert one.of(Execute) == one.of(TopicAnswer) == replayed(made) == []


def test_commands_without_an_answer_are_bounded() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, one = joined(made)
    for number in range(MAX_PENDING + 500):
        asks(one, number, Drain(f"r{number}", on=True))
    assert len(replayed(made)) == len(one.of(TopicAnswer)) == MAX_PENDING
    made.command(Reconfigure.to(config_of(ttl_s=5)))
    assert made.config.routing.ttl_s == 5, "a new configuration is not one of them"
    assert one.commands[-1] == Reconfigure.to(config_of(ttl_s=5))


def test_a_worker_that_sends_nothing_for_long_is_silent() -> None:
    now = Now()
    made = Hub(config_of(), now, lambda _: None)
    first, end = joined(made)
    second, _ = joined(made)
    now.time = 20.0
    end.receives(Heartbeat())
    now.time = 40.0
    assert list(made.silent(30.0, 30.0)) == [second]
    assert not list(made.silent(30.0, 300.0)), "its start takes long"
    end.receives(Heartbeat("serving"))
    end.receives(Heartbeat())
    assert (list(made.healthy(1.0)), list(made.unhealthy(2.0))) == ([first], [second])
    now.time = 45.0
    assert (list(made.healthy(1.0)), list(made.unhealthy(2.0))) == ([], [first, second])
    made.excuse_pause(5.0)  # the supervisor was stopped
    assert (list(made.healthy(1.0)), list(made.unhealthy(2.0)), list(made.silent(30.0, 30.0))) == ([first], [second], [second])
    assert repr(made) == f"<Hub of {first}, {second}, <History of 0 messages, 0 bytes>>"
    end.receives(Heartbeat())  # what has waited is read before the supervisor sees how long it was stopped
    made.excuse_pause(3600.0)
    now.time += 31.0
    assert first in made.silent(30.0, 30.0), "no worker's last message is in the future"


# -- counters of what has left


def counted(*replicas: str) -> Publish:
    """Of a worker with these replicas, each of which has answered one request."""
    metrics = new_metrics()
    for replica in replicas:
        metrics.replica_up.set((replica,), 1)
        metrics.completion_tokens.add(("m", replica))
    return Publish(COUNTERS, packed(metrics.instruments))


def test_what_ended_workers_counted_of_a_replica_is_kept_as_long_as_a_living_worker_counts_for_it() -> None:
    made = Hub(config_of("http://a:1", "http://gone"), Now(), lambda _: None)
    (first, one), (second, two), (_, three) = joined(made), joined(made), joined(made)
    for end in (one, two, three):
        end.receives(Heartbeat("serving"))
    made.command(Reconfigure.to(config_of()))
    one.receives(counted("gone", "a:1"))
    two.receives(counted("gone", "a:1"))
    made.leave(first)
    assert made.ended.completion_tokens.values == {("m", "gone"): 1, ("m", "a:1"): 1}, "one has not reported yet"
    three.receives(counted("a:1"))
    made.leave(second)
    assert made.ended.completion_tokens.values == {("m", "a:1"): 2}


def test_what_ended_workers_counted_of_a_replica_is_forgotten_without_another_end() -> None:
    now = Now()
    made = Hub(config_of("http://a:1", "http://gone"), now, lambda _: None)
    (first, one), (_, two) = joined(made), joined(made)
    for end in (one, two):
        end.receives(Heartbeat("serving"))
        end.receives(counted("gone", "a:1"))
    made.leave(first)
    made.command(Reconfigure.to(config_of()))
    made.sweep()
    assert ("m", "gone") in made.ended.completion_tokens.values, "a living worker counts for it"
    two.receives(counted("a:1"))
    now.time += SWEEP_S
    made.sweep()
    assert made.ended.completion_tokens.values == {("m", "a:1"): 1}


def test_a_worker_that_does_not_know_all_replicas_yet_keeps_their_counters() -> None:
    """What it reports before it serves lacks the replicas that operators have added."""
    now = Now()
    made = Hub(config_of("http://a:1", "http://gone"), now, lambda _: None)
    (first, one), (_, two) = joined(made), joined(made)
    made.command(Reconfigure.to(config_of()))
    one.receives(Heartbeat("serving"))
    one.receives(counted("added", "a:1"))
    two.receives(counted("a:1"))
    made.leave(first)
    assert ("m", "added") in made.ended.completion_tokens.values
    two.receives(Heartbeat("serving"))
    now.time += SWEEP_S
    made.sweep()
    assert ("m", "added") in made.ended.completion_tokens.values, "its counters are from before"
    two.receives(counted("a:1"))
    now.time += SWEEP_S
    made.sweep()
    assert ("m", "added") not in made.ended.completion_tokens.values


def test_a_worker_that_was_stopped_before_it_served_does_not_count_as_serving() -> None:
    """Its last step towards serving comes after its first one towards the end."""
    now, served = Now(), list[int]()
    made = Hub(config_of(), now, served.append)
    (first, one), (second, two) = joined(made), joined(made)
    one.receives(Heartbeat("stopping"))
    one.receives(Heartbeat("serving"))
    two.receives(Heartbeat("serving"))
    now.time += 3
    one.receives(Heartbeat())
    two.receives(Heartbeat())
    assert (served, list(made.healthy(2)), list(made.unhealthy(2))) == ([second], [second], [first])


def test_what_the_workers_refuse_by_one_configuration_a_new_one_does_not_take_by_the_next() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, one = joined(made)
    made.command(Reconfigure.to(config_of(REPLICA_B.url)))
    asks(one, 1, Join("default", REPLICA_B))  # it has not executed the other one yet, else it would have refused itself
    made.command(Reconfigure.to(config_of()))
    assert replayed(made) == []


def test_a_reload_brings_no_drain_back_of_a_replica_that_was_removed_or_added_since() -> None:
    """All that waits is answered but an addition whose first probe hangs: nothing behind that is in force yet."""
    made = Hub(config_of(), Now(), lambda _: None)
    _, one = joined(made)
    done(made, one, Join("default", REPLICA_B), Drain("b:1", on=True), Drain("c:1", on=True))
    asks(one, 50, Join("default", AddedReplica("http://slow:1", "slow")))
    asks(one, 51, Leave("b:1"))
    asks(one, 52, Join("default", AddedReplica("http://c:1", "c:1")))
    for number in (51, 52):
        answers(one, 1, number)
    made.command(Reconfigure.to(config_of("http://b:1", "http://c:1")))
    assert replayed(made) == [Join("default", AddedReplica("http://slow:1", "slow"))]


def test_additions_for_which_a_configuration_leaves_no_room_are_forgotten() -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    _, one = joined(made)
    joins = [Join("default", AddedReplica(f"http://{name}:1", name)) for name in ("x", "y")]
    for join in joins:
        done(made, one, join)
    made.command(Reconfigure.to(config_of(*[f"http://r{number}:1" for number in range(MAX_REPLICAS - 1)])))
    made.command(Reconfigure.to(config_of()))
    assert replayed(made) == joins[:1], "the oldest stays"


def test_what_a_scrape_showed_stays_in_the_sum_when_its_worker_ends() -> None:
    made = Hub(config_of("http://a:1"), Now(), lambda _: None)
    (first, one), (second, two) = joined(made), joined(made)
    two.receives(Ask(7, COUNTERS))
    one.receives(counted())
    one.receives(TopicAnswer(7, counted("a:1").message, COUNTERS), second)
    made.leave(first)
    assert made.ended.completion_tokens.values == {("m", "a:1"): 1}
    assert two.of(TopicAnswer)[-1] == (first, TopicAnswer(7, counted("a:1").message, COUNTERS))


# -- what does not decode


def test_counters_that_do_not_decode_are_lost_and_nothing_else_is(caplog: pytest.LogCaptureFixture) -> None:
    made = Hub(config_of(), Now(), lambda _: None)
    (first, one), (second, two), (third, three) = joined(made), joined(made), joined(made)
    metrics = new_metrics()
    metrics.requests.add(("m", "other", "200"))
    one.receives(Publish(COUNTERS, b"junk"))
    two.receives(Publish(COUNTERS, packed(metrics.instruments)))
    made.leave(first)
    assert "counters are lost" in caplog.text
    made.leave(second)
    assert made.ended.requests.values[("m", "other", "200")] == 1
    assert [worker for worker, _ in three.of(Reset)] == [first, second]
    assert list(made.workers) == [third]


class Sink:
    """Stands in for a socket's transport."""

    def __init__(self) -> None:
        self.aborted = False

    def write(self, data: bytes) -> None:
        length, _ = HEAD.unpack_from(data)
        assert len(data) == HEAD.size + length
        from_hub(data[HEAD.size :])

    def abort(self) -> None:
        self.aborted = True

    close = abort


commands = st.one_of(
    st.builds(Drain, st.text(max_size=5), st.booleans()),
    st.builds(Reconfigure, st.binary(max_size=40)),
    st.just(Reconfigure.to(config_of(ttl_s=5))),
    st.builds(RejectConfig, st.text(max_size=5)),
    st.builds(Join, st.text(max_size=5), st.just(REPLICA_B)),
    st.builds(Leave, st.text(max_size=5) | st.just("b:1")),
)
executes = st.builds(Execute, st.integers(-(2**63), 2**63), commands, st.floats())


payloads = st.binary(max_size=60) | messages.map(encode) | executes.map(encode)


@given(st.lists(st.tuples(st.integers(0, 3), payloads), max_size=20))
def test_no_bytes_of_a_worker_harm_the_hub_or_another_worker(sent: list[tuple[int, bytes]]) -> None:
    """Frames of any content, of two workers in turns: each is obeyed, or ends the channel that it came by."""
    made = Hub(config_of(), Now(), lambda _: None)
    ends = [Channel(from_worker), Channel(from_worker)]
    sinks = [Sink(), Sink()]
    for end, sink in zip(ends, sinks, strict=True):
        end.connection_made(sink)  # type: ignore[arg-type]
        made.join(end)
    for number, (to, payload) in enumerate(sent):
        ends[number % 2].data_received(framed(payload, to))
    for end, sink in zip(ends, sinks, strict=True):
        assert sink.aborted == (end.error is not None)
    for worker in list(made.workers):
        made.leave(worker)
    _, late = joined(made)
    assert isinstance(late.sent[0][1], Welcome)
    assert late.of(CatchUpEnd)


def test_a_configuration_survives_the_way_to_a_worker_unchanged() -> None:
    raw: dict[str, Any] = {
        "pools": [
            {
                "replicas": [{"url": "http://A:1/", "name": "a", "capacity_tokens": 7}, "http://b:2"],
                "models": ["m", "*"],
                "max_queue": 0,
                "queue_s": 2.5,
                "resume_streams": True,
            }
        ],
        "prices": {"*": {"input": 1, "output": 2.5}, "m": {"input": 1, "output": 2, "cached_input": 0.5}},
        "routing": {"policy": "sticky", "isolation": "tenant", "ttl_s": 1e-3},
        "admin_listen": "unix:/tmp/a",
        "workers": 3,
        "admin_key": "secret",
    }
    config = load(None, raw, env={})
    made = Hub(config, Now(), lambda _: None)
    sent = decode_config(WholeConfig, joined(made)[1].of(Welcome)[0][1].config)
    assert sent == config
    assert (type(sent), type(sent.pools[0].replicas[0]), sent.pools) == (WholeConfig, ReplicaConfig, config.pools)
    assert Reconfigure.to(config).config(WholeConfig) == config
