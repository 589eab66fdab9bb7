// Why a request went where it went: every candidate's cost, in seconds, by its parts.
import { html, useEffect, useState, Dialog, Name, Scroll } from "./view.js";
import { call } from "./connection.js";
import { clock, count, duration, money, shown } from "./format.js";

// The parts that add time, in the order of docs/routing.md; discounts are below zero and have no bar.
const PARTS = [
  ["queue_s", "queue", "work in front of it"],
  ["prefill_s", "prefill", "its own uncached tokens"],
  ["others_s", "others", "delay of later requests"],
  ["duplicate_s", "copy", "a second copy of what another one holds"],
  ["evicted_s", "evicted", "what must go to make room"],
  ["decode_s", "decode", "beside running answers"],
  ["start_s", "start", "new work where it has just come up"],
  ["adapter_s", "adapter", "the load of its adapter"],
];
const DISCOUNTS = [["rent_s", "rent"], ["session_s", "session"]];

const REASONS = {
  warm: "holds the longest match of this prompt, and costs least",
  spill: "costs least, although another replica holds more of this prompt",
  cold: "costs least; no replica holds any of this prompt",
  blind: "costs least; the prompt is too short to be matched",
  session: "costs least, with what it probably holds of the session",
};

const SENT = { whole: "sent whole", base: "sent from a base", repeated: "stored answer sent again" };

function log(row) {
  return row.log_sent ? `${count(row.log_entries)} ${row.log_entries === 1 ? "entry" : "entries"}, ${SENT[row.log_sent]}` : undefined;
}

const WIDE = new Set(["Request", "Error", "Fallback", "Session", "User agent"]);

function Facts({ row }) {
  const facts = [
    ["Request", shown(row.id)], ["Time", clock(row.time)], ["Endpoint", row.endpoint], ["Model", shown(row.model)], ["Tenant", shown(row.tenant)],
    ["API key", row.api_key], ["Session", shown(row.session)], ["Agent", shown(row.agent)], ["Parent", shown(row.parent)],
    ["Client", row.client], ["User agent", shown(row.user_agent)], ["Pool", shown(row.pool)], ["Replica", shown(row.replica)], ["Fallback", shown(row.fallback)],
    ["Prompt log", log(row)],
    ["Prompt tokens", row.prompt_tokens ?? undefined, count], ["Cached tokens", row.cached_tokens ?? undefined, count],
    ["Answer tokens", row.completion_tokens ?? undefined, count], ["Estimated", row.estimated], ["In queue", row.queued_s || undefined, duration],
    ["First token", row.ttft_s ?? undefined, duration], ["Whole", row.seconds, duration], ["Cost", row.cost_usd ?? undefined, money],
    ["Saved", row.saved_usd ?? undefined, money], ["Status", row.status], ["Code", shown(row.code)], ["Error", shown(row.error)],
  ];
  return html`<dl class="facts">${facts.filter(([, value]) => value !== undefined && value !== "").map(([name, value, format]) => html`
    <div class=${WIDE.has(name) ? "wide" : ""}><dt>${name}</dt><dd><bdi>${format ? format(value) : value}</bdi></dd></div>`)}</dl>`;
}

function Attempts({ row }) {
  if (!row.failed_attempts?.length) return null;
  return html`<h3>Attempts that failed first</h3><ol class="attempts">${row.failed_attempts.map((attempt) => html`
    <li><${Name} of=${attempt.replica} /> <span class="bad-text">${shown(attempt.reason)}</span> ${shown(attempt.error)}</li>`)}</ol>`;
}

/** The parts of a cost, side by side. most: seconds of the widest one. */
function Stack({ cost, most }) {
  return html`<span class="stack" aria-hidden="true">${PARTS.filter(([part]) => cost[part] > 0).map(([part, name]) => html`
    <span class=${`part ${name}`} style=${{ width: `${(100 * cost[part]) / most}%` }}></span>`)}</span>`;
}

function Candidate({ candidate, chosen, most }) {
  const { cost } = candidate;
  return html`<tr class=${chosen ? "chosen" : ""}>
    <th scope="row"><${Name} of=${candidate.replica} />${chosen && html`<span class="tag">chosen</span>`}</th>
    <td class="number"><strong>${duration(cost.total_s)}</strong><${Stack} cost=${cost} most=${most} /></td>
    <td class="number">${count(candidate.matched_tokens)}</td>
    <td class="number">${count(candidate.uncached_tokens)}</td>
    <td class="number">${count(candidate.inflight)}</td>
    ${[...PARTS, ...DISCOUNTS].map(([part]) => html`<td class=${`number ${cost[part] ? "" : "zero"}`}>${duration(cost[part])}</td>`)}
  </tr>`;
}

function Decision({ decision }) {
  const gross = (cost) => PARTS.reduce((whole, [part]) => whole + Math.max(0, cost[part]), 0);
  const most = Math.max(1e-9, ...decision.candidates.map((candidate) => gross(candidate.cost)));
  const promised = decision.promise ? ` A breakpoint had promised ${count(decision.promised_tokens)} tokens: ${decision.promise}.` : "";
  return html`
    <p class="verdict"><strong class=${`why ${decision.reason}`}>${decision.reason}</strong> <${Name} of=${decision.replica} /> ${" "}
      ${REASONS[decision.reason] ?? "was chosen"}. Of about ${count(decision.prompt_tokens)} prompt tokens, the longest match in the pool was
      ${" "}${count(decision.available_tokens)}. Policy ${decision.policy}.${promised}</p>
    <ul class="parts">${PARTS.map(([, name, what]) => html`<li><span class=${`swatch part ${name}`} aria-hidden="true"></span><b>${name}</b> ${what}</li>`)}</ul>
    <${Scroll} label="Candidates"><table class="plain dense candidates">
      <caption class="unseen">Candidates, the best first; costs in seconds</caption>
      <thead><tr><th scope="col">Candidate</th><th scope="col" class="number">Cost</th><th scope="col" class="number">Match</th>
        <th scope="col" class="number">To compute</th><th scope="col" class="number">Running</th>
        ${[...PARTS, ...DISCOUNTS].map(([, name]) => html`<th scope="col" class="number">${name}</th>`)}</tr></thead>
      <tbody>${decision.candidates.map((candidate) => html`<${Candidate} key=${candidate.replica} candidate=${candidate} most=${most}
        chosen=${candidate.replica === decision.replica} />`)}</tbody>
    </table></${Scroll}>
    ${decision.further > 0 && html`<p class="hint">${count(decision.further)} further candidates cost more.</p>`}`;
}

/** id: the key of a row; row: as it is now, undefined: it is in the list no more. */
export function Explain({ id, row, onClose }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    call(`live/requests/${encodeURIComponent(id)}`).then(setFound, (error) => setProblem(error.message));
  }, [id]);
  const shownRow = row ?? found?.request;
  return html`<${Dialog} title="Why this replica" onClose=${onClose} wide>
    ${shownRow && html`<${Facts} row=${shownRow} /><${Attempts} row=${shownRow} />`}
    ${found?.decision && html`<h3>The decision</h3><${Decision} decision=${found.decision} />`}
    ${found && !found.decision && html`<p>No replica was chosen for it: it was answered by the gateway itself.</p>`}
    ${problem && html`<p class="wrong" role="alert">${problem}</p>`}
    ${!found && !problem && html`<p class="wait">Asking the gateway.</p>`}
  </${Dialog}>`;
}
