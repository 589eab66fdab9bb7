"""Reading fields of a JSON body, and the errors that say which one is wrong, what was expected, and so what to do."""

from collections.abc import Mapping
from typing import Any

import orjson


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape. `retry_after_s` tells when to come again, where that helps."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = status, message, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def read_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, not {kind_of(body)}.")
    return body


def number(body: Mapping[str, Any], name: str, default: float, bounds: tuple[float, float]) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:
        raise ApiError(400, f"{name} must be a number from {bounds[0]:g} to {bounds[1]:g}, got {value!r}.", name)
    return float(value)


def integer(body: Mapping[str, Any], name: str, bounds: tuple[int, int] | None = None) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise ApiError(400, f"{name} must be an integer, not {kind_of(value)}.", name)
    if value is not None and bounds and not bounds[0] <= value <= bounds[1]:
        raise ApiError(400, f"{name} must be an integer from {bounds[0]} to {bounds[1]}, got {value}.", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise ApiError(400, f"{name} must be true or false, not {kind_of(value)}.", name)


def list_or_none(body: Mapping[str, Any], name: str) -> list[Any] | None:
    value = body.get(name)
    if value is None or isinstance(value, list):
        return value or None
    raise ApiError(400, f"{name} must be a list, not {kind_of(value)}.", name)


def token_ids(body: Mapping[str, Any], name: str) -> list[int]:
    value = body.get(name)
    if value is None:
        return []
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ApiError(400, f"{name} must be a list of token ids (integers).", name)


def kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
