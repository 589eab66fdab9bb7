// The page: its head, its tabs by URL fragment, and who may see them.
import { html, render, useEffect, useState } from "./view.js";
import { key, setKey } from "./connection.js";
import { connect, useLive } from "./store.js";
import { ThemeButton } from "./theme.js";
import { Login } from "./login.js";
import { Overview } from "./overview.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { Runs } from "./runs.js";
import { Index } from "./index.js";
import { Keys } from "./keys.js";
import { Doctor } from "./doctor.js";

const TABS = [
  ["overview", "Overview", Overview],
  ["replicas", "Replicas", Replicas],
  ["requests", "Requests", Requests],
  ["runs", "Runs", Runs],
  ["index", "Prefix index", Index],
  ["keys", "Keys", Keys],
  ["doctor", "Doctor", Doctor],
];

function named(fragment) {
  return TABS.find(([name]) => name === fragment.slice(1)) ?? TABS[0];
}

function useTab() {
  const [tab, set] = useState(named(location.hash));
  useEffect(() => {
    const listener = () => set(named(location.hash));
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return tab;
}

const LINKS = { connecting: ["wait", "connecting"], live: ["good", "live"], lost: ["bad", "no connection, trying again"] };

function Link({ live }) {
  const problem = live.link === "lost" && live.why ? `${live.why} Trying again.` : live.problem;
  const [tone, text] = problem ? ["warn", problem] : LINKS[live.link] ?? LINKS.lost;
  return html`<span class=${`link badge ${tone}`} role="status"><span class="dot" aria-hidden="true"></span>${text}</span>`;
}

function About({ frame }) {
  const workers = `${frame.workers} worker${frame.workers === 1 ? "" : "s"}`;
  return html`<span class="about">${frame.version} · ${workers} · policy ${frame.policy}</span>`;
}

function App() {
  const live = useLive();
  const [tab, title, View] = useTab();
  const refused = live.link?.status ? live.link : null;
  useEffect(() => {
    document.title = `${title} · Warmroute`;
    const link = document.querySelector("nav [aria-current]"); // on a phone, not all of them have room
    const list = link?.closest("ul");
    if (list) list.scrollLeft = link.offsetLeft - list.offsetLeft - (list.clientWidth - link.offsetWidth) / 2;
  }, [title, !refused]);
  if (refused) return html`<${Login} refused=${refused} />`;
  const leave = () => {
    setKey("");
    connect();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>To the content</a>
    <header>
      <div class="brand"><img src="icon.svg" alt="" width="22" height="22" /><span>Warmroute</span></div>
      <${Link} live=${live} />
      ${live.frame && html`<${About} frame=${live.frame} />`}
      <span class="tools"><${ThemeButton} />
        ${key() && html`<button type="button" class="quiet" onClick=${leave} title="Forget the admin key in this tab">Sign out</button>`}</span>
    </header>
    <nav aria-label="Views"><ul>${TABS.map(([name, text]) => html`
      <li><a href=${`#${name}`} aria-current=${name === tab ? "page" : null}>${text}</a></li>`)}</ul></nav>
    <main id="main" tabindex="-1">
      <h1 class="unseen">${title}</h1>
      ${live.frame ? html`<${View} live=${live} />` : html`<p class="wait">Waiting for the gateway.</p>`}
    </main>`;
}

function skip(event) {
  event.preventDefault(); // the fragment is the tab's
  document.getElementById("main").focus();
}

connect();
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
