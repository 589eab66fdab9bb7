"""Replication over the workers' hub, which broadcasts each batch to all other workers in one order."""

from __future__ import annotations

from gateway.cluster.messages import EventBatch, Reset, Want
from gateway.cluster.replication import Subscriber
from gateway.features.workers.channel import Channel
from gateway.features.workers.messages import Message


class HubTransport:
    """A worker's `ReplicationTransport`. The reader of the worker's channel is to call `receive` with each message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._subscriber: Subscriber | None = None

    @property
    def unsent(self) -> int:
        return self._channel.unsent

    def publish(self, batch: EventBatch) -> None:
        self._channel.send(batch)

    def snapshot(self, batch: EventBatch) -> None:
        self._channel.send(Reset())
        self._channel.send(batch)

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def receive(self, worker: int, message: Message) -> None:
        """Handles a message from the hub if it concerns replication."""
        subscriber = self._subscriber
        if subscriber is None:
            return
        match message:
            case EventBatch():
                subscriber.receive(worker, message)
            case Reset():
                subscriber.leave(worker)
            case Want():
                subscriber.join()
