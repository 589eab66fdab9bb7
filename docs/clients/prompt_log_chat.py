"""A chat that sends only its new turns, and survives a lost answer, a purged store and a second device. Copy it with
prompt_log.py; standard library only. The messages stay the client's: what the gateway keeps is a cache of them.
"""

import json
import re
import urllib.error
import urllib.request

import prompt_log

EMPTY = prompt_log.head([])


def told(header):
    """{"head": "pl1_...", "length": 42, "kept": True} of an answer's header Prompt-Log."""
    members = re.findall(r'([a-z]+)(?:=("[^"]*"|\?[01]|\d+))?(?:, |$)', header)
    return {name: value in ("", "?1") if value in ("", "?0", "?1") else json.loads(value) for name, value in members}


class Chat:
    """messages: the whole conversation. head: its name at the gateway, "": none. ref: a name that devices share."""

    def __init__(self, url, key, model, ref):
        self.url, self.key, self.model, self.ref = url, key, model, ref
        self.messages, self.head = [], ""

    def call(self, method, path, body=None, header="name"):
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "Prompt-Log": header}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer), told(answer.headers.get("Prompt-Log", ""))

    def say(self, text):
        """Adds a turn and its answer. False: another device has moved the ref, so `merge` comes next."""
        turn, wishes = {"role": "user", "content": text}, f'keep, ref="{self.ref}"'
        try:
            if not self.head:
                raise LookupError
            body = {"model": self.model, "messages": [turn]}
            answer, names = self.call("POST", "/v1/chat/completions", body, f'{wishes}, base="{self.head}"')
        except (LookupError, urllib.error.HTTPError):  # 404, 410: the gateway has forgotten it; 503: its store does not answer
            body = {"model": self.model, "messages": [*self.messages, turn]}
            answer, names = self.call("POST", "/v1/chat/completions", body, wishes)
        self.messages += [turn, answer["choices"][0]["message"]]
        self.head = names["head"] if names["kept"] else ""
        return names["ref"]

    def recover(self, text):
        """After a broken connection: takes the answer to this turn, if it was kept. False: say it again."""
        turn = {"role": "user", "content": text}
        given = prompt_log.head([*self.messages, turn])
        try:
            self.head = self.call("GET", f"/v1/logs/{given}")[0]["children"][0]["head"]
        except (LookupError, urllib.error.HTTPError):
            return False
        self.messages += [turn, *messages_of(self.entries(self.head, given))]
        return True

    def merge(self):
        """Puts what this device has said since their common head after what the other one has."""
        theirs = self.call("GET", f"/v1/logs/refs/{self.ref}")[0]["head"]
        known = {EMPTY, *(entry["head"] for entry in self.entries(theirs))}
        common = [head for head in [EMPTY, *(entry["head"] for entry in self.entries(self.head))] if head in known]
        body = {"form": "chat", "base": theirs, "ref": self.ref, "copy": {"from": self.head, "since": common[-1]}}
        self.head = theirs if common[-1] == self.head else self.call("POST", "/v1/logs", body)[0]["head"]
        self.messages = messages_of(self.entries(self.head))

    def entries(self, head, since=EMPTY):
        """The entries of a log after a head."""
        found, more = [], True
        while more:
            page = self.call("GET", f"/v1/logs/{head}/entries?since={since}")[0]
            found, more, since = found + page["entries"], page["more"], page["entries"][-1]["head"]
        return found


def messages_of(entries):
    return [message for entry in entries for message in entry["body"]]
