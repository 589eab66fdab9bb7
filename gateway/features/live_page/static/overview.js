// What the gateway does now, and has done in the last minutes.
import { html, useState } from "./view.js";
import { Chart } from "./chart.js";
import { recent } from "./store.js";
import { count, duration, money, percent, rate, share, short } from "./format.js";

const NOW_S = 10; // seconds of which a rate is the mean
const GROUP = 5; // steps in one point of a chart
const WINDOWS = [[300, "5 min"], [900, "15 min"]];

function Tile({ label, value, note, tone = "" }) {
  return html`<div class=${`tile ${tone}`}><dt>${label}</dt><dd><span class="value">${value}</span><span class="note">${note}</span></dd></div>`;
}

/** Points of GROUP steps each: sums, and the last one's gauges. They begin at the same steps whatever comes behind. */
function grouped(points, step) {
  const groups = new Map();
  for (const point of points) {
    const number = Math.floor((point.time - 0.001) / (step * GROUP));
    if (!groups.has(number)) groups.set(number, []);
    groups.get(number).push(point);
  }
  const whole = [...groups.values()].filter((group) => group.length === GROUP);
  return (whole.length ? whole : [...groups.values()]).map((group) => {
    const sum = (field) => group.reduce((whole, point) => whole + point[field], 0);
    return { ...group[group.length - 1], seconds: group.length * step, sum };
  });
}

function Charts({ groups, whole, span }) {
  const times = groups.map((group) => group.time);
  const line = (value) => groups.map(value);
  const each = (field) => line((group) => group.sum(field) / group.seconds);
  const minutely = (field) => line((group) => (group.sum(field) / group.seconds) * 60);
  const computed = (group) => (group.sum("prompt_tokens") - group.sum("cached_tokens")) / group.seconds;
  const hits = share(whole.cached_tokens, whole.prompt_tokens);
  const last = whole.last;
  return html`<div class="charts">
    <${Chart} title="Requests per second" span=${span} times=${times} values=${[each("requests"), each("errors")]} format=${rate}
      series=${[{ name: "ended", tone: "line-1" }, { name: "errors (5xx)", tone: "bad-line", dash: [4, 3] }]}
      summary=${`${count(whole.requests)} requests, ${count(whole.errors)} errors, ${count(whole.refused)} refused over a limit.`} />
    <${Chart} title="Cached share of prompt tokens" span=${span} times=${times} format=${(value) => `${Math.round(value)} %`}
      values=${[line((group) => (group.sum("prompt_tokens") ? (100 * group.sum("cached_tokens")) / group.sum("prompt_tokens") : null))]}
      series=${[{ name: "cached", tone: "line-2" }]}
      summary=${`${short(whole.cached_tokens)} of ${short(whole.prompt_tokens)} prompt tokens came from a cache: ${percent(hits)}.`} />
    <${Chart} title="Prompt tokens per second" span=${span} times=${times} values=${[each("cached_tokens"), line(computed)]} format=${short}
      series=${[{ name: "cached", tone: "line-2" }, { name: "computed", tone: "line-1", dash: [4, 3] }]}
      summary=${`${short(whole.prompt_tokens - whole.cached_tokens)} computed; ${short(whole.completion_tokens)} tokens of answers.`} />
    <${Chart} title="USD per minute" span=${span} times=${times} values=${[minutely("cost_usd"), minutely("saved_usd")]} format=${money}
      series=${[{ name: "spent", tone: "line-1" }, { name: "saved by cached tokens", tone: "line-2", dash: [4, 3] }]}
      summary=${whole.cost_usd || whole.saved_usd
        ? `${money(whole.cost_usd)} spent, ${money(whole.saved_usd)} saved.` : "Nothing is priced: set prices in the configuration."} />
    <${Chart} title="Time to first token" span=${span} times=${times} format=${duration}
      values=${[line((group) => group.ttft_p50_s), line((group) => group.ttft_p90_s)]}
      series=${[{ name: "median", tone: "line-1" }, { name: "90th percentile", tone: "line-3", dash: [4, 3] }]}
      summary=${last?.ttft_p50_s ? `Median ${duration(last.ttft_p50_s)}, 90th percentile ${duration(last.ttft_p90_s)}, of the streams of the last 10 s.`
        : "No stream in the last 10 s."} />
    <${Chart} title="Requests under way" span=${span} times=${times} values=${[line((group) => group.running), line((group) => group.waiting)]} format=${count}
      series=${[{ name: "running", tone: "line-1" }, { name: "waiting in a queue", tone: "line-3", dash: [4, 3] }]}
      summary=${`${count(last?.running ?? 0)} running, ${count(last?.waiting ?? 0)} waiting.`} />
  </div>`;
}

export function Overview({ live }) {
  const [window, setWindow] = useState(WINDOWS[0][0]);
  const now = recent(NOW_S);
  const whole = recent(window);
  const step = live.frame.step_s;
  const groups = grouped(live.points.slice(-Math.round(window / step)), step);
  const up = live.frame.replicas.filter((replica) => replica.up && !replica.draining).length;
  const all = live.frame.replicas.length + live.frame.further_replicas;
  const name = WINDOWS.find(([seconds]) => seconds === window)[1];
  const rest = all > up ? `${all - up} down or draining` : "all take requests";
  return html`
    <dl class="tiles">
      <${Tile} label="Requests" value=${`${rate(now.seconds ? now.requests / now.seconds : 0)}/s`} note=${`${count(whole.requests)} in ${name}`} />
      <${Tile} label="Cached tokens" value=${percent(share(whole.cached_tokens, whole.prompt_tokens))} note=${`of ${short(whole.prompt_tokens)} in ${name}`} />
      <${Tile} label="Saved" value=${money(whole.saved_usd)} note=${`${money(whole.cost_usd)} spent in ${name}`} />
      <${Tile} label="First token" value=${duration(now.last?.ttft_p50_s)} note=${`p90 ${duration(now.last?.ttft_p90_s)}`} />
      <${Tile} label="Under way" value=${count(now.last?.running ?? 0)} note=${`${count(now.last?.waiting ?? 0)} waiting`} tone=${now.last?.waiting ? "warn" : ""} />
      <${Tile} label="Errors" value=${count(whole.errors)} note=${`${count(whole.refused)} refused in ${name}`} tone=${whole.errors ? "bad" : ""} />
      <${Tile} label="Replicas" value=${`${up} of ${all}`} note=${rest} tone=${up ? "" : "bad"} />
    </dl>
    <div class="choice" role="group" aria-label="Period">${WINDOWS.map(([seconds, text]) => html`
      <button type="button" aria-pressed=${seconds === window ? "true" : "false"} onClick=${() => setWindow(seconds)}>${text}</button>`)}</div>
    <${Charts} key=${window} span=${window} groups=${groups} whole=${whole} />`;
}
