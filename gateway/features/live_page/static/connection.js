// Requests to the gateway, with the operator's key if it wants one, and the stream of events.
//
// The key is kept for this tab only (sessionStorage), and goes out as a header only: it is in no URL. An EventSource cannot send
// headers, so the stream is read by fetch.

const KEY = "warmroute-key";
const RETRY_S = [1, 2, 4, 8];
const SILENT_MS = 10_000; // there is an event each second: a gateway that is silent is frozen, or gone without a word
const MOST_CHARS = 16 << 20; // of one event

/** The gateway's answer to a request that it refuses. */
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(given) {
  try {
    if (given) sessionStorage.setItem(KEY, given);
    else sessionStorage.removeItem(KEY);
  } catch {
    memory = given;
  }
}

let memory = ""; // where the browser keeps nothing

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

function headers(more) {
  return key() ? { ...more, Authorization: `Bearer ${key()}` } : more;
}

async function refusal(answer) {
  let message = `The gateway has answered ${answer.status}.`;
  let code = "";
  try {
    const { error } = await answer.json();
    message = error.message ?? message;
    code = error.code ?? "";
  } catch {
    // not the gateway's own error: a proxy's, perhaps
  }
  return new Refused(answer.status, code, message);
}

/** GET, or `method` with a JSON body. path: below /warmroute/. Throws Refused, or TypeError: no connection. */
export async function call(path, { method = "GET", body } = {}) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const answer = await fetch(`../${path}`, { method, headers: headers({ "Content-Type": "application/json" }), ...sent });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

/** Events of the gateway, until the returned function is called. onState: "live"; "lost", with the gateway's reason if it has given one; or a
 * Refused, after which nothing is tried again. */
export function follow(onEvent, onState) {
  const stop = new AbortController();
  let failures = 0;
  let attempt = new AbortController();
  let watchdog = 0;
  const watch = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => attempt.abort(), SILENT_MS);
  };
  stop.signal.addEventListener("abort", () => attempt.abort());
  const received = (name, data) => {
    failures = 0;
    watch();
    onEvent(name, data);
  };
  (async () => {
    while (!stop.signal.aborted) {
      let why = "";
      attempt = new AbortController();
      watch();
      try {
        const answer = await fetch("../live/events", { headers: headers({}), signal: attempt.signal, cache: "no-store" });
        if (!answer.ok) throw await refusal(answer);
        onState("live");
        await read(answer.body, received);
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          onState(error);
          return;
        }
        if (error instanceof Refused) why = error.message;
      } finally {
        clearTimeout(watchdog);
      }
      onState("lost", why);
      const wait = RETRY_S[Math.min(failures, RETRY_S.length - 1)] * (0.75 + Math.random() / 2);
      failures += 1;
      await new Promise((done) => setTimeout(done, wait * 1000));
    }
  })();
  return () => stop.abort();
}

async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    if (rest.length > MOST_CHARS) throw new Error("an event without an end");
    for (const event of events) {
      const lines = event.split("\n");
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (name && data) onEvent(name, JSON.parse(data));
    }
  }
}
