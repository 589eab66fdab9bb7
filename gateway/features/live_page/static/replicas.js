// The replicas: load, health, what they hold; an operator drains them here.
import { html, useState, Badge, Bar, Dialog, Empty, Name, Said, Scroll } from "./view.js";
import { call } from "./connection.js";
import { count, percent, share, short, shown } from "./format.js";

function health(replica) {
  if (replica.leaving) return ["wait", "leaving"];
  if (!replica.up) return ["bad", "down"];
  if (replica.hung) return ["bad", "hangs"];
  if (replica.draining) return ["warn", "draining"];
  if (replica.asleep) return ["warn", "asleep"];
  if (replica.circuit !== "closed") return ["warn", `circuit ${replica.circuit.replace("_", " ")}`];
  return ["good", "up"];
}

function Row({ replica, busy, onDrain }) {
  const [tone, text] = health(replica);
  const capacity = replica.capacity_tokens ?? replica.learned_capacity_tokens;
  const held = share(replica.held_tokens, capacity);
  const label = capacity ? `${short(replica.held_tokens)} of ${short(capacity)}` : `${short(replica.held_tokens)}, size unknown`;
  const more = replica.further_models ? ` and ${replica.further_models} more` : "";
  const what = replica.draining ? "Undrain" : "Drain";
  return html`<tr>
    <th scope="row"><${Name} of=${replica.name} />
      <span class="under">${shown(replica.engine)}${replica.role && ` · ${replica.role}`} · ${replica.models.map(shown).join(", ") || "no models"}${more}</span></th>
    <td data-label="State"><${Badge} tone=${tone}>${text}</${Badge}>
      ${replica.error && !replica.up && html`<span class="under">${shown(replica.error)}</span>`}
      ${replica.findings.length > 0 && html`<span class="under bad-text">${replica.findings.join(", ").replaceAll("_", " ")}</span>`}</td>
    <td data-label="Running" class="number">${count(replica.inflight)}
      <span class="under">${count(replica.decoding)} decoding</span></td>
    <td data-label="Prefill ahead" class="number">${short(replica.booked_tokens)}
      <span class="under">at ${short(replica.prefill_tokens_per_second)}/s</span></td>
    <td data-label="Holds (tokens)"><${Bar} share=${held} label=${label} /></td>
    <td data-label="Cached" class="number">${percent(share(replica.cached_tokens, replica.prompt_tokens))}
      <span class="under">of ${short(replica.prompt_tokens)}</span></td>
    <td class="actions">${!replica.leaving && html`<button type="button" aria-disabled=${busy} aria-label=${`${what} ${shown(replica.name)}`}
      onClick=${() => busy || onDrain(replica)}>${what}</button>`}</td>
  </tr>`;
}

function Pool({ pool, replicas, busy, onDrain }) {
  const load = pool ? `${count(pool.running)} running of ${count(pool.limit)}, ${count(pool.waiting)} waiting` : "no new requests";
  const title = pool ? shown(pool.name) : "leaving";
  return html`<section class="panel">
    <div class="panel-head"><h2><bdi>${title}</bdi></h2><p>${load}</p></div>
    ${replicas.length ? html`<${Scroll} label=${`Replicas of ${title}`}><table class="cards fleet">
      <thead><tr><th scope="col">Replica</th><th scope="col">State</th><th scope="col" class="number">Running</th>
        <th scope="col" class="number">Prefill ahead</th><th scope="col">Holds (tokens)</th><th scope="col" class="number">Cached</th>
        <th scope="col"><span class="unseen">Actions</span></th></tr></thead>
      <tbody>${replicas.map((replica) => html`<${Row} key=${replica.name} replica=${replica} busy=${busy} onDrain=${onDrain} />`)}</tbody>
    </table></${Scroll}>` : html`<${Empty} title="No replicas">Give the pool replicas in the configuration, a source in <code>discovery</code>, or
      add one: <code>POST /warmroute/replicas</code>.</${Empty}>`}
  </section>`;
}

function Confirm({ replica, last, onClose, onYes }) {
  return html`<${Dialog} title=${`Drain ${shown(replica.name)}?`} onClose=${onClose}>
    <p>It gets no new requests. What runs there finishes (${count(replica.inflight)} now).</p>
    ${last && html`<p class="wrong">No other replica of this pool takes requests: its clients will get errors, or wait.</p>`}
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
      <button type="button" class="danger" onClick=${onYes}>Drain</button></div>
  </${Dialog}>`;
}

export function Replicas({ live }) {
  const [asked, setAsked] = useState(null); // the replica that is to be drained, if the operator is sure
  const [busy, setBusy] = useState(false);
  const [said, say] = useState("");
  const { replicas, further_replicas: further, pools } = live.frame;
  const drain = async (replica) => {
    const on = !replica.draining;
    setAsked(null);
    setBusy(true);
    try {
      await call(on ? "drain" : "undrain", { method: "POST", body: { name: replica.name } });
      say(`${shown(replica.name)} ${on ? "drains: it gets no new requests." : "takes requests again."}`);
    } catch (error) {
      say(`Not done: ${error.message}`);
    }
    setBusy(false);
  };
  const wanted = (replica) => (replica.draining ? drain(replica) : setAsked(replica));
  const leaving = replicas.filter((replica) => replica.pool === null);
  const usable = (each) => each.up && !each.draining && !each.asleep && each.role !== "prefill";
  const others = asked && replicas.filter((each) => each.pool === asked.pool && each.name !== asked.name && usable(each));
  return html`
    <${Said} text=${said} />
    ${pools.map((pool) => html`<${Pool} key=${pool.name} pool=${pool} busy=${busy} onDrain=${wanted}
      replicas=${replicas.filter((replica) => replica.pool === pool.name)} />`)}
    ${leaving.length > 0 && html`<${Pool} replicas=${leaving} busy=${busy} onDrain=${wanted} />`}
    ${further > 0 && html`<p class="hint">${count(further)} further replicas are not shown here: GET /warmroute/replicas lists all.</p>`}
    ${asked && html`<${Confirm} replica=${asked} last=${others.length === 0} onClose=${() => setAsked(null)} onYes=${() => drain(asked)} />`}`;
}
