// A new key: what it may do. And its secret, which is shown once.
import { html, useRef, useState, Dialog } from "./view.js";
import { call } from "./connection.js";
import { shown } from "./format.js";

const TEXTS = [["tenant", "Tenant", "acme", true], ["name", "Name", "ci", false]];
const LISTS = [["models", "Models", "qwen3-*, llama (none: all)"], ["pools", "Pools", "(none: all)"]];
const NUMBERS = [
  ["budget_usd_day", "USD a day", "any"],
  ["budget_usd_month", "USD a month", "any"],
  ["requests_per_minute", "Requests a minute", "1"],
  ["uncached_tokens_per_minute", "Uncached tokens a minute", "1"],
  ["priority", "Priority, -100 to 100", "1"],
];

function settings(form) {
  const given = new FormData(form);
  const made = {};
  for (const [name] of [...TEXTS, ["expires_at"]]) if (given.get(name).trim()) made[name] = given.get(name).trim();
  for (const [name] of LISTS) {
    const parts = given.get(name).split(",").map((part) => part.trim()).filter(Boolean);
    if (parts.length) made[name] = parts;
  }
  for (const [name] of NUMBERS) if (given.get(name) !== "") made[name] = Number(given.get(name));
  return made;
}

export function KeyForm({ onClose, onDone }) {
  const form = useRef(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      onDone(await call("keys", { method: "POST", body: settings(form.current) }));
    } catch (error) {
      setProblem(error.message);
      setBusy(false);
    }
  };
  return html`<${Dialog} title="New key" onClose=${onClose}>
    <form ref=${form} onSubmit=${send} class="fields" autocomplete="off">
      ${TEXTS.map(([name, label, hint, required]) => html`<label><span>${label}</span>
        <input name=${name} placeholder=${hint} maxlength="64" required=${required} spellcheck=${false} /></label>`)}
      ${LISTS.map(([name, label, hint]) => html`<label><span>${label}, with commas</span>
        <input name=${name} placeholder=${hint} maxlength="2000" spellcheck=${false} /></label>`)}
      ${NUMBERS.map(([name, label, step]) => html`<label><span>${label}</span>
        <input name=${name} type="number" step=${step} inputmode="decimal" /></label>`)}
      <label><span>Expires on</span><input name="expires_at" type="date" /></label>
      <p class="wrong" role="alert">${problem}</p>
      <div class="buttons"><button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="primary" disabled=${busy}>Make the key</button></div>
    </form>
  </${Dialog}>`;
}

export function Secret({ made, onClose }) {
  const [copied, setCopied] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(made.key);
      setCopied("It is copied.");
    } catch {
      setCopied("This browser does not allow it: select the key and copy it.");
    }
  };
  return html`<${Dialog} title=${`The key ${made.id}`} onClose=${onClose} stays>
    <p>Give it to <bdi>${shown(made.tenant)}</bdi> now: it is not kept anywhere, and not shown again.</p>
    <p class="secret"><code>${made.key}</code></p>
    <p class="hint" role="status">${copied}</p>
    <div class="buttons"><button type="button" onClick=${copy}>Copy</button>
      <button type="button" class="primary" onClick=${onClose}>I have it</button></div>
  </${Dialog}>`;
}
