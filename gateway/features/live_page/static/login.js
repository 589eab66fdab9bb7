// Asks for the admin key where the gateway wants one, and says why it refuses where a key would not help.
import { html, useEffect, useRef } from "./view.js";
import { key, setKey } from "./connection.js";
import { connect } from "./store.js";

export function Login({ refused }) {
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const send = (event) => {
    event.preventDefault();
    setKey(field.current.value.trim());
    connect();
  };
  if (refused.status === 403) {
    return html`<main class="login"><h1>Not from here</h1><p>${refused.message}</p>
      <p>Open the page on the gateway's machine, or through <code>kubectl port-forward</code> or <code>ssh -L</code>; or set
      WARMROUTE_ADMIN_KEY, and this page will ask for it.</p>
      <button type="button" onClick=${connect}>Try again</button></main>`;
  }
  return html`<main class="login">
    <h1>Warmroute</h1>
    <form onSubmit=${send}>
      <label for="key">Admin key (WARMROUTE_ADMIN_KEY of the gateway)</label>
      <input id="key" type="password" ref=${field} autocomplete="current-password" required spellcheck=${false} />
      <button type="submit" class="primary">Open</button>
      <p class="hint">It stays in this tab, and is forgotten when the tab is closed.</p>
      <p class="wrong" role="alert">${key() ? "The gateway does not take this key." : ""}</p>
    </form>
  </main>`;
}
