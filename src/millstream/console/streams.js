// Buckets and their streams. Pages of the listing are fetched as they come into sight; only rows in sight exist.

import { buckets, listing } from "./api.js"
import * as actions from "./actions.js"
import { bytes, count, debounce, empty, failure, h, time, untrusted } from "./dom.js"
import { go, streamLink } from "./place.js"
import { Rows } from "./rows.js"
import { welcome } from "./welcome.js"

const PAGE = 500
const BUCKETS_SHOWN = 2000

export async function streamsView(main, place) {
  const known = await buckets()
  if (known?.length === 0 && !place.path[0]) {
    welcome(main, place)
    return
  }
  const bucket = place.path[0] ?? (known?.includes("_default") ? "_default" : known?.[0])
  main.replaceChildren(h("div", { class: "browse" }, bucketPane(known, bucket), h("section", { class: "pane streams", "aria-label": "Streams" })))
  const pane = main.querySelector(".streams")
  if (bucket === undefined) pane.append(empty("Which bucket?", "This token may not list all buckets. Type the name of one that it may read."))
  else showBucket(pane, bucket, place)
}

function bucketPane(known, current) {
  const list = h("ul", { class: "buckets" })
  const names = known ?? (current === undefined ? [] : [current])
  const search = h("input", { type: "search", "aria-label": "Find or open a bucket", placeholder: known === null ? "Open a bucket" : "Find a bucket" })
  const show = () => {
    const found = names.filter((name) => name.includes(search.value))
    list.replaceChildren(...found.slice(0, BUCKETS_SHOWN).map((name) =>
      h("li", {}, h("a", { href: `#/streams/${encodeURIComponent(name)}`, "aria-current": name === current && "page" }, untrusted(name)))))
    if (found.length > BUCKETS_SHOWN) list.append(h("li", { class: "dim" }, `and ${count(found.length - BUCKETS_SHOWN)} more`))
  }
  search.addEventListener("input", show)
  show()
  const open = (event) => {
    event.preventDefault()
    if (search.value) go(["streams", search.value])
  }
  return h("aside", { class: "pane bucket-pane", "aria-label": "Buckets" },
    h("div", { class: "pane-head" }, h("h2", {}, "Buckets"), known && h("span", { class: "dim" }, count(known.length)), h("span", { class: "grow" }),
      h("button", { type: "button", class: "quiet", title: "Create a bucket", onclick: () => actions.createBucket((name) => go(["streams", name])) }, "+ New")),
    h("form", { class: "search", onsubmit: open }, search), list)
}

function showBucket(pane, bucket, place) {
  const state = { streams: [], hasMore: true, isLoading: false, after: "", abort: new AbortController() }
  const search = h("input", { type: "search", id: "search", "aria-label": "Streams whose names begin with", placeholder: "Names that begin with…  /", value: place.params.prefix ?? "", spellcheck: "false" })
  const sum = h("span", { class: "dim", role: "status" })
  const problem = h("div")
  const link = (index) => streamLink(bucket, state.streams[index].stream_id)
  const rows = new Rows({
    label: "Streams", className: "stream-rows", height: 34, nearEnd: () => load(),
    open: (index) => { location.hash = link(index) },
    draw: (index) => drawStream(bucket, state.streams[index]),
  })

  async function load() {
    if (state.isLoading || !state.hasMore) return
    state.isLoading = true
    const { abort } = state
    try {
      const page = await listing(bucket, { prefix: search.value, after: state.after, limit: PAGE }, abort.signal)
      if (abort.signal.aborted) return
      state.streams.push(...page.streams)
      state.hasMore = page.has_more
      state.after = page.next_cursor ?? ""
      problem.replaceChildren()
      state.isLoading = false
      rows.set(state.streams.length, { keepsRows: true })
      sum.textContent = `${count(state.streams.length)}${state.hasMore ? "+" : ""} ${state.streams.length === 1 && !state.hasMore ? "stream" : "streams"}`
      if (!state.streams.length) problem.replaceChildren(noStreams(bucket, search.value, () => again()))
    } catch (error) {
      if (abort.signal.aborted) return
      state.isLoading = false
      state.hasMore = false
      problem.replaceChildren(failure(error, again))
    }
    rows.element.hidden = !state.streams.length
  }

  function again() {
    state.abort.abort()
    Object.assign(state, { streams: [], hasMore: true, isLoading: false, after: "", abort: new AbortController() })
    rows.set(0)
    load()
  }

  search.addEventListener("input", debounce(150, () => { place.set({ prefix: search.value || null }); again() }))
  search.addEventListener("keydown", (event) => { if (event.key === "ArrowDown") { rows.element.focus(); rows.choose(0); event.preventDefault() } })
  place.signal.addEventListener("abort", () => state.abort.abort())
  const created = (owner, name) => { location.hash = streamLink(owner, name) }
  pane.append(
    h("div", { class: "pane-head" }, h("h1", {}, untrusted(bucket)), sum, h("span", { class: "grow" }),
      h("button", { type: "button", class: "quiet", onclick: again }, "Refresh"),
      h("button", { type: "button", class: "quiet", onclick: () => actions.removeBucket(bucket, () => go(["streams"])) }, "Delete bucket"),
      h("button", { type: "button", class: "primary", onclick: () => actions.createStream(bucket, created) }, "New stream")),
    h("div", { class: "search" }, search),
    h("div", { class: "row head", "aria-hidden": "true" }, ["Stream", "State", "Type", "Size", "Tail", "Last write"].map((name, place) => h("span", { class: COLUMNS[place] }, name))),
    rows.element, problem)
  load()
}

const COLUMNS = ["name", "state", "type", "number size", "number tail", "number when"]

function drawStream(bucket, stream) {
  const isOpen = stream.status === "Open"
  return [
    h("span", { class: "name" }, untrusted(stream.stream_id, { title: stream.stream_id })),
    h("span", { class: "state" }, h("span", { class: `badge ${isOpen ? "good" : ""}` }, isOpen ? "open" : "closed")),
    h("span", { class: "type dim" }, untrusted(stream.content_type)),
    h("span", { class: "number size" }, bytes(stream.tail_offset)),
    h("span", { class: "number tail dim" }, count(stream.tail_offset)),
    h("span", { class: "number when" }, time(stream.last_write_at_ms, { ago: true })),
  ]
}

function noStreams(bucket, prefix, again) {
  if (prefix) return empty("No stream begins so", "Names are compared from their start, and upper and lower case differ.")
  const created = (owner, name) => { location.hash = streamLink(owner, name) }
  return empty("No streams yet", "A stream is created by a PUT to its path, here or by any client.",
    h("button", { type: "button", class: "primary", onclick: () => actions.createStream(bucket, created) }, "Create one"), " ",
    h("button", { type: "button", onclick: again }, "Look again"))
}
