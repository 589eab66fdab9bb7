// What all views are made of: Preact's functions, and the few elements that more than one view has.
import {
  html, render, useCallback, useEffect, useMemo, useRef, useState,
} from "./vendor/htm-preact.js";
import { shown } from "./format.js";

export { html, render, useCallback, useEffect, useMemo, useRef, useState };

/** Calls `load` at once and then every_ms after each end of it, while `on`. */
export function usePolled(load, every_ms, on = true) {
  useEffect(() => {
    if (!on) return undefined;
    let timer = 0;
    let left = false;
    const again = async () => {
      await load();
      if (!left) timer = setTimeout(again, every_ms);
    };
    again();
    return () => {
      left = true;
      clearTimeout(timer);
    };
  }, [on]);
}

/** A name that somebody else has chosen: as text, on its own as to the direction of writing, cut by the layout. */
export function Name({ of, className = "" }) {
  const text = shown(of);
  return html`<bdi class=${`name ${className}`} title=${text}>${text || "–"}</bdi>`;
}

/** What to say, and to do, where there is nothing to show. */
export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p><p>${children}</p></div>`;
}

/** A part of a whole, as a bar beside its text. share: 0 to 1, null: unknown. */
export function Bar({ share, label, tone = "" }) {
  const percent = share === null ? 0 : Math.max(0, Math.min(100, share * 100));
  return html`<span class="bar-cell">
    <span class=${`bar ${tone}`} aria-hidden="true"><span class="bar-fill" style=${{ width: `${percent}%` }}></span></span>
    <span class="bar-label">${label}</span>
  </span>`;
}

export function Badge({ tone, children }) {
  return html`<span class=${`badge ${tone}`}><span class="dot" aria-hidden="true"></span>${children}</span>`;
}

/** A modal dialog of the browser's own, which keeps the focus inside and closes with Escape, or a click beside it.
 * stays: only its buttons close it. A browser closes one at a second Escape all the same, unless the key does nothing. */
export function Dialog({ title, onClose, children, wide = false, stays = false }) {
  const dialog = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    const shown = dialog.current;
    shown.showModal();
    return () => {
      shown.close(); // while it is open, nothing outside takes the focus
      (before?.isConnected ? before : document.getElementById("main"))?.focus();
    };
  }, []);
  const close = (event) => {
    event.preventDefault();
    if (!stays) onClose();
  };
  return html`<dialog ref=${dialog} class=${wide ? "wide" : ""} aria-labelledby="dialog-title" onCancel=${close}
      onKeyDown=${(event) => event.key === "Escape" && close(event)}
      onClick=${(event) => event.target === dialog.current && close(event)}>
    <div class="dialog-body">
      <div class="dialog-head">
        <h2 id="dialog-title">${title}</h2>
        <button type="button" class="quiet" onClick=${onClose} aria-label="Close">✕</button>
      </div>
      ${children}
    </div>
  </dialog>`;
}

/** Scrolls sideways by itself, so that the page does not; reachable by keyboard. */
export function Scroll({ label, children }) {
  return html`<div class="scroll" role="region" aria-label=${label} tabindex="0">${children}</div>`;
}

/** A short text that is read out when it changes, and not more often. */
export function Said({ text }) {
  return html`<p class="said" role="status">${text}</p>`;
}
