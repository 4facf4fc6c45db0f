// The first visit: a tour with curl, which notices what is done in the terminal.

import { ROOT, call, hasToken, streamPath } from "./api.js"
import { copy, h } from "./dom.js"
import { follow, pause } from "./follow.js"
import { messagesOf } from "./messages.js"
import { streamLink } from "./place.js"
import { highlighted } from "./tree.js"

const [BUCKET, STREAM] = ["_default", "chat"]
const MESSAGES_SHOWN = 5

export async function welcome(main, place) {
  const url = `${ROOT.href}v1/stream/${STREAM}`
  const token = hasToken() ? ' -H "Authorization: Bearer $TOKEN"' : ""
  const steps = [
    step("Create a stream", `curl -X PUT ${url}${token} -H 'Content-Type: application/json'`),
    step("Append a message", `curl -X POST ${url}${token} -H 'Content-Type: application/json' -d '{"from":"ada","text":"hello"}'`),
    step("Read it back, or follow it live", `curl -N '${url}?offset=-1&live=sse'${token}`),
  ]
  const arrived = h("ul", { class: "arrived", "aria-label": "Messages" })
  const state = h("p", { class: "dim", role: "status" }, "Waiting for the first step…")
  const open = h("a", { class: "button primary", href: streamLink(BUCKET, STREAM, { at: "start", follow: "1" }), hidden: true }, "Open the stream")
  main.replaceChildren(h("div", { class: "welcome" }, h("h1", {}, "Nothing here yet. Let us change that."),
    h("p", {}, "This server has no streams. Paste these into a terminal; this page notices."),
    h("ol", {}, steps.map((one) => one.element)), state, arrived, open))
  await untilThere(place.signal)
  if (place.signal.aborted) return
  steps[0].done()
  open.hidden = false
  state.textContent = "The stream is there. Waiting for its first message…"
  const take = (content, next) => {
    steps[1].done()
    state.textContent = "It has arrived, and it is durable."
    for (const message of messagesOf(content, next)) arrived.append(h("li", {}, highlighted(message.raw.slice(0, 400))))
    while (arrived.children.length > MESSAGES_SHOWN) arrived.firstChild.remove()
  }
  await follow(BUCKET, STREAM, { json: true, offset: 0, take, state: () => {}, signal: place.signal }).catch(() => {})
}

async function untilThere(signal) {
  while (!signal.aborted) {
    try {
      await call("HEAD", streamPath(BUCKET, STREAM), { signal })
      return
    } catch (error) {
      if (error.status === 401 || error.status === 403) return
    }
    await pause(1, signal)
  }
}

function step(title, command) {
  const mark = h("span", { class: "mark", "aria-hidden": "true" })
  const element = h("li", {}, h("h2", {}, mark, title), h("div", { class: "command" }, h("pre", { class: "code", tabindex: 0, "aria-label": title }, command),
    h("button", { type: "button", "aria-label": `Copy: ${title}`, onclick: () => copy(command) }, "Copy")))
  return { element, done: () => { element.classList.add("done"); mark.textContent = "✓ " } }
}
