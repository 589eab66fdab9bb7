"""Runs a workflow at a Warmroute gateway. Copy it; standard library only.

for kind, data in events("http://127.0.0.1:8000", "panel", {"messages": [{"role": "user", "content": "Hello"}]}):
    if kind == "output.delta":
        print(data["text"], end="", flush=True)
"""

import json
import urllib.error
import urllib.request

SILENCE_S = 30  # the gateway sends a comment every 10 s


class RunError(Exception):
    """The gateway has refused the run, or it has not completed. error: the object that says why."""

    def __init__(self, error):
        super().__init__(error.get("message") or str(error))
        self.error = error


def events(url, workflow, inputs, key="", **members):
    """Yields the kind and the data of each event, the last one `run.completed`. A loop that is left cancels the run. workflow:
    a name or a document. members: further ones of the request, such as limits={"seconds": 60}. Raises RunError.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    body = json.dumps({"workflow": workflow, "inputs": inputs, "stream": True, **members}).encode()
    request, kind, data = urllib.request.Request(f"{url}/v1/workflows/runs", body, headers), "", {}
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_S) as answer:
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    data = json.loads(value)
                    yield kind, data
    except urllib.error.HTTPError as refusal:
        raise RunError(json.loads(refusal.read())["error"]) from None
    if kind != "run.completed":
        raise RunError(data.get("error") or data.get("incomplete_details") or {"message": f"the run ended with {kind!r}"})


def outputs(url, workflow, inputs, key="", **members):
    """The outputs of a run, by name. Raises RunError."""
    *_, (_, run) = events(url, workflow, inputs, key, **members)
    return run["outputs"]
