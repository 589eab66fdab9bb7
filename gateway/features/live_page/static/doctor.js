// The prefix doctor: where prefixes of recent requests break, why, what that costs, and what to change.
import { html, useCallback, usePolled, useState, Empty, Scroll } from "./view.js";
import { call } from "./connection.js";
import { age, count, money, percent, share, short, shown } from "./format.js";

const EVERY_MS = 15000;
let until = -Infinity; // when the gateway ends its watch, which each question makes longer

function Prose({ text }) {
  return text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));
}

function Cause({ cause }) {
  return html`<tr>
    <th scope="row">${cause.cause.replaceAll("_", " ")}<span class="under">${cause.delivery ? "in the fleet" : "in the prompts"}</span></th>
    <td data-label="Requests" class="number">${count(cause.requests)}</td>
    <td data-label="Tokens lost" class="number">${short(cause.lost_tokens)}</td>
    <td data-label="USD lost" class="number">${money(cause.lost_usd)}</td>
    <td data-label="First seen"><bdi>${shown(cause.first.where)}</bdi></td>
    <td data-label="What to change" class="prose"><${Prose} text=${shown(cause.remedy)} /></td>
  </tr>`;
}

function Facts({ found }) {
  return html`<dl class="facts">
    <div><dt>Requests examined</dt><dd>${count(found.requests)} in ${count(found.sessions)} sessions</dd></div>
    <div><dt>Prompt tokens</dt><dd>${short(found.prompt_tokens)}</dd></div>
    <div><dt>Could have been cached</dt><dd>${percent(share(found.reusable_tokens, found.prompt_tokens))}</dd></div>
    <div><dt>Lost</dt><dd>${short(found.lost_tokens)} tokens, ${money(found.lost_usd)}</dd></div>
    <div><dt>Watched for</dt><dd>${found.watched_s === null ? "from now on" : age(found.watched_s)}</dd></div>
  </dl>`;
}

export function Doctor() {
  const [begun, begin] = useState(performance.now() < until);
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const load = useCallback(async () => {
    try {
      const answer = await call("doctor");
      until = performance.now() + answer.watches_for_s * 1000;
      setFound(answer);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  }, []);
  usePolled(load, EVERY_MS, begun);
  if (!begun) {
    return html`<section class="panel"><${Empty} title="The doctor is not watching for you">It remembers digests of requests while somebody asks, and ten
      minutes longer; no text. Then it says where prefixes break, and why.<br /><button type="button" class="primary" onClick=${() => begin(true)}>
      Watch now</button></${Empty}></section>`;
  }
  if (problem) return html`<p class="wrong" role="alert">${problem}</p>`;
  if (!found) return html`<p class="wait">Asking the gateway.</p>`;
  return html`
    <${Facts} found=${found} />
    <section class="panel">${found.causes.length ? html`<${Scroll} label="Causes"><table class="cards">
      <thead><tr>${["Cause", "Requests", "Tokens lost", "USD lost", "First seen", "What to change"].map((text, at) => html`
        <th scope="col" class=${at > 0 && at < 4 ? "number" : ""}>${text}</th>`)}</tr></thead>
      <tbody>${found.causes.map((cause) => html`<${Cause} key=${cause.cause} cause=${cause} />`)}</tbody>
    </table></${Scroll}>` : html`<${Empty} title="Nothing breaks">${found.requests ? "Every prompt that could go on from an earlier one does."
      : "No request has come since the watch began. It looks again every 15 seconds."}</${Empty}>`}</section>
    ${found.notes.map((note) => html`<p class="hint">${shown(note)}</p>`)}
    <p class="hint">More detail, with the first difference of each: <code>warmroute doctor --live</code>.</p>`;
}
