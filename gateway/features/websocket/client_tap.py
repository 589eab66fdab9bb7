"""Reads the messages of a realtime client with a key: the models that they name, and whether an answer is wanted. Pure.

    frames ──► messages up to MAX_EVENT bytes, unmasked ──► models in `session`, `response` and beside them; `response.create`

A longer message, of sound, is only searched, and so is a message that is no JSON to the gateway: engines read more (1e999,
deep nesting, UTF-16): if it may name a model, and the key is for some models only or has a budget, it is refused. So is a
compressed message, because no extension was offered. A key with a budget pays the price of the handshake's model, and so it
names no other one for its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from gateway.accounting.consumed import BYTES_PER_TOKEN
from gateway.dialects.lenient import read_json
from gateway.errors import GatewayError
from gateway.features.websocket.boundaries import CONTROLS, FrameTap
from gateway.features.websocket.frames import unmasked
from gateway.features.websocket.usage_tap import MAX_EVENT
from gateway.request.rights import Rights

_WANTED: Final = b'response.create"'
_HOLDERS: Final = ("session", "response")
_NAME: Final = b'"model"'  # with the quotes, which sound in base64 does not have
_ESCAPE: Final = b"\\u006"  # the beginning of each letter of the name, as an escape
_SOUND: Final = b'audio"'
_FINAL, _RESERVED, _OPCODE, _MASKED = 0x80, 0x70, 0x0F, 0x80


class ClientTap(FrameTap):
    """One session. messages: called for each frame of a message. grant: of the client's key. model: of the handshake. wanted:
    the client has asked for an answer. tokens: estimated, of the text that it has sent.
    """

    def __init__(self, messages: Callable[[], None], grant: Rights, model: str) -> None:
        self.wanted = False
        self._sent = 0  # bytes of text
        self._messages = messages
        self._grant = grant
        self._model = model
        self._left = 0  # outstanding bytes of the current frame
        self._reading = self._final = False
        self._mask = b""
        self._held = bytearray()
        self._size = 0  # of the message so far
        self._long = self._sound = False  # the message is not held any more, but for its last bytes; it has sound

    @property
    def tokens(self) -> int:
        return self._sent // BYTES_PER_TOKEN

    def frame(self, first: int, second: int, length: int, data: bytes, begin: int, end: int) -> None:
        self._left = length - (end - begin)
        opcode = first & _OPCODE
        self._reading = opcode < CONTROLS
        if not self._reading:
            return
        self._messages()
        if opcode:  # a message begins
            self._held, self._size, self._long, self._sound = bytearray(), 0, False, False
        if first & _RESERVED:
            self._refuse_unreadable()
        self._mask = data[begin - 4 : begin] if second & _MASKED else bytes(4)
        self._final = bool(first & _FINAL)
        self._piece(data[begin:end])

    def more(self, data: bytes, end: int) -> None:
        self._left -= end
        if self._reading and end:
            self._piece(data[:end])

    def lost(self) -> None:
        self._reading = False
        self._refuse_unreadable()

    def answered(self) -> None:
        """An answer is complete: its prompt is in the engine's count."""
        self.wanted, self._sent = False, 0

    def _piece(self, data: bytes) -> None:
        self._held += unmasked(data, self._mask)
        self._size += len(data)
        turn = len(data) % 4
        self._mask = self._mask[turn:] + self._mask[:turn]
        if self._long or len(self._held) > MAX_EVENT:
            self._long = True
            self._search(self._held)
            del self._held[: 1 - len(_WANTED)]
        if self._final and not self._left:
            self._reading = False
            if not self._long:
                held, self._held = bytes(self._held), bytearray()
                self._read(held)
            if not self._sound:
                self._sent += self._size

    def _read(self, message: bytes) -> None:
        """Reads a complete message. Raises GatewayError 403."""
        try:
            event = read_json(message)
        except ValueError:
            self._sound = True  # mostly
            self._search(message.replace(b"\0", b""))  # without the zeros of UTF-16 and UTF-32
            return
        if not isinstance(event, dict):
            return
        self.wanted, self._sound = self.wanted or event.get("type") == "response.create", _SOUND in message
        if self._grant.models:
            for model in models_in(event):
                self._grant.require_model(model)
        if self._grant.priced:
            for holder in (event, *map(event.get, _HOLDERS)):
                self._require_price(holder)

    def _require_price(self, holder: Any) -> None:
        named = holder.get("model") if isinstance(holder, dict) else None
        if isinstance(named, str) and named != self._model:
            wanted = f"?model={self._model[:100]}" if self._model else "?model=NAME"
            text = (
                f"The key has a budget, so a session may use only the model of its handshake ({wanted}), whose price it has,"
                f" and not {named[:100]!r}."
            )
            raise GatewayError(403, "model_not_priced", text, param="model")

    def _search(self, unread: bytes | bytearray) -> None:
        """Searches a part of a message that cannot be read. Raises GatewayError 403 if it may name a model."""
        self.wanted, self._sound = self.wanted or _WANTED in unread, self._sound or _SOUND in unread
        if _NAME in unread or _ESCAPE in unread:
            self._refuse_unreadable()

    def _refuse_unreadable(self) -> None:
        if self._grant.models or self._grant.priced:
            text = (
                "The key is for some models only or has a budget, and this message, which is compressed, no JSON, or has more"
                f" than {MAX_EVENT} bytes, may name another model."
            )
            raise GatewayError(403, "model_not_allowed", text, param="model")

    def __repr__(self) -> str:
        return f"<ClientTap {'waits for an answer' if self.wanted else 'idle'}, {len(self._held)} bytes held>"


def models_in(event: dict[str, Any]) -> Iterator[str]:
    """The models that an event names, for its answers or for a part of its work, such as transcription. O(its values)."""
    if isinstance(name := event.get("model"), str):
        yield name
    left = [event.get(holder) for holder in _HOLDERS]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(name := value.get("model"), str):
                yield name
            left += value.values()
        elif isinstance(value, list):
            left += value
