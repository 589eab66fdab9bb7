// Runs of workflows as they happen: a list, and of one of them a bar for each step.
import { html, useCallback, usePolled, useState, Badge, Empty, Name, Scroll } from "./view.js";
import { call } from "./connection.js";
import { Explain } from "./explain.js";
import { clock, count, duration, money, percent, share, short, shown } from "./format.js";

const EVERY_MS = 1000;
const TONES = { running: "wait", completed: "good", failed: "bad", cancelled: "warn", incomplete: "warn" };
const PARTS = [["queue", "waited for a call that computes its prefix"], ["prefill", "until its first token"], ["decode", "its answer"]];

/** The parts of a step's bar: name, begin and end in milliseconds of the run. now: of a run that goes on. */
function partsOf(step, now) {
  if (step.started_ms === null) return [];
  const begun = step.started_ms;
  const ended = step.done_ms ?? now;
  const first = step.first_ms ?? (step.kind === "call" ? begun : ended);
  return [["queue", begun - (step.gate_ms ?? 0), begun], ["prefill", begun, first], ["decode", first, ended]];
}

function fate(step) {
  if (step.killed_by) return `killed by ${step.killed_by}`;
  if (step.status === "killed") return "cancelled";
  if (step.reason) return `skipped: ${step.reason}`;
  return step.error ?? step.status;
}

function Line({ step, whole, row, onOpen }) {
  const bar = html`<span class="line" aria-hidden="true">${partsOf(step, whole).map(([name, begin, end]) => html`
    <span class=${`part ${name} ${step.status}`} style=${{ left: `${(100 * begin) / whole}%`, width: `${(100 * (end - begin)) / whole}%` }}></span>`)}</span>`;
  return html`<tr>
    <th scope="row">${row ? html`<button type="button" class="row" onClick=${() => onOpen(row.key)}>${step.name}
      <span class="unseen"> explain request</span></button>` : step.name}</th>
    <td data-label="Time" class="timeline">${bar}</td>
    <td data-label="End" class=${step.status === "failed" ? "bad-text" : ""}>${fate(step)}${step.attempts > 1 ? `, ${step.attempts} attempts` : ""}</td>
    <td data-label="Replica"><${Name} of=${step.replica} /></td>
    <td data-label="Took" class="number">${step.done_ms === null || step.started_ms === null ? "–" : duration((step.done_ms - step.started_ms) / 1000)}</td>
    <td data-label="Prompt" class="number">${short(step.prompt_tokens)}</td>
    <td data-label="Cached" class="number">${percent(share(step.cached_tokens, step.prompt_tokens))}</td>
    <td data-label="Answer" class="number">${short(step.completion_tokens)}</td>
  </tr>`;
}

const HEADS = [["Step"], ["Time"], ["End"], ["Replica"], ["Took", true], ["Prompt", true], ["Cached", true], ["Answer", true]];

function Waterfall({ run, requests, onOpen }) {
  const { usage } = run;
  const rows = new Map([...requests.values()].map((row) => [row.id, row]));
  const whole = Math.max(1, run.elapsed_ms);
  const outputs = Object.entries(run.outputs).map(([name, state]) => (state === "settled" ? name : `${name} (${state})`)).join(", ");
  return html`<section class="panel" aria-label=${`Steps of ${run.id}`}>
    <dl class="facts">
      <div class="wide"><dt>Run</dt><dd>${run.id}</dd></div>
      <div><dt>Calls</dt><dd>${count(usage.calls)}</dd></div>
      <div><dt>Prompt tokens</dt><dd>${count(usage.prompt_tokens)}</dd></div>
      <div><dt>Computed, of least</dt><dd>${count(usage.computed_tokens)} of ${count(usage.least_tokens)}</dd></div>
      <div><dt>Answer tokens, wasted</dt><dd>${count(usage.completion_tokens)}, ${count(usage.wasted_tokens)}</dd></div>
      <div><dt>Cost</dt><dd>${money(usage.cost_usd)}</dd></div>
      ${outputs && html`<div class="wide"><dt>Outputs</dt><dd>${outputs}</dd></div>`}
      ${run.reason && html`<div class="wide"><dt>Ended by</dt><dd class="bad-text">${run.failed_step && `${run.failed_step}: `}${shown(run.reason)}</dd></div>`}
    </dl>
    <ul class="parts legend-of-run">${PARTS.map(([name, what]) => html`<li><span class=${`swatch part ${name}`} aria-hidden="true"></span>${what}</li>`)}</ul>
    <${Scroll} label="Steps"><table class="cards dense steps">
      <caption class="unseen">Steps in the order of the document; the bars share one axis of ${duration(whole / 1000)}</caption>
      <thead><tr>${HEADS.map(([text, number]) => html`<th scope="col" class=${number ? "number" : ""}>${text}</th>`)}</tr></thead>
      <tbody>${run.steps.map((step) => html`<${Line} key=${step.name} step=${step} whole=${whole} row=${rows.get(step.request)} onOpen=${onOpen} />`)}</tbody>
    </table></${Scroll}>
  </section>`;
}

function Run({ run, chosen, onChoose }) {
  const { usage } = run;
  return html`<tr class=${chosen ? "chosen" : ""}>
    <td data-label="Time"><button type="button" class="row" aria-pressed=${chosen ? "true" : "false"} onClick=${() => onChoose(run.id)}>
      ${clock(run.created_at)}<span class="unseen"> show steps</span></button></td>
    <td data-label="Workflow"><${Name} of=${run.workflow} /></td>
    <td data-label="Calls" class="number">${count(usage.calls)}</td>
    <td data-label="Computed" class="number">${short(usage.computed_tokens)}</td>
    <td data-label="Of the least" class="number">${usage.least_tokens ? (usage.computed_tokens / usage.least_tokens).toFixed(2) : "–"}</td>
    <td data-label="Took" class="number">${duration(run.elapsed_ms / 1000)}</td>
    <td data-label="Cost" class="number">${money(usage.cost_usd)}</td>
    <td data-label="Status"><${Badge} tone=${TONES[run.status] ?? "wait"}>${run.status}</${Badge}></td>
  </tr>`;
}

const RUN_HEADS = [["Time"], ["Workflow"], ["Calls", true], ["Computed", true], ["Of the least", true], ["Took", true], ["Cost", true], ["Status"]];

export function Runs({ live }) {
  const [runs, setRuns] = useState(null);
  const [problem, setProblem] = useState("");
  const [wanted, choose] = useState(""); // a run; else the newest one is shown
  const [open, setOpen] = useState("");
  const load = useCallback(async () => {
    try {
      setRuns((await call("runs")).runs);
      setProblem("");
    } catch (error) {
      setProblem(error.status === 404 ? "Workflows are off: workflows.enabled." : error.message);
    }
  }, []);
  usePolled(load, EVERY_MS);
  if (problem) return html`<p class="wrong" role="alert">${problem}</p>`;
  if (!runs) return html`<p class="wait">Asking the gateway.</p>`;
  if (!runs.length) {
    return html`<section class="panel"><${Empty} title="No runs since this page was opened">A request to <code>/v1/workflows/runs</code>,
      or for a model <code>workflow:NAME</code>, appears here.</${Empty}></section>`;
  }
  const run = runs.find((each) => each.id === wanted) ?? runs[0];
  return html`
    <${Waterfall} run=${run} requests=${live.requests} onOpen=${setOpen} />
    <section class="panel"><${Scroll} label="Runs"><table class="cards dense">
      <caption class="unseen">The last runs, the newest first</caption>
      <thead><tr>${RUN_HEADS.map(([text, number]) => html`<th scope="col" class=${number ? "number" : ""}>${text}</th>`)}</tr></thead>
      <tbody>${runs.map((each) => html`<${Run} key=${each.id} run=${each} chosen=${each === run} onChoose=${choose} />`)}</tbody>
    </table></${Scroll}></section>
    ${open && html`<${Explain} id=${open} row=${live.requests.get(open)} onClose=${() => setOpen("")} />`}`;
}
