// The shell: which view is shown, the token, the theme, the keyboard.

import { hasToken, listen, setToken } from "./api.js"
import { failure, h } from "./dom.js"
import { Place, parsePlace } from "./place.js"
import { serverView } from "./server.js"
import { streamView } from "./stream.js"
import { streamsView } from "./streams.js"
import { subscriptionsView } from "./subscriptions.js"

const VIEWS = { streams: streamsView, stream: streamView, server: serverView, subscriptions: subscriptionsView }
const TITLES = { streams: "Streams", stream: "Stream", server: "Server", subscriptions: "Subscriptions" }
const main = document.getElementById("main")

let leaving = new AbortController()
let page = null

async function show() {
  leaving.abort()
  leaving = new AbortController()
  page = null
  const parsed = parsePlace(location.hash)
  const view = parsed.view in VIEWS ? parsed.view : "streams"
  const place = new Place({ ...parsed, view }, leaving.signal)
  document.title = [...place.path, TITLES[view], "millstream"].filter(Boolean).join(" · ")
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view || (link.dataset.view === "streams" && view === "stream")) link.setAttribute("aria-current", "page")
    else link.removeAttribute("aria-current")
  }
  try {
    const shown = await VIEWS[view](main, place)
    if (!place.signal.aborted) page = shown ?? null
  } catch (error) {
    if (place.signal.aborted) return
    main.replaceChildren(failure(error, show))
    if (error.status === 0) setTimeout(() => { if (!place.signal.aborted) show() }, 2000)
    if (error.status === 401) main.querySelector(".empty").append(" ", h("button", { type: "button", class: "primary", onclick: askToken }, "Enter a token"))
  }
}

// -- token -----------------------------------------------------------------------------------------------------

const tokenButton = document.getElementById("token-button")

function askToken() {
  if (document.querySelector("dialog[open]")) return
  const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true })
  const use = (event) => {
    event.preventDefault()
    setToken(input.value)
    dialog.close()
    show()
  }
  const forget = () => { setToken(""); dialog.close(); show() }
  const dialog = h("dialog", { "aria-labelledby": "token-title", onclose: () => dialog.remove() },
    h("form", { onsubmit: use, method: "dialog" }, h("h2", { id: "token-title" }, "Your token"),
      h("p", { class: "dim" }, "It stays in the memory of this page, is sent to this server only, and is gone after a reload."),
      h("label", { class: "field" }, h("span", {}, "Token or JWT"), input),
      h("div", { class: "buttons" }, hasToken() && h("button", { type: "button", class: "danger quiet", onclick: forget }, "Forget it"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Use it"))))
  document.body.append(dialog)
  dialog.showModal()
}

tokenButton.addEventListener("click", askToken)
const connection = document.getElementById("connection")
listen((heard) => {
  if (heard.token) tokenButton.textContent = hasToken() ? "Token ✓" : "Token"
  if (heard.refused) askToken()
  if (heard.up !== undefined) {
    const text = heard.up ? "" : "Server unreachable"
    if (connection.textContent !== text) connection.textContent = text
  }
})

// -- theme -----------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"]
const themeButton = document.getElementById("theme-button")

function setTheme(theme) {
  document.documentElement.dataset.theme = theme
  themeButton.textContent = { auto: "◐", light: "☼", dark: "☾" }[theme]
  themeButton.title = `Theme: ${theme}`
  themeButton.setAttribute("aria-label", `Theme: ${theme}`)
  try { localStorage.setItem("millstream theme", theme) } catch { /* it is only remembered less long */ }
}

let remembered = null
try { remembered = localStorage.getItem("millstream theme") } catch { /* as above */ }
setTheme(THEMES.includes(remembered) ? remembered : "auto")
themeButton.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]))

// -- keys ------------------------------------------------------------------------------------------------------

const KEYS = [
  ["/", "search or filter"], ["↑ ↓ j k", "move in a list"], ["Enter", "open"], ["f", "follow a stream, or pause"],
  ["g, G", "to the start, to the end of a stream"], ["a", "append"], ["1, 2, 3", "Streams, Subscriptions, Server"], ["?", "this list"], ["Esc", "leave a field or a dialog"],
]

function showKeys() {
  const dialog = h("dialog", { "aria-labelledby": "keys-title", onclose: () => dialog.remove() },
    h("form", { method: "dialog" }, h("h2", { id: "keys-title" }, "Keyboard"),
      h("dl", { class: "keys" }, KEYS.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)))),
      h("div", { class: "buttons" }, h("button", { type: "submit" }, "Done"))))
  document.body.append(dialog)
  dialog.showModal()
}

document.getElementById("keys-button").addEventListener("click", showKeys)
document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, textarea, select")
  if (event.key === "Escape" && field && !field.closest("dialog")) field.blur()
  if (field || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return
  const views = { 1: "#/streams", 2: "#/subscriptions", 3: "#/server" }
  if (event.key === "/") document.getElementById("search")?.focus()
  else if (event.key === "?") showKeys()
  else if (event.key in views) location.hash = views[event.key]
  else if (page?.key) { page.key(event.key); return }
  else return
  event.preventDefault()
})

document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus() })
addEventListener("hashchange", show)
show()
