// What the gateway has sent, put together: the one state that all views read. A frame brings what is new; nothing grows for ever.
import { useEffect, useState } from "./view.js";
import { follow } from "./connection.js";

const MOST_REQUESTS = 200;
const MOST_POINTS = 450;
const HEADS = 400; // heads of prompts of which models and tenants are remembered
const RATE_S = 10; // seconds of which the sampling of rows is stated

const listeners = new Set();
let stop = () => {};
export const state = {
  link: "connecting", // connecting, live, lost, or a Refused
  why: "", // it is lost, if the gateway has said so
  problem: "",
  now: 0,
  frame: null, // the last one: replicas, pools, index, ...
  points: [],
  requests: new Map(), // by key, the oldest first
  heads: new Map(), // by head: models, tenants and requests seen
  sampled: [], // [time, ended, hidden] of the last seconds
};

export function connect() {
  stop();
  state.link = "connecting";
  stop = follow(onEvent, (link, why = "") => {
    state.link = link;
    state.why = why;
    changed();
  });
  changed();
}

function onEvent(name, data) {
  state.problem = name === "problem" ? data.problem : "";
  if (name === "hello") {
    state.points = [];
    state.requests.clear();
    state.heads.clear();
    state.sampled = [];
  }
  if (name === "hello" || name === "frame") take(data);
  changed();
}

function take(data) {
  state.frame = data;
  state.now = data.now;
  state.points = [...state.points, ...data.points].slice(-MOST_POINTS);
  for (const row of data.requests) {
    const known = state.requests.get(row.key);
    state.requests.set(row.key, row); // at its old place, if it has one
    if (!known) remember(row);
  }
  for (const key of state.requests.keys()) {
    if (state.requests.size <= MOST_REQUESTS) break;
    state.requests.delete(key);
  }
  state.sampled.push([data.now, data.ended, data.hidden]);
  state.sampled = state.sampled.filter(([time]) => time > data.now - RATE_S);
}

function remember({ head, model, tenant }) {
  if (!head) return;
  const known = state.heads.get(head) ?? { requests: 0, models: new Set(), tenants: new Set() };
  known.requests += 1;
  if (known.models.size < 3) known.models.add(model);
  if (known.tenants.size < 3) known.tenants.add(tenant);
  state.heads.delete(head);
  state.heads.set(head, known);
  if (state.heads.size > HEADS) state.heads.delete(state.heads.keys().next().value);
}

function changed() {
  for (const listener of listeners) listener();
}

/** The state, and a new rendering whenever it changes. */
export function useLive() {
  const [, again] = useState(0);
  useEffect(() => {
    let number = 0;
    const listener = () => again((number += 1));
    listeners.add(listener);
    listener(); // what has come before it was there: a refusal comes once
    return () => listeners.delete(listener);
  }, []);
  return state;
}

/** Sums over the last seconds of points. */
export function recent(seconds) {
  const steps = state.frame ? Math.max(1, Math.round(seconds / state.frame.step_s)) : 1;
  const points = state.points.slice(-steps);
  const sum = (field) => points.reduce((whole, point) => whole + point[field], 0);
  const fields = ["requests", "errors", "refused", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_usd", "saved_usd"];
  const length = points.length * (state.frame?.step_s ?? 1);
  return { seconds: length, last: points[points.length - 1], ...Object.fromEntries(fields.map((field) => [field, sum(field)])) };
}
