// Requests as they happen. A row opens the reasons of its decision.
import { html, useRef, useState, Badge, Empty, Name, Scroll } from "./view.js";
import { Explain } from "./explain.js";
import { UnderWay } from "./underway.js";
import { clock, count, duration, money, percent, rate, share, short } from "./format.js";

const FIELDS = ["id", "model", "tenant", "api_key", "session", "agent", "client", "user_agent", "replica", "pool", "reason", "code", "error",
  "endpoint", "log_sent"];

function outcome(row) {
  if (row.state === "running") return ["wait", "running"];
  const broken = row.status < 400 && row.error; // after the status had gone out
  const tone = row.status >= 500 || broken ? "bad" : row.status >= 400 ? "warn" : "good";
  return [tone, row.status === 499 ? "left" : String(row.status)];
}

/** A click anywhere in a row is one on its button, unless it ended a selection of text. */
function pressButton(event) {
  if (event.target.closest("button") || String(getSelection())) return;
  const button = event.currentTarget.querySelector("button");
  button.focus(); // to which the dialog returns
  button.click();
}

/** logs: a column for prompt logs is there. */
function Row({ row, logs, onOpen }) {
  const [tone, text] = outcome(row);
  const prompt = row.replica ? row.prompt_tokens ?? row.estimated_prompt_tokens : undefined;
  const cached = row.cached_tokens ?? row.predicted_cached_tokens;
  const guess = row.prompt_tokens === undefined || row.prompt_tokens === null || row.estimated ? "≈ " : "";
  const retried = row.failed_attempts?.length ? `, after ${row.failed_attempts.length} failed` : "";
  return html`<tr class="opens" onClick=${pressButton}>
    <td data-label="Time"><button type="button" class="row" onClick=${() => onOpen(row.key)}>
      ${clock(row.time)}<span class="unseen"> explain request</span></button></td>
    <td data-label="Model"><${Name} of=${row.model} /></td>
    <td data-label="Tenant"><${Name} of=${row.tenant} /></td>
    <td data-label="Replica"><${Name} of=${row.replica} /></td>
    <td data-label="Why"><span class=${`why ${row.reason}`}>${(row.status >= 400 && row.code) || row.reason || row.code || "–"}${retried}</span></td>
    ${logs && html`<td data-label="Log">${row.log_sent ? `${count(row.log_entries)}, ${row.log_sent}` : "–"}</td>`}
    <td data-label="Prompt" class="number">${prompt === undefined ? "–" : guess + short(prompt)}</td>
    <td data-label="Cached" class="number">${cached === undefined || !prompt ? "–" : guess + percent(share(cached, prompt))}</td>
    <td data-label="First token" class="number">${duration(row.ttft_s)}</td>
    <td data-label="Whole" class="number">${duration(row.seconds)}</td>
    <td data-label="Cost" class="number">${money(row.cost_usd)}</td>
    <td data-label="Status"><${Badge} tone=${tone}>${text}</${Badge}></td>
  </tr>`;
}

const HEADS = [["Time"], ["Model"], ["Tenant"], ["Replica"], ["Why"], ["Log"], ["Prompt", true], ["Cached", true], ["First token", true],
  ["Whole", true], ["Cost", true], ["Status"]];

function Sampling({ live }) {
  const sum = (at) => live.sampled.reduce((whole, each) => whole + each[at], 0);
  const [ended, hidden, seconds] = [sum(1), sum(2), Math.max(1, live.sampled.length)];
  if (!hidden) return html`<span>${rate(ended / seconds)}/s, all are shown</span>`;
  return html`<span>${rate(ended / seconds)}/s, of which ${percent(1 - hidden / Math.max(ended, hidden))} are shown</span>`;
}

export function Requests({ live }) {
  const [paused, setPaused] = useState(null); // the rows that stand still
  const [wanted, setWanted] = useState("");
  const [open, setOpen] = useState("");
  const rows = paused ?? [...live.requests.values()].sort((one, other) => other.time - one.time);
  const search = useRef(null);
  const needle = wanted.trim().toLowerCase();
  const matches = (row) => !needle || FIELDS.some((field) => String(row[field] ?? "").toLowerCase().includes(needle))
    || String(row.status ?? "").startsWith(needle);
  const found = rows.filter(matches);
  const logs = rows.some((row) => row.log_sent); // for most gateways the column would be empty
  const heads = HEADS.filter(([text]) => logs || text !== "Log");
  return html`
    <div class="toolbar">
      <label class="search"><span>Filter</span><input type="search" ref=${search} value=${wanted} maxlength="100" spellcheck=${false}
        placeholder="model, session, client, code, status" onInput=${(event) => setWanted(event.target.value)} /></label>
      <button type="button" aria-pressed=${paused ? "true" : "false"} onClick=${() => setPaused(paused ? null : rows)}>
        ${paused ? "Go on" : "Pause"}</button>
      <p class="hint">${paused ? "The list stands still." : html`<${Sampling} live=${live} />`}</p>
    </div>
    ${!paused && html`<${UnderWay} rows=${live.frame.under_way} now=${live.now} matches=${matches} />`}
    <section class="panel">
      ${found.length ? html`<${Scroll} label="Requests"><table class="cards dense">
        <caption class="unseen">The last requests, the newest first</caption>
        <thead><tr>${heads.map(([text, number]) => html`<th scope="col" class=${number ? "number" : ""}>${text}</th>`)}</tr></thead>
        <tbody>${found.map((row) => html`<${Row} key=${row.key} row=${row} logs=${logs} onOpen=${setOpen} />`)}</tbody>
      </table></${Scroll}>` : needle
        ? html`<${Empty} title="No request matches">${count(rows.length)} are known. Filter by a part of a name (model, tenant, key, session, client, replica, endpoint), an id, an error, or a status.</${Empty}>`
        : html`<${Empty} title="No requests since this page was opened">They appear when their replica is chosen. Send one to
          <code>/v1/chat/completions</code> of the clients' port.</${Empty}>`}
    </section>
    ${open && html`<${Explain} id=${open} row=${live.requests.get(open)} onClose=${() => setOpen("")} />`}`;
}
