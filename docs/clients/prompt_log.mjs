// Names of a conversation (prompt-log/1), for clients of chat completions: copy this file. Node 18 or later.
// head(messages) is what the header Prompt-Log has as `input`, and its `expect` verifies: expect="pl1_...".
// Texts, reasoning and tool calls are named; a message with anything else (images, files) throws: send it without `expect`.
import { createHash } from "node:crypto";

const READ = ["role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "id"];
const sha = (...pieces) => pieces.reduce((hash, piece) => hash.update(piece), createHash("sha256")).digest();
const name = (prefix, bytes) => prefix + bytes.toString("base64url");
const refuse = (text) => { throw new Error(text); };

// Canonical JSON (RFC 8785).
export const jcs = (value) =>
  typeof value === "string" && !value.isWellFormed?.() ? refuse("half a surrogate pair")
  : typeof value === "number" && !Number.isFinite(value) ? refuse("a number beyond all doubles")
  : value === null || typeof value !== "object" ? JSON.stringify(value)
  : Array.isArray(value) ? `[${value.map(jcs).join(",")}]`
  : `{${Object.keys(value).sort().map((key) => `${jcs(key)}:${jcs(value[key])}`).join(",")}}`;

export const EMPTY = sha("prompt-log/1 log\n");
export const frameName = (frame) => name("pf1_", sha("prompt-log/1 frame\n", jcs(frame)));
export const digestOf = (entry) => sha("prompt-log/1 entry\n", jcs(entry));
export const extend = (chain, entry) => sha("prompt-log/1 log\n", chain, digestOf(entry));
export const headName = (chain) => name("pl1_", chain);

const parts = (content) => {
  const list = typeof content === "string" ? [{ type: "text", text: content }] : (content ?? []);
  if (list.some((part) => part.type !== "text" || Object.keys(part).length !== 2)) refuse("only texts are named here");
  return list.filter((part) => part.text).map(({ text }) => ({ text }));
};

const parsed = (text) => {
  try { return JSON.parse(text); } catch { return text; } // no JSON
};

// The canonical entry of a message. open: ids of the calls without a result, the oldest first.
export const entryOf = (message, open) => {
  const empty = (value) => value === null || value === undefined || (Array.isArray(value) && !value.length);
  const more = Object.keys(message).filter((key) => !READ.includes(key) && !empty(message[key]));
  if (more.length) refuse(`members that are not named here: ${more}`);
  const of = message.role === "tool" ? Math.max(0, open.indexOf(message.tool_call_id)) : 0;
  if (message.role === "tool") open.splice(of, 1);
  const calls = (message.tool_calls ?? []).map((call) => {
    open.push(call.id);
    return { name: call.function.name, arguments: parsed(call.function.arguments) };
  });
  const content = parts(message.content), reasoning = message.reasoning || message.reasoning_content;
  const made = { role: message.role === "developer" ? "system" : message.role };
  if (of) made.of = of;
  if (content.length) made.content = content;
  if (reasoning) made.reasoning = reasoning;
  if (calls.length) made.calls = calls;
  return made;
};

// The head of the whole log. Leading texts of the system are in the frame, not in the log.
export const head = (messages) => {
  const open = [], entries = messages.map((message) => entryOf(message, open));
  const first = entries.findIndex(({ role, reasoning, calls }) => role !== "system" || reasoning || calls);
  return headName((first < 0 ? [] : entries.slice(first)).reduce(extend, EMPTY));
};
