"""Names of a conversation (prompt-log/1), for clients of chat completions: copy this file. `head(messages)` is `input` in the
header Prompt-Log. Texts, reasoning and calls are named; anything else raises ValueError: send it without `expect`.
"""

import base64
import hashlib
import json

LOG, ENTRY = b"prompt-log/1 log\n", b"prompt-log/1 entry\n"
READ = {"role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "id"}


def jcs(value):
    """Canonical JSON (RFC 8785), but for numbers that need all of its rules."""
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda member: member[0].encode("utf-16-be"))
        return "{" + ",".join(jcs(name) + ":" + jcs(member) for name, member in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(jcs, value)) + "]"
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, int | float) and value and not 1e-4 <= abs(value) < 2**53:
        raise ValueError("a number that needs all of RFC 8785")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parsed(arguments):
    try:
        return json.loads(arguments, parse_constant=int)  # int refuses NaN and the like, which are no JSON
    except ValueError:
        return arguments


def entry(message, open_calls):
    """The canonical entry of a message. open_calls: ids of the calls without a result, the oldest first."""
    content, id_, of = message.get("content") or [], message.get("tool_call_id"), 0
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    more = [name for name, value in message.items() if value not in (None, []) and name not in READ]
    calls = message.get("tool_calls") or []
    if more or any(part.keys() != {"type", "text"} for part in content) or any("function" not in call for call in calls):
        raise ValueError(f"something that is not named here: {more or 'a part of the content, or a custom call'}")
    if message["role"] == "tool" and open_calls:
        of = open_calls.index(id_) if id_ in open_calls else 0
        del open_calls[of]
    open_calls += [call.get("id") for call in calls]
    made = {"role": message["role"].replace("developer", "system"), "of": of}
    made["content"] = [{"text": part["text"]} for part in content if part["text"]]
    made["reasoning"] = message.get("reasoning") or message.get("reasoning_content")
    made["calls"] = [{"name": call["function"]["name"], "arguments": parsed(call["function"]["arguments"])} for call in calls]
    return {name: value for name, value in made.items() if value}


def head(messages):
    """The head of the log. Leading texts of the system are in the frame, not in the log."""
    chain, open_calls = hashlib.sha256(LOG).digest(), []
    entries = [entry(message, open_calls) for message in messages]
    while entries and entries[0]["role"] == "system" and entries[0].keys() <= {"role", "content"}:
        del entries[0]
    for each in entries:
        chain = hashlib.sha256(LOG + chain + hashlib.sha256(ENTRY + jcs(each).encode()).digest()).digest()
    return "pl1_" + base64.urlsafe_b64encode(chain).decode().rstrip("=")
