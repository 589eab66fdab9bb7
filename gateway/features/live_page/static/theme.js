// Light, dark, or as the system has it; a choice is remembered in this browser.
import { html, useState } from "./view.js";

const KEY = "warmroute-theme";
const NEXT = { "": "dark", dark: "light", light: "" };
const LABEL = { "": "as the system", dark: "dark", light: "light" };
const SIGN = { "": "◐", dark: "●", light: "○" };

/** Called with no argument when colours have changed: what is painted on a canvas has to be painted again. */
export const repaint = new Set();

function changed() {
  for (const paint of repaint) paint();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);

export function ThemeButton() {
  const [theme, set] = useState(document.documentElement.dataset.theme ?? "");
  const turn = () => {
    const next = NEXT[theme];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // then it is chosen again next time
    }
    set(next);
    changed();
  };
  const label = `Colours: ${LABEL[theme]}`;
  return html`<button type="button" class="quiet" onClick=${turn} aria-label=${label} title=${label}>${SIGN[theme]}</button>`;
}

/** A colour of the page, for a canvas. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
