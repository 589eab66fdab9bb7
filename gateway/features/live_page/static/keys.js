// Keys of clients: whose they are, what they may do, what of their budgets is used; made, rotated, revoked.
import { html, useCallback, useEffect, useRef, useState, Badge, Bar, Dialog, Empty, Name, Said, Scroll } from "./view.js";
import { call } from "./connection.js";
import { KeyForm, Secret } from "./key_form.js";
import { count, money, share, short, shown } from "./format.js";

const EVERY_MS = 5000;

function standing(key) {
  if (key.revoked_at) return ["bad", "revoked"];
  if (key.expires_at && Date.parse(key.expires_at) < Date.now()) return ["bad", "expired"];
  if (key.rotated_until && Date.parse(key.rotated_until) > Date.now()) return ["warn", "rotating"];
  return ["good", "valid"];
}

function Budget({ used, limit }) {
  if (!limit) return html`<span class="under">${used ? money(used) : "no limit"}</span>`;
  const part = share(used ?? 0, limit);
  return html`<${Bar} share=${part} tone=${part >= 1 ? "bad" : part > 0.8 ? "warn" : ""} label=${`${money(used ?? 0)} of ${money(limit)}`} />`;
}

function Row({ item, onAsk }) {
  const [tone, text] = standing(item);
  const { used } = item;
  const rates = [[item.requests_per_minute, "requests"], [item.uncached_tokens_per_minute, "uncached tokens"]].filter(([limit]) => limit);
  const title = shown(item.name || item.id);
  return html`<tr>
    <th scope="row"><code>${item.id}</code><span class="under"><bdi>${shown(item.name)}</bdi></span></th>
    <td data-label="Tenant"><${Name} of=${item.tenant} /></td>
    <td data-label="State"><${Badge} tone=${tone}>${text}</${Badge}>
      ${item.expires_at && html`<span class="under">until ${shown(item.expires_at).slice(0, 10)}</span>`}</td>
    <td data-label="Models"><bdi>${shown(item.models.join(", ")) || "all"}</bdi></td>
    <td data-label="A minute">${rates.map(([limit, what]) => html`<span class="line">${short(limit)} ${what}</span>`)}
      ${!rates.length && html`<span class="under">no limit</span>`}</td>
    <td data-label="Today"><${Budget} used=${used?.usd_day} limit=${item.budget_usd_day} /></td>
    <td data-label="This month"><${Budget} used=${used?.usd_month} limit=${item.budget_usd_month} /></td>
    <td class="actions">${!item.revoked_at && html`
      <button type="button" aria-label=${`Rotate ${title}`} onClick=${() => onAsk("rotate", item)}>Rotate</button>
      <button type="button" class="danger" aria-label=${`Revoke ${title}`} onClick=${() => onAsk("revoke", item)}>Revoke</button>`}</td>
  </tr>`;
}

const QUESTIONS = {
  rotate: ["Rotate", "A new secret is valid at once. The former one goes on for a day, so that clients can change over."],
  revoke: ["Revoke", "Requests with this key are refused from now on. This cannot be undone."],
};

function Confirm({ what, item, onClose, onYes }) {
  const [title, text] = QUESTIONS[what];
  const sent = useRef(false); // a second click would be a second rotation, which ends the former key at once
  const yes = () => {
    if (sent.current) return;
    sent.current = true;
    onYes();
  };
  return html`<${Dialog} title=${`${title} ${item.id}?`} onClose=${onClose}>
    <p>The key <bdi>${shown(item.name || item.id)}</bdi> of <bdi>${shown(item.tenant)}</bdi>. ${text}</p>
    <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
      <button type="button" class=${what === "revoke" ? "danger" : "primary"} onClick=${yes}>${title}</button></div>
  </${Dialog}>`;
}

function useKeys() {
  const [keys, setKeys] = useState(null);
  const [problem, setProblem] = useState(null);
  const load = useCallback(async () => {
    try {
      const found = await call("keys");
      setKeys(found);
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
  }, []);
  useEffect(() => {
    load();
    const timer = setInterval(load, EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  return { keys, problem, load };
}

export function Keys() {
  const { keys, problem, load } = useKeys();
  const [asked, ask] = useState(null); // ["rotate" or "revoke", a key], or ["create"]
  const [secret, setSecret] = useState(null);
  const [said, say] = useState("");
  const acted = useRef(false);
  useEffect(() => { // what was done may have taken the button away that had the focus
    if (!acted.current || document.activeElement !== document.body) return;
    acted.current = false;
    document.getElementById("main").focus();
  }, [keys]);
  const act = async (path, options, done) => {
    try {
      const made = await call(path, options);
      ask(null);
      say(done(made));
      if (made.key) setSecret(made);
    } catch (error) {
      say(`Not done: ${error.message}`);
      ask(null);
    }
    acted.current = true;
    await load();
  };
  const confirmed = () => {
    const [what, item] = asked;
    if (what === "revoke") return act(`keys/${item.id}`, { method: "DELETE" }, () => `${item.id} is revoked.`);
    return act(`keys/${item.id}/rotate`, { method: "POST", body: {} }, () => `${item.id} has a new secret.`);
  };
  if (problem?.code === "keys_not_kept") {
    return html`<section class="panel"><${Empty} title="This gateway keeps no keys">${problem.message} With <code>keys: {url: sqlite}</code> in
      the configuration, each client gets a key of its own, with a tenant, limits and budgets. See docs/keys.md.</${Empty}></section>`;
  }
  if (problem && !keys) return html`<p class="wrong" role="alert">${problem.message}</p>`;
  if (!keys) return html`<p class="wait">Asking the gateway.</p>`;
  const made = (key) => `${key.id} is made, for ${shown(key.tenant)}.`;
  return html`
    <div class="toolbar"><button type="button" class="primary" onClick=${() => ask(["create"])}>New key</button>
      <p class="hint">${count(keys.keys.length)}${keys.has_more ? " of more" : ""} keys. Budgets are of UTC's days and months.</p></div>
    <${Said} text=${said} />
    <section class="panel">${keys.keys.length ? html`<${Scroll} label="Keys"><table class="cards">
      <thead><tr>${["Key", "Tenant", "State", "Models", "A minute", "Today", "This month"].map((text) => html`<th scope="col">${text}</th>`)}
        <th scope="col"><span class="unseen">Actions</span></th></tr></thead>
      <tbody>${keys.keys.map((item) => html`<${Row} key=${item.id} item=${item} onAsk=${(what, key) => ask([what, key])} />`)}</tbody>
    </table></${Scroll}>` : html`<${Empty} title="No keys yet">Make the first one here, or with <code>warmroute keys create</code>.</${Empty}>`}</section>
    ${asked?.[0] === "create" && html`<${KeyForm} onClose=${() => ask(null)} onDone=${(key) => { ask(null); say(made(key)); setSecret(key); load(); }} />`}
    ${asked?.[1] && html`<${Confirm} what=${asked[0]} item=${asked[1]} onClose=${() => ask(null)} onYes=${confirmed} />`}
    ${secret && html`<${Secret} made=${secret} onClose=${() => setSecret(null)} />`}`;
}
