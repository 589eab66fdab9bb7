// Lines over time: a canvas (uPlot) for the eyes, and the same as a sentence and a table for everybody.
import { html, useEffect, useRef, useState } from "./view.js";
import { clock } from "./format.js";
import { color, repaint } from "./theme.js";

const HEIGHT = 150;
const ROWS = 15; // of a table

function axis(values, size) {
  const line = { stroke: color("--line"), width: 1 };
  return { stroke: color("--soft"), font: "11px system-ui, sans-serif", grid: line, ticks: { show: false }, size, ...values };
}

function options(width, series, format, span) {
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    padding: [8, 4, 0, 0],
    scales: { x: { range: (_plot, least, most) => [Math.min(least, most - span), most] }, y: { range: (_plot, _least, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [
      axis({ space: 70, values: (_plot, times) => times.map((time) => clock(time).slice(0, 5)) }, 24),
      axis({ space: 34, values: (_plot, ticks) => ticks.map(format) }, 52),
    ],
    series: [{}, ...series.map(({ tone, dash }) => ({
      stroke: color(`--${tone}`), width: 1.75, points: { show: false }, dash, spanGaps: false,
      fill: dash ? undefined : `${color(`--${tone}`)}1f`,
    }))],
  };
}

function Canvas({ times, values, series, format, label, span }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = [times, ...values];
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(place.current.clientWidth, series, format, span), latest.current, place.current);
    };
    draw();
    repaint.add(draw);
    const resized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      repaint.delete(draw);
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(data));
  return html`<div class="canvas" ref=${place} role="img" aria-label=${label}></div>`;
}

function Table({ title, times, values, series, format }) {
  const every = Math.max(1, Math.ceil(times.length / ROWS));
  const at = times.map((_, place) => place).filter((place) => (times.length - 1 - place) % every === 0).reverse();
  return html`<table class="plain">
    <caption class="unseen">${title}</caption>
    <thead><tr><th scope="col">Time</th>${series.map(({ name }) => html`<th scope="col" class="number">${name}</th>`)}</tr></thead>
    <tbody>${at.map((place) => html`<tr><th scope="row">${clock(times[place])}</th>
      ${values.map((line) => html`<td class="number">${line[place] === null ? "–" : format(line[place])}</td>`)}</tr>`)}</tbody>
  </table>`;
}

/** span: seconds from the left to the right. series: [{name, tone, dash}]; values: one list for each; null: no value. summary: what there is to see, in words. */
export function Chart({ title, summary, times, values, series, format, span }) {
  const [open, setOpen] = useState(false);
  return html`<figure class="chart">
    <figcaption>
      <h2>${title}</h2>
      <span class="legend">${series.map(({ name, tone, dash }) => html`
        <span class="legend-item"><span class=${`swatch ${tone} ${dash ? "dashed" : ""}`} aria-hidden="true"></span>${name}</span>`)}</span>
      <p class="summary">${summary}</p>
    </figcaption>
    ${times.length > 1
      ? html`<${Canvas} span=${span} times=${times} values=${values} series=${series} format=${format} label=${`${title}. ${summary}`} />`
      : html`<p class="wait">The first points come within seconds.</p>`}
    <details onToggle=${(event) => setOpen(event.target.open)}><summary>As a table</summary>
      ${open && html`<${Table} title=${title} times=${times} values=${values} series=${series} format=${format} />`}</details>
  </figure>`;
}
