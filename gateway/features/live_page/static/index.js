// The prefix index as a picture that can be opened: heads of prompts on the left, what extends them to the right.
import { html, useCallback, useEffect, useState, Bar, Empty, Name } from "./view.js";
import { call } from "./connection.js";
import { Tree } from "./tree.js";
import { age, bytes, count, digest, share, short, shown } from "./format.js";

const EVERY_MS = 5000;
const FIRST = 12; // children of a node that are shown
const MORE = 64;
const TONES = 6; // colours of replicas

const last = (way) => way.slice(way.lastIndexOf(".") + 1);

/** Which nodes are open, and how many of their children are wanted: by way. "" is the root. */
function useTree() {
  const [open, setOpen] = useState(new Map([["", FIRST]]));
  const [nodes, setNodes] = useState(new Map()); // what was read, by way
  const [about, setAbout] = useState(null);
  const [problem, setProblem] = useState("");
  const load = useCallback(async () => {
    try {
      const answers = await Promise.all([...open].map(([way, children]) => call(`trie?depth=1&children=${children}&way=${way}`)));
      const wanted = new Set(open.keys());
      setNodes(new Map(answers.filter(({ node }) => wanted.has(node.way)).map(({ node }) => [node.way, node])));
      setAbout(answers[0]);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  }, [open]);
  useEffect(() => {
    load();
    const timer = setInterval(load, EVERY_MS);
    return () => clearInterval(timer);
  }, [load]);
  const toggle = (way) => {
    const next = new Map(open);
    if (!next.delete(way)) next.set(way, FIRST);
    else for (const below of open.keys()) if (below.startsWith(`${way}.`)) next.delete(below);
    setOpen(next);
  };
  const more = (way) => setOpen(new Map(open).set(way, MORE));
  return { open, nodes, about, problem, toggle, more };
}

function Legend({ replicas, tone }) {
  return html`<ul class="holders" aria-label="Replicas">${replicas.slice(0, TONES).map((replica) => html`
    <li><span class=${`swatch tone-${tone(replica.name)}`} aria-hidden="true"></span><${Name} of=${replica.name} /></li>`)}
    ${replicas.length > TONES && html`<li>${replicas.length - TONES} others in grey</li>`}</ul>`;
}

function Sizes({ about, index }) {
  const gone = Object.entries(about.evicted).filter(([, blocks]) => blocks > 0);
  return html`<dl class="facts">
    <div><dt>Size</dt><dd><${Bar} share=${share(about.bytes, about.most_bytes)} label=${`${bytes(about.bytes)} of ${bytes(about.most_bytes)}`} /></dd></div>
    <div><dt>Blocks, all replicas</dt><dd>${count(index.blocks)}</dd></div>
    <div><dt>Forgotten after</dt><dd>${age(about.ttl_s)} without use</dd></div>
    <div><dt>Blocks evicted</dt><dd>${gone.map(([why, blocks]) => `${short(blocks)} ${why}`).join(", ") || "none"}</dd></div>
  </dl>`;
}

function Detail({ node, heads, tone }) {
  const head = heads.get(node.way.slice(0, 16));
  return html`<section class="panel detail" aria-label="Selected prefix">
    <div class="panel-head"><h2>Prefix <code>${digest(last(node.way))}</code></h2></div>
    <dl class="facts">
      <div><dt>Tokens of this part</dt><dd>${count(node.tokens)} in ${count(node.blocks)} blocks</dd></div>
      <div><dt>Tokens before it</dt><dd>${count(node.depth_tokens)}</dd></div>
      <div><dt>Last used</dt><dd>${node.idle_s === null ? "nobody holds it" : node.idle_s < 1 ? "now" : `${age(node.idle_s)} ago`}</dd></div>
      <div><dt>Continued by</dt><dd>${count(node.children)} prefixes</dd></div>
      ${head && html`<div><dt>Models</dt><dd><bdi>${[...head.models].map(shown).join(", ")}</bdi></dd></div>
        <div><dt>Tenants</dt><dd><bdi>${[...head.tenants].map(shown).join(", ")}</bdi></dd></div>`}
    </dl>
    <table class="plain"><caption>Holders</caption>
      <thead><tr><th scope="col">Replica</th><th scope="col">Holds</th><th scope="col" class="number">Used</th></tr></thead>
      <tbody>${node.holders.map((holder) => html`<tr key=${holder.replica}>
        <th scope="row"><span class=${`swatch tone-${tone(holder.replica)}`} aria-hidden="true"></span><${Name} of=${holder.replica} /></th>
        <td><${Bar} share=${share(holder.blocks, node.blocks)} label=${`${count(holder.blocks)} of ${count(node.blocks)}`} /></td>
        <td class="number">${age(holder.idle_s)}</td></tr>`)}</tbody></table>
    ${node.further_holders > 0 && html`<p class="hint">${count(node.further_holders)} further holders.</p>`}
  </section>`;
}

export function Index({ live }) {
  const { open, nodes, about, problem, toggle, more } = useTree();
  const [selected, select] = useState("");
  const { replicas, index } = live.frame;
  const tones = new Map(replicas.slice(0, TONES).map((replica, at) => [replica.name, at]));
  const tone = (name) => tones.get(name) ?? "other";
  const root = nodes.get("");
  const all = new Map([...nodes.values()].flatMap((node) => node.shown.map((child) => [child.way, child])));
  if (problem && !root) return html`<p class="wrong" role="alert">${problem}</p>`;
  if (!root) return html`<p class="wait">Asking the gateway.</p>`;
  const chosen = all.get(selected);
  return html`
    <${Sizes} about=${about} index=${index} />
    ${root.children === 0
      ? html`<section class="panel"><${Empty} title="The index is empty">Each prompt that goes to a replica is remembered here as keys of its blocks, until it is
        evicted or ${age(about.ttl_s)} without use. Send requests, and prompts that begin alike will share a branch.</${Empty}></section>`
      : html`<div class="split">
        <section class="panel"><div class="panel-head"><h2>${count(root.children)} heads of prompts</h2><${Legend} replicas=${replicas} tone=${tone} /></div>
          <${Tree} root=${root} nodes=${nodes} open=${open} heads=${live.heads} tone=${tone} selected=${selected}
            onSelect=${select} onToggle=${toggle} onMore=${more} />
          <p class="hint">A circle is a stretch of tokens that its holders share; larger is longer, paler is older. Arrow keys go through it, Enter opens and closes.</p>
        </section>
        ${chosen ? html`<${Detail} node=${chosen} heads=${live.heads} tone=${tone} />`
          : html`<section class="panel detail"><${Empty} title="No prefix selected">Choose a circle to see who holds it, how long it is, and when it was last used.</${Empty}></section>`}
      </div>`}`;
}
