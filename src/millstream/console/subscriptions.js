// One subscription: what it follows, how far it came, who works on it and why a webhook failed. (The API lists none.)

import { json } from "./api.js"
import { count, empty, failure, h, time, untrusted } from "./dom.js"
import { go, streamLink } from "./place.js"
import { facts, table } from "./server.js"

const PAGE = 200

export async function subscriptionsView(main, place) {
  const id = place.path.join("/")
  const input = h("input", { type: "search", id: "search", "aria-label": "Id of a subscription", placeholder: "Id of a subscription  /", value: id, spellcheck: "false" })
  const body = h("div", {})
  const open = (event) => { event.preventDefault(); if (input.value) go(["subscriptions", input.value]) }
  main.replaceChildren(h("div", { class: "server-page" }, h("div", { class: "pane-head" }, h("h1", {}, "Subscriptions")),
    h("form", { class: "search", onsubmit: open }, input, h("button", { type: "submit" }, "Open")), body))
  if (!id) {
    body.append(empty("Open a subscription by its id", "A subscription wakes workers when streams have something new. It shows lag, leases and failed webhooks here."))
    return
  }
  await show(body, id, place)
}

async function show(body, id, place) {
  const again = () => show(body, id, place)
  try {
    const query = { limit: PAGE, after: place.params.after }
    const found = await json("GET", `v1/stream/__ds/subscriptions/${encodeURIComponent(id)}`, { query, signal: place.signal })
    body.replaceChildren(h("section", { class: "card wide" },
      h("div", { class: "pane-head" }, h("h2", {}, untrusted(found.id)), h("span", { class: `badge ${found.status === "active" ? "good" : "bad"}` }, untrusted(found.status)), h("span", { class: "grow" }), h("button", { type: "button", onclick: again }, "Refresh")),
      found.last_error && h("p", { class: "alarm" }, "The last webhook failed: ", untrusted(String(found.last_error)), ` (${count(found.retry_count ?? 0)} tries)`),
      h("dl", { class: "facts" }, facts([["Type", found.type], ["Pattern", found.pattern ? untrusted(found.pattern) : "–"], ["Streams", count(found.stream_count)],
        ["With work", count(found.pending_count)], ["Generation", count(found.generation ?? 0)], ["Held by", found.holder ? untrusted(String(found.holder)) : "nobody"],
        ["Lease until", found.lease_until ? time(Date.parse(found.lease_until)) : "–"], ["Next attempt", found.next_attempt_at ? time(Date.parse(found.next_attempt_at)) : "–"],
        ["Created", time(Date.parse(found.created_at))]])),
      table("Streams", ["Stream", "Linked by", "Acknowledged"], found.streams.map(row)),
      found.next_cursor && h("button", { type: "button", onclick: () => go(["subscriptions", id], { after: found.next_cursor }) }, "Next page")))
  } catch (error) {
    if (!place.signal.aborted) body.replaceChildren(failure(error, again))
  }
}

const position = (text) => (text && /_\d+$/.test(text) ? Number(text.split("_")[1]) : 0)

function row(link) {
  const [bucket, ...name] = link.path.includes("/") ? link.path.split("/") : ["_default", link.path]
  return [h("a", { href: streamLink(bucket, name.join("/"), { at: position(link.acked_offset) }) }, untrusted(link.path)), untrusted(String(link.link_type)), count(position(link.acked_offset))]
}
