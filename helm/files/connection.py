"""`helm test`: connection.py URL request|no-request [MODEL]. Is the gateway alive and ready, and is a request answered?"""

import json
import os
import sys
import urllib.error
import urllib.request


def ask(url, body=None):
    """The answer's body. Ends the program where there is none, with what was answered."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        sys.exit(f"FAILED {url}: {error.code} {error.read(2000).decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"FAILED {url}: {error}")
    print(f"ok {url}", flush=True)
    return text


base, wanted, *model = sys.argv[1:]
ask(f"{base}/health")
ask(f"{base}/ready")
models = model or [each["id"] for each in json.loads(ask(f"{base}/v1/models"))["data"]]
if wanted == "request":
    if not models:
        sys.exit("FAILED: the gateway lists no model; name one in tests.model")
    message = {"role": "user", "content": "Hello"}
    chat = ask(f"{base}/v1/chat/completions", {"model": models[0], "max_tokens": 1, "messages": [message]})
    print(f"{models[0]} has answered: {chat[:500].decode(errors='replace')}")
