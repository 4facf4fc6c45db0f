// Elements, numbers and times. Text from the server only ever becomes a text node: nothing here parses HTML.

/** An element. Attributes: `on…` are listeners, `class` and others as in HTML, true and false are present and absent. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children)
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children)
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value)
    else if (key in PROPERTIES) element[key] = value
    else element.setAttribute(key, value === true ? "" : value)
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false))
  return element
}

const PROPERTIES = { value: 1, checked: 1, disabled: 1, hidden: 1, textContent: 1 }

/** What came from a stream or a name: isolated, so that its direction cannot reorder what stands beside it. */
export function untrusted(text, attributes = {}) {
  return h("bdi", attributes, visible(text))
}

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g

/** Text in which characters that act on others, or on a terminal, are shown instead of obeyed. */
export function visible(text) {
  return text.replace(CONTROLS, (one) => {
    const code = one.charCodeAt(0)
    if (code < 0x20) return String.fromCharCode(0x2400 + code)
    return code === 0x7f ? "\u2421" : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`
  })
}

export const count = (number) => number.toLocaleString("en-US")

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]

export function bytes(size) {
  let unit = 0
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024
    unit += 1
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`
}

/** A number with three figures and a suffix, for charts. */
export function short(number) {
  for (const [size, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(number) >= size) return `${trim(number / size)}${suffix}`
  }
  return trim(number)
}

const trim = (number) => String(Number(number.toPrecision(3)))

export function seconds(value) {
  if (!Number.isFinite(value)) return "–"
  return value < 0.001 ? `${Math.round(value * 1e6)} µs` : value < 1 ? `${trim(value * 1000)} ms` : `${trim(value)} s`
}

/** A time as this place tells it, with UTC on hover; `ago` says it relative to now. */
export function time(milliseconds, { ago = false } = {}) {
  const date = new Date(milliseconds)
  if (!milliseconds || Number.isNaN(date.getTime())) return h("span", { class: "dim" }, "–")
  const text = ago ? since(milliseconds) : date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" })
  return h("time", { datetime: date.toISOString(), title: `${date.toLocaleString()}\n${date.toISOString()} (UTC)` }, text)
}

function since(milliseconds) {
  const passed = Math.max(0, (Date.now() - milliseconds) / 1000)
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${name} ago`
  }
  return passed < 2 ? "now" : `${Math.floor(passed)} s ago`
}

/** Says something for a few seconds, to screen readers too. */
export function notice(text, kind = "") {
  const shown = h("p", { class: `notice ${kind}` }, text)
  document.getElementById("notices").append(shown)
  setTimeout(() => shown.remove(), kind === "bad" ? 9000 : 4000)
}

export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text)
    notice(what)
  } catch {
    notice("The browser does not allow copying here; select the text instead.", "bad")
  }
}

/** What stands where there is nothing: what it is, and what to do. */
export function empty(title, text, ...more) {
  return h("div", { class: "empty" }, h("h2", {}, title), text && h("p", {}, text), more)
}

/** A failed request, in the server's own words. */
export function failure(error, retry) {
  return h(
    "div",
    { class: "empty failed", role: "alert" },
    h("h2", {}, error.title ?? "That did not work"),
    h("p", {}, untrusted(error.message)),
    error.hint && h("p", { class: "dim" }, untrusted(error.hint)),
    error.links?.length > 0 && h("p", {}, error.links.map((url) => [h("a", { href: url, rel: "noreferrer" }, url), " "])),
    retry && h("button", { type: "button", onclick: retry }, "Try again"),
  )
}

export function debounce(milliseconds, call) {
  let timer = 0
  return (...given) => {
    clearTimeout(timer)
    timer = setTimeout(() => call(...given), milliseconds)
  }
}
