// A request as a program: curl, Python (millstream.client) and JavaScript. Never with the token, only with its place.

import { ROOT, hasToken, readablePath } from "./api.js"
import { copy, h } from "./dom.js"

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`
const literal = (text) => JSON.stringify(text).replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029")
const base = () => ROOT.href.replace(/\/$/, "")

export const urlOf = (bucket, stream) => base() + readablePath(bucket, stream)

/** `request`: {method, url, headers, body, python: […lines of what to do with `stream`]} */
export function snippets(request) {
  return { curl: curl(request), Python: python(request), JavaScript: javascript(request) }
}

function curl({ method, url, headers = {}, body, follows }) {
  const parts = [`curl ${follows ? "-N " : ""}${method === "GET" ? "" : `-X ${method} `}${shell(url)}`]
  if (hasToken()) parts.push('-H "Authorization: Bearer $TOKEN"')
  for (const [name, value] of Object.entries(headers)) parts.push(`-H ${shell(`${name}: ${value}`)}`)
  if (body) parts.push(`--data-binary ${shell(body)}`)
  return parts.join(" \\\n  ")
}

function python({ bucket, stream, python: lines }) {
  const token = hasToken() ? ', token=os.environ["TOKEN"]' : ""
  const name = bucket === "_default" && !stream?.includes("/") ? stream : `${bucket}/${stream}`
  const opened = stream === undefined ? [] : [`stream = client.stream(${literal(name)})`]
  return [...(token ? ["import os", ""] : []), "from millstream.client import Client", "",
    `client = Client(${literal(base())}${token})`, ...opened, ...lines].join("\n")
}

function javascript({ method, url, headers = {}, body, follows }) {
  const sent = Object.entries(headers).map(([name, value]) => `${literal(name)}: ${literal(value)}`)
  if (hasToken()) sent.push("authorization: `Bearer ${token}`")
  const options = []
  if (method !== "GET") options.push(`  method: ${literal(method)},`)
  if (sent.length) options.push(`  headers: { ${sent.join(", ")} },`)
  if (body) options.push(`  body: ${literal(body)},`)
  const given = options.length ? `, {\n${options.join("\n")}\n}` : ""
  if (follows && !hasToken()) {
    return `const events = new EventSource(${literal(url)})\nevents.addEventListener("data", (event) => console.log(event.data))`
  }
  return `const answer = await fetch(${literal(url)}${given})\nif (!answer.ok) throw new Error(await answer.text())${method === "GET" ? "\nconsole.log(await answer.text())" : ""}`
}

/** Tabs with the three programs and a button that copies the one in sight; `update(request)` writes them anew. */
export function snippetTabs() {
  let texts = {}
  let chosen = "curl"
  const code = h("pre", { class: "code", tabindex: 0, "aria-label": "As a program" })
  const show = (name) => {
    chosen = name
    code.textContent = texts[name] ?? ""
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === name))
  }
  const tabs = ["curl", "Python", "JavaScript"].map((name) => h("button", { type: "button", onclick: () => show(name) }, name))
  const copying = h("button", { type: "button", class: "quiet", onclick: () => copy(texts[chosen], `Copied as ${chosen}`) }, "Copy")
  const element = h("div", { class: "snippets" }, h("div", { class: "tabs", role: "group", "aria-label": "Copy as" }, tabs, h("span", { class: "grow" }), copying), code)
  return { element, update: (request) => { texts = snippets(request); show(chosen) } }
}
