// Requests that have not ended: who has sent them, and what they wait for.
import { html, Badge, Name, Scroll } from "./view.js";
import { count, duration, ordinal, short } from "./format.js";

const TONES = { queued: "warn", answering: "good" };

/** What a request waits for, in words. */
function progress(row) {
  const about = row.expected_s > 1 ? `, about ${duration(row.expected_s)}` : "";
  if (row.state === "queued") return `${row.place ? `${ordinal(row.place)} in the queue` : "behind 100 others"}${about}`;
  if (row.state === "computing") return `${short(row.uncached_tokens)} of ${short(row.prompt_tokens)} tokens`;
  return "";
}

function Owner({ row }) {
  const further = [row.session, row.agent && `agent ${row.agent}`].filter(Boolean);
  return html`<${Name} of=${row.api_key || row.tenant} />${further.map((name) => html`<${Name} key=${name} of=${name} className="beside" />`)}`;
}

function Row({ row, now }) {
  const retried = row.failed_attempts ? `, after ${count(row.failed_attempts)} failed` : "";
  return html`<tr>
    <td data-label="Since" class="number">${duration(Math.max(0, now - row.time))}</td>
    <td data-label="Owner"><${Owner} row=${row} /></td>
    <td data-label="Client">${row.attended ? html`<${Name} of=${row.client || "–"} />` : "none: it runs without its client"}
      ${row.user_agent && html`<${Name} of=${row.user_agent} className="beside" />`}</td>
    <td data-label="Model"><${Name} of=${row.model} /></td>
    <td data-label="Replica"><${Name} of=${row.replica || "–"} /></td>
    <td data-label="State"><${Badge} tone=${TONES[row.state] ?? "wait"}>${row.state}</${Badge}> ${progress(row)}${retried}</td>
  </tr>`;
}

/** rows: the oldest first. matches: as the filter says. Nothing if there are none. */
export function UnderWay({ rows, now, matches }) {
  const found = rows.filter(matches);
  if (!found.length) return null;
  const queued = found.filter((row) => row.state === "queued").length;
  return html`<section class="panel" aria-labelledby="underway">
    <div class="panel-head"><h2 id="underway">Under way for more than a second</h2>
      <p>${count(found.length)}${queued ? `, of which ${count(queued)} wait in a queue` : ""}</p></div>
    <${Scroll} label="Under way"><table class="cards dense">
      <caption class="unseen">Requests that have not ended, the oldest first</caption>
      <thead><tr><th scope="col" class="number">Since</th><th scope="col">Owner</th><th scope="col">Client</th><th scope="col">Model</th>
        <th scope="col">Replica</th><th scope="col">State</th></tr></thead>
      <tbody>${found.map((row) => html`<${Row} key=${`${row.time} ${row.id}`} row=${row} now=${now} />`)}</tbody>
    </table></${Scroll}>
  </section>`;
}
