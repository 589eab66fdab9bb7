"""Topics: questions and messages between the processes of this gateway, each for one part of the program.

A part registers its functions for its topic before the control plane is made:

    answers(topic, f)     f(question) -> answer    `ControlPlane.ask` returns the answers of all processes
    receives(topic, f)    f(sender, message)       `ControlPlane.publish` sends a message to the other processes
    executes(topic, f)    f(argument)              the command `Perform`: all processes execute it, in order with other commands
    follows(f, g)         f(), g(process)          a process has joined, a process has ended

Questions, answers and messages are bytes, which the part encodes and decodes itself: it raises MessageError for invalid ones.
Functions are synchronous, except for commands, and should be quick, because requests wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from gateway.cluster.messages import MessageError

log = logging.getLogger("warmroute.workers")


class Topics:
    """The registry of one process."""

    def __init__(self) -> None:
        self._answers: dict[str, Callable[[bytes], bytes]] = {}
        self._receives: dict[str, Callable[[int, bytes], None]] = {}
        self._executes: dict[str, Callable[[bytes], Awaitable[None]]] = {}
        self._follows: list[tuple[Callable[[], None], Callable[[int], None]]] = []

    def answers(self, topic: str, answer: Callable[[bytes], bytes]) -> None:
        self._answers[topic] = answer

    def receives(self, topic: str, receive: Callable[[int, bytes], None]) -> None:
        self._receives[topic] = receive

    def executes(self, topic: str, execute: Callable[[bytes], Awaitable[None]]) -> None:
        """execute: may raise ConfigError."""
        self._executes[topic] = execute

    def follows(self, joined: Callable[[], None], ended: Callable[[int], None]) -> None:
        self._follows.append((joined, ended))

    # -- the control plane's side

    def has_answer(self, topic: str) -> bool:
        return topic in self._answers

    def answer(self, topic: str, question: bytes) -> bytes:
        """The answer; b"" if this process does not know the topic, or does not understand the question."""
        try:
            return self._answers[topic](question) if topic in self._answers else b""
        except MessageError as error:
            log.error("a question of another process is not answered", extra={"topic": topic, "error": str(error)})
        except Exception:  # a bug in one part must not end the connection of all parts
            log.exception("a question of another process is not answered", extra={"topic": topic})
        return b""

    def receive(self, topic: str, sender: int, message: bytes) -> None:
        """Deliver a message. Unknown topics are ignored."""
        try:
            if topic in self._receives:
                self._receives[topic](sender, message)
        except MessageError as error:
            log.error("a message of another process is ignored", extra={"topic": topic, "error": str(error)})
        except Exception:  # likewise
            log.exception("a message of another process is ignored", extra={"topic": topic})

    async def execute(self, topic: str, argument: bytes) -> None:
        """Execute a command. Nothing happens if the topic is unknown. Raises ConfigError."""
        if topic in self._executes:
            await self._executes[topic](argument)

    def joined(self) -> None:
        for joined, _ in self._follows:
            joined()

    def ended(self, process: int) -> None:
        for _, ended in self._follows:
            ended(process)

    def __repr__(self) -> str:
        return f"<Topics: {', '.join(sorted({*self._answers, *self._receives, *self._executes})) or 'none'}>"
