// JSON as a folded tree. Built as it is opened, so that a message of any depth and width costs what is looked at.

import { count, h, visible } from "./dom.js"

const CHILDREN_MAX = 200
const STRING_MAX = 20_000

/** A number that a double cannot hold is shown as it was written. */
class Written {
  constructor(source) { this.source = source }
}

export function parse(raw) {
  return JSON.parse(raw, (key, value, context) =>
    typeof value === "number" && context?.source && String(value) !== context.source ? new Written(context.source) : value)
}

export function tree(value, { depth = 2 } = {}) {
  return h("div", { class: "tree" }, node(null, value, depth))
}

function node(key, value, depth) {
  const label = key === null ? [] : [h("span", { class: "key" }, h("bdi", {}, visible(key))), ": "]
  if (value === null || typeof value !== "object" || value instanceof Written) return h("div", { class: "leaf" }, label, leaf(value))
  const isArray = Array.isArray(value)
  const size = isArray ? value.length : Object.keys(value).length
  if (!size) return h("div", { class: "leaf" }, label, h("span", { class: "dim" }, isArray ? "[]" : "{}"))
  const body = h("div", { class: "branch" })
  const sum = isArray ? `[ ${count(size)} ]` : `{ ${count(size)} }`
  const folder = h("details", {}, h("summary", {}, label, h("span", { class: "dim" }, sum)), body)
  const entries = isArray ? () => value.map((one, place) => [String(place), one]) : () => Object.entries(value)
  const grow = () => { if (!body.firstChild) more(body, entries(), 0, depth - 1) }
  folder.addEventListener("toggle", () => { if (folder.open) grow() })
  if (depth > 0) {
    grow()
    folder.open = true
  }
  return folder
}

function more(body, entries, from, depth) {
  const to = Math.min(entries.length, from + CHILDREN_MAX)
  for (const [key, value] of entries.slice(from, to)) body.append(node(key, value, depth))
  if (to < entries.length) {
    const button = h("button", { type: "button", class: "quiet", onclick: () => {
      button.remove()
      more(body, entries, to, depth)
    } }, `Show ${count(Math.min(CHILDREN_MAX, entries.length - to))} more of ${count(entries.length - to)}`)
    body.append(button)
  }
}

function leaf(value) {
  if (value instanceof Written) return h("span", { class: "number" }, value.source)
  if (typeof value !== "string") return h("span", { class: typeof value }, String(value))
  const shown = value.length > STRING_MAX ? value.slice(0, STRING_MAX) : value
  const rest = value.length - shown.length
  return h("span", { class: "string" }, "\"", h("bdi", {}, visible(shown)), "\"", rest > 0 && h("span", { class: "dim" }, ` … ${count(rest)} more characters`))
}

const TOKENS = /("(?:[^"\\]|\\.)*")(\s*:)?|-?\d[\d.eE+-]*|\b(?:true|false|null)\b/g

/** One line of JSON with its colours, for a row. */
export function highlighted(text) {
  const parts = []
  let from = 0
  for (const found of text.matchAll(TOKENS)) {
    if (found.index > from) parts.push(text.slice(from, found.index))
    const kind = found[1] ? (found[2] ? "key" : "string") : /^[tfn]/.test(found[0]) ? "boolean" : "number"
    parts.push(h("span", { class: kind }, visible(found[1] ?? found[0])))
    if (found[2]) parts.push(found[2])
    from = found.index + found[0].length
  }
  parts.push(visible(text.slice(from)))
  return h("bdi", {}, parts)
}
