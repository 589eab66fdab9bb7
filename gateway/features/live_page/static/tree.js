// The tree itself: laid out by d3-hierarchy, drawn as SVG, gone through by keyboard as a tree of the ARIA patterns.
import { html, useEffect, useRef } from "./view.js";
import { hierarchy, tree as layout } from "./vendor/d3-hierarchy.js";
import { age, count, digest, short, shown } from "./format.js";

const ROW = 34; // pixels from one node to the next
const COLUMN = 250;
const LABEL = 196; // from a node to where the lines to what is behind it begin
const LEAST = 4; // radius
const MOST = 11;
const DOTS = 5; // holders that are drawn beside a node
const OLD_S = 900; // idle for so long: as pale as it gets

/** The open part, as d3 wants it: nodes, and a stand-in for children that are not shown. */
function grown(node, nodes) {
  const read = nodes.get(node.way);
  if (!read) return { node, children: null };
  const left = read.children - read.shown.length;
  const children = read.shown.map((child) => grown(child, nodes));
  if (left > 0) children.push({ more: left, of: node.way, children: null });
  return { node, children };
}

function radius(tokens) {
  return LEAST + Math.min(MOST - LEAST, Math.log2(1 + tokens / 128));
}

function paleness(idle) {
  return idle === null ? 3 : Math.min(3, Math.floor((4 * Math.min(idle, OLD_S)) / (OLD_S + 1)));
}

function path({ source, target }) {
  const [from, to] = [source.y + LABEL, target.y - MOST - 3];
  const middle = (from + to) / 2;
  return `M${from},${source.x}C${middle},${source.x} ${middle},${target.x} ${to},${target.x}`;
}

function says({ node }, heads) {
  const known = heads.get(node.way);
  const models = known ? `, model ${[...known.models].map(shown).join(", ")}` : "";
  const held = node.holders.map((holder) => shown(holder.replica)).join(", ") || "nobody";
  return `Prefix ${digest(node.way.slice(-16))}: ${count(node.tokens)} tokens, held by ${held}, last used ${age(node.idle_s)} ago${models}`;
}

function Node({ item, heads, open, selected, tone, focused, onSelect, onToggle, onFocus }) {
  const { node } = item.data;
  const [known, size, dots] = [heads.get(node.way), radius(node.tokens), node.holders.slice(0, DOTS)];
  const expanded = node.children ? String(open.has(node.way)) : null;
  const press = () => {
    onSelect(node.way);
    onFocus(node.way);
    if (node.children) onToggle(node.way);
  };
  const name = known ? shown([...known.models][0]).slice(0, 18) : digest(node.way.slice(-16));
  return html`<g class=${`node pale-${paleness(node.idle_s)} ${selected ? "selected" : ""}`} transform=${`translate(${item.y},${item.x})`}>
    <g role="treeitem" aria-level=${item.depth} aria-expanded=${expanded} aria-selected=${selected ? "true" : "false"} aria-label=${says(item.data, heads)}
      tabindex=${focused ? 0 : -1} data-way=${node.way} onClick=${press}>
    <rect class="target" x="-14" y="-16" width=${LABEL + 10} height="32" rx="6" />
    <circle class=${`tone-${dots.length ? tone(dots[0].replica) : "other"} ${node.children ? "inner" : ""}`} r=${size} />
      ${dots.map((holder, at) => html`<circle class=${`tone-${tone(holder.replica)}`} cx=${MOST + 10 + at * 9} cy="8" r="3" />`)}
    </g>
    <g aria-hidden="true" class="words">
    ${node.children > 0 && !open.has(node.way) && html`<text class="sign" text-anchor="middle" y="4">+</text>`}
    <text class="label" x=${MOST + 6} y="-2">${short(node.tokens)} tok · ${name}</text>
    <text class="age" x=${MOST + 10 + dots.length * 9} y="11">${node.holders.length + node.further_holders > DOTS ? "… " : ""}${age(node.idle_s)}</text>
    </g>
  </g>`;
}

function More({ item, focused, onMore, full }) {
  const { more, of } = item.data;
  const text = full ? `${count(more)} more, older` : `${count(more)} more`;
  return html`<g class="node more" transform=${`translate(${item.y},${item.x})`} role="treeitem" aria-level=${item.depth} aria-selected="false" tabindex=${focused ? 0 : -1} data-way=${`${of}.more`} onClick=${() => full || onMore(of)}>
    <rect class="target" x="-14" y="-16" width="150" height="32" rx="6" /><text class="label" x="0" y="4">${text}</text></g>`;
}

const wayOf = (item) => (item.data.more ? `${item.data.of}.more` : item.data.node.way);

/** The next node for a key, of all that are drawn, in the order from top to bottom. */
function moved(key, items, at) {
  const item = items[at];
  if (key === "ArrowDown") return items[Math.min(items.length - 1, at + 1)];
  if (key === "ArrowUp") return items[Math.max(0, at - 1)];
  if (key === "Home") return items[0];
  if (key === "End") return items[items.length - 1];
  if (key === "ArrowLeft") return item.depth > 1 ? item.parent : item;
  return item.children?.[0] ?? item;
}

export function Tree({ root, nodes, open, heads, tone, selected, onSelect, onToggle, onMore }) {
  const place = useRef(null);
  const focus = useRef(""); // the way of the node that Tab leads to
  const wants = useRef(false); // the focus is to follow
  const before = place.current?.contains(document.activeElement) ? document.activeElement.dataset.way : undefined;
  const whole = hierarchy(grown(root, nodes));
  layout().nodeSize([ROW, COLUMN])(whole);
  const items = [];
  whole.eachBefore((item) => item.depth > 0 && items.push(item));
  const rows = items.map((item) => item.x);
  const [top, low] = [Math.min(...rows) - ROW, Math.max(...rows) + ROW];
  const width = (Math.max(...items.map((item) => item.depth)) + 0.2) * COLUMN;
  if (!items.some((item) => wayOf(item) === focus.current)) focus.current = wayOf(items[0]);
  const move = (way) => {
    focus.current = way;
    wants.current = true;
    onSelect(way);
  };
  useEffect(() => {
    const lost = before !== undefined && !place.current.contains(document.activeElement); // a node that changes its place loses it
    if (!wants.current && !lost) return;
    if (!wants.current && items.some((item) => wayOf(item) === before)) focus.current = before;
    wants.current = false;
    place.current.querySelector(`[data-way="${focus.current}"]`)?.focus();
  });
  const key = (event) => {
    const at = items.findIndex((item) => wayOf(item) === focus.current);
    const { data } = items[at];
    const closed = !data.more && data.node.children > 0 && !open.has(data.node.way);
    if (event.key === "Enter" || event.key === " ") event.target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    else if (event.key === "ArrowRight" && closed) onToggle(data.node.way);
    else if (event.key === "ArrowLeft" && !data.more && open.has(data.node.way)) onToggle(data.node.way);
    else if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") move(wayOf(moved(event.key, items, at)));
    else return;
    event.preventDefault();
  };
  return html`<div class="scroll tree" ref=${place}>
    <svg role="tree" aria-label="Prefix index" width=${width} height=${low - top} viewBox=${`${COLUMN - 24} ${top} ${width} ${low - top}`} onKeyDown=${key}>
      ${whole.links().filter(({ source }) => source.depth > 0).map((link) => html`<path class="link" d=${path(link)} key=${`l${wayOf(link.target)}`} />`)}
      ${items.map((item) => (item.data.more
        ? html`<${More} key=${wayOf(item)} item=${item} focused=${focus.current === wayOf(item)} onMore=${onMore} full=${open.get(item.data.of) > 12} />`
        : html`<${Node} key=${wayOf(item)} item=${item} heads=${heads} open=${open} tone=${tone} focused=${focus.current === wayOf(item)}
          selected=${selected === wayOf(item)} onSelect=${onSelect} onToggle=${onToggle} onFocus=${move} />`))}
    </svg>
  </div>`;
}
