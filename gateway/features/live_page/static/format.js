// Numbers, times and names as text: the same units everywhere.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MOST = 160; // characters of a name
// Control and format characters, line and paragraph separators: they would be invisible, or turn the text around.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu;

/** A text of unknown origin, as it may stand on a page. */
export function shown(text) {
  const whole = String(text ?? "");
  const short = whole.length > MOST ? `${whole.slice(0, MOST)}…` : whole;
  return short.replace(UNSEEN, "\ufffd");
}

export function count(value) {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

/** 12.3k */
export function short(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? count(value) : SHORT.format(value).toLowerCase().replace("m", "M").replace("b", "G");
}

export function rate(value) {
  return value < 10 && !Number.isInteger(value) ? value.toFixed(1) : count(value);
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function share(part, whole) {
  return whole > 0 ? part / whole : null;
}

/** Seconds as a duration. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0";
  if (size < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(seconds * 1000).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 60) return `${seconds.toFixed(size < 10 ? 2 : 1)} s`;
  return age(seconds);
}

/** Seconds as an age, coarsely. */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function money(usd) {
  if (usd === null || usd === undefined) return "–";
  const size = Math.abs(usd);
  if (size === 0) return "$0";
  if (size >= 1000) return `$${count(usd)}`;
  if (size >= 0.1) return `$${usd.toFixed(2)}`;
  if (size >= 0.000001) return `$${Number(usd.toPrecision(2)).toFixed(Math.min(8, 1 - Math.floor(Math.log10(size))))}`;
  return "<$0.000001";
}

/** Unix seconds as the time of the day. */
export function clock(seconds) {
  return CLOCK.format(new Date(seconds * 1000));
}

/** 1st, 2nd, 3rd, 4th, 11th. */
export function ordinal(number) {
  const ending = Math.floor(number / 10) % 10 === 1 ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[number % 10] ?? "th");
  return `${number}${ending}`;
}

export function bytes(value) {
  if (value >= 1 << 30) return `${(value / (1 << 30)).toFixed(1)} GiB`;
  if (value >= 1 << 20) return `${(value / (1 << 20)).toFixed(1)} MiB`;
  return `${count(value / 1024)} KiB`;
}

/** The beginning of a block key. */
export function digest(key) {
  return key ? key.slice(0, 8) : "–";
}
