// One stream: its messages, wherever one wants to look, live if one wants to.

import { head, parseOffset } from "./api.js"
import * as actions from "./actions.js"
import { bytes, copy, count, debounce, empty, failure, h, time, untrusted, visible } from "./dom.js"
import { follow } from "./follow.js"
import { ByteRows, MessageRows, hexOf, isJson, isText, parseFilter, rasterType, read, textOf } from "./messages.js"
import { linkTo, streamLink } from "./place.js"
import { Rows } from "./rows.js"
import { highlighted, parse, tree } from "./tree.js"

const PAGE_BYTES = 256 << 10
const PREVIEW_CHARACTERS = 400
const TEXT_CHARACTERS = 200_000
const RENDER_MILLISECONDS = 200

export async function streamView(main, place) {
  const [bucket, stream] = [place.path[0], place.path.slice(1).join("/")]
  const facts = await head(bucket, stream, place.signal)
  return new StreamPage(main, place, { bucket, stream, contentType: facts.contentType }, facts)
}

class StreamPage {
  #following = null
  #hidden = null // rows that the filter keeps, as indices; null if there is no filter
  #isDirty = false
  #isFresh = true
  #arrivals = []
  #droppedBefore = 0

  constructor(main, place, target, facts) {
    Object.assign(this, { main, place, target, facts })
    this.json = isJson(target.contentType)
    this.view = place.params.view ?? (this.json ? "json" : /^image\//.test(target.contentType) ? "image" : isText(target.contentType) ? "text" : "hex")
    this.rows = new Rows({
      label: "Messages", className: `message-rows ${this.view}`, height: 28,
      draw: (index) => this.#draw(this.#row(index)), select: (index) => this.#select(this.#row(index)),
    })
    this.#layout()
    this.filter = parseFilter(place.params.q ?? "")
    place.signal.addEventListener("abort", () => this.#stop())
    const timer = setInterval(() => this.#render(), RENDER_MILLISECONDS)
    place.signal.addEventListener("abort", () => clearInterval(timer))
    this.goTo(place.params.at ?? "end")
  }

  // -- what it looks like ------------------------------------------------------------------------------------

  #layout() {
    const { bucket, stream } = this.target
    const button = (label, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, label)
    this.badge = h("span", { class: "badge" })
    this.facting = h("dl", { class: "facts" })
    this.status = h("span", { class: "status", role: "status" })
    this.tailing = button("Follow", () => (this.#following ? this.#stop() : this.#follow()), { class: "primary", title: "Follow live (f)", id: "follow", "aria-pressed": "false" })
    this.offset = h("input", { type: "text", inputmode: "numeric", class: "offset", "aria-label": "Go to an offset", placeholder: "offset" })
    this.search = h("input", { type: "search", id: "search", "aria-label": "Filter what is loaded", placeholder: this.json ? "Filter: text, .path=value  /" : "Filter: text  /", value: this.place.params.q ?? "", spellcheck: "false" })
    this.search.addEventListener("input", debounce(150, () => {
      this.place.set({ q: this.search.value || null })
      this.filter = parseFilter(this.search.value)
      this.#refresh()
    }))
    this.detail = h("aside", { class: "pane detail", "aria-label": "Message", tabindex: -1 })
    this.listing = h("div", { class: "pane listing" })
    const jump = (event) => { event.preventDefault(); if (/^[\d_]+$/.test(this.offset.value)) this.goTo(String(parseOffset(this.offset.value))) }
    const views = this.json ? [] : [h("select", { "aria-label": "Show as", onchange: (event) => { location.hash = streamLink(bucket, stream, { ...this.place.params, view: event.target.value }) } },
      ["text", "hex", "image"].map((name) => h("option", { value: name, selected: name === this.view }, name)))]
    this.earlier = button("Earlier", () => this.#loadEarlier(), { class: "quiet" })
    this.later = button("Later", () => this.#loadLater(), { class: "quiet" })
    const changed = () => this.#reloadFacts()
    this.writes = [button("Append", () => actions.append(this.target, () => this.#appended()), { title: "Append (a)", id: "append" }),
      button("Close", () => actions.close(this.target, changed))]
    this.main.replaceChildren(h("div", { class: "stream-page" },
      h("div", { class: "pane-head title" },
        h("nav", { class: "crumbs", "aria-label": "Place" }, h("a", { href: linkTo(["streams", bucket]) }, untrusted(bucket)), h("span", { class: "dim", "aria-hidden": "true" }, "/"), h("h1", {}, untrusted(stream))),
        this.badge, h("span", { class: "grow" }),
        h("div", { class: "actions", role: "group", "aria-label": "Work" }, this.writes,
          button("Fork", () => actions.fork(this.target, this.selected ? this.selected.offset + this.selected.size : this.facts.tail, (owner, name) => { location.hash = streamLink(owner, name) })),
          button("Snapshot", () => actions.snapshot(this.target, this.selected ? this.selected.offset + this.selected.size : this.facts.tail, changed)),
          button("Copy as…", () => actions.showReading(this.target, this.selected?.offset ?? this.loaded?.first ?? 0)),
          button("Delete", () => actions.remove(this.target, () => { location.hash = linkTo(["streams", bucket]) }), { class: "danger quiet" }))),
      this.facting,
      h("div", { class: "toolbar", role: "group", "aria-label": "Messages" }, this.tailing,
        h("span", { class: "joined" }, button("Start", () => this.goTo("start"), { title: "To the start (g)" }), button("End", () => this.goTo("end"), { title: "To the end (G)" })),
        h("form", { class: "joined", onsubmit: jump }, this.offset, h("button", { type: "submit" }, "Go")), views,
        h("span", { class: "grow search" }, this.search)),
      h("div", { class: "statusbar" }, this.status, h("span", { class: "grow" }), h("span", { class: "more" }, this.earlier, this.later)),
      h("div", { class: "split" }, this.listing, this.detail)))
    this.#showFacts()
    this.#select(null)
  }

  #showFacts() {
    const { facts } = this
    this.badge.textContent = facts.isClosed ? "closed" : "open"
    this.badge.className = `badge ${facts.isClosed ? "" : "good"}`
    for (const button of this.writes) button.disabled = facts.isClosed
    const pairs = [["Type", untrusted(facts.contentType)], ["Size", bytes(facts.tail)], ["Tail", count(facts.tail)]]
    if (facts.snapshot !== null) pairs.push(["Snapshot at", count(facts.snapshot)])
    if (facts.ttl) pairs.push(["Expires after", `${count(Number(facts.ttl))} s without use`])
    if (facts.expiresAt) pairs.push(["Expires", time(Date.parse(facts.expiresAt))])
    this.facting.replaceChildren(...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))
  }

  // -- where one looks ---------------------------------------------------------------------------------------

  async goTo(where) {
    this.#stop()
    this.place.set({ at: where })
    this.loaded = this.json ? new MessageRows() : new ByteRows(this.view === "hex")
    this.#select(null)
    this.isAtTail = false
    try {
      if (this.view === "image") await this.#loadImage()
      else if (where === "start") await this.#load(await this.#earliest())
      else if (where === "end") {
        await this.#reloadFacts()
        await this.#load(Math.max(await this.#earliest(), this.facts.tail - PAGE_BYTES), true)
      } else await this.#load(Number(where))
    } catch (error) {
      if (this.place.signal.aborted) return
      this.listing.replaceChildren(failure(error, () => this.goTo(where)))
      return
    }
    this.#refresh()
    if (where === "end") this.rows.toEnd()
    if (this.place.params.follow) this.#follow()
  }

  /** The first offset that can be read: the snapshot's, if there is one. */
  async #earliest() {
    return Math.max(this.facts.snapshot ?? 0, this.facts.earliest)
  }

  async #load(offset, toTail = false) {
    do {
      const found = await this.#read(offset)
      this.loaded.append(found.content, found.next)
      this.isAtTail = found.isAtTail
      offset = found.next
    } while (toTail && !this.isAtTail && !this.loaded.isFull)
  }

  async #read(offset, bytesMax = PAGE_BYTES) {
    const { bucket, stream } = this.target
    try {
      return await read(bucket, stream, { offset: String(offset), bytesMax, json: this.json, signal: this.place.signal })
    } catch (error) {
      const earliest = error.status === 410 && error.headers?.get("stream-earliest-offset")
      if (!earliest || parseOffset(earliest) === offset) throw error
      this.facts.earliest = parseOffset(earliest)
      return this.#read(this.facts.earliest, bytesMax)
    }
  }

  async #loadLater() {
    await this.#guarded(async () => { await this.#load(this.loaded.next); this.#refresh() })
  }

  async #loadEarlier() {
    await this.#guarded(async () => {
      const earliest = await this.#earliest()
      const from = Math.max(earliest, this.loaded.first - PAGE_BYTES)
      const found = await this.#read(from, this.loaded.first - from)
      const added = this.loaded.prepend(found.content, found.next)
      this.#refresh()
      if (this.json) this.rows.element.scrollTop += added * this.rows.height
    })
  }

  async #guarded(work) {
    try { await work() } catch (error) {
      if (!this.place.signal.aborted) this.status.replaceChildren(h("span", { class: "warn" }, untrusted(error.message)))
    }
  }

  async #reloadFacts() {
    const { bucket, stream } = this.target
    this.facts = { ...(await head(bucket, stream, this.place.signal)), earliest: this.facts.earliest }
    this.#showFacts()
  }

  async #appended() {
    await this.#guarded(() => this.#reloadFacts())
    if (!this.#following) await this.#guarded(async () => { await this.#load(this.loaded.next ?? 0, true); this.#refresh(); this.rows.toEnd() })
  }

  async #loadImage() {
    await this.#load(await this.#earliest(), true)
    const type = rasterType(this.loaded.bytes)
    if (type === null) {
      this.listing.replaceChildren(empty("No picture that can be shown", "PNG, JPEG, GIF and WebP are shown, by their first bytes. Look at it as hex instead."))
      return
    }
    const url = URL.createObjectURL(new Blob([this.loaded.bytes], { type }))
    this.place.signal.addEventListener("abort", () => URL.revokeObjectURL(url))
    this.listing.replaceChildren(h("div", { class: "picture" }, h("img", { src: url, alt: `The picture in ${this.target.bucket}/${this.target.stream}` }), h("p", { class: "dim" }, `${type}, ${bytes(this.loaded.bytes.length)}`)))
  }

  // -- live --------------------------------------------------------------------------------------------------

  async #follow() {
    if (this.view === "image") return
    const ending = new AbortController()
    this.#following = ending
    this.#arrivals = []
    this.place.set({ follow: "1" })
    this.tailing.setAttribute("aria-pressed", "true")
    this.tailing.textContent = "Pause"
    this.state = "connecting"
    this.#isDirty = true
    const { bucket, stream } = this.target
    try {
      await follow(bucket, stream, {
        json: this.json, offset: this.loaded.next ?? 0, signal: ending.signal,
        state: (word) => { this.state = word; this.#isDirty = true },
        take: (content, next) => {
          const added = this.loaded.append(content, next)
          this.isAtTail = true
          this.facts.tail = Math.max(this.facts.tail, next)
          this.#arrivals.push([performance.now(), added])
          this.#isDirty = true
        },
      })
      if (!ending.signal.aborted) { this.#stop(); await this.#guarded(() => this.#reloadFacts()) }
    } catch (error) {
      this.#stop()
      this.listing.replaceChildren(failure(error, () => this.goTo("end")))
    }
  }

  #stop() {
    if (!this.#following) return
    this.#following.abort()
    this.#following = null
    if (!this.place.signal.aborted) this.place.set({ follow: null })
    this.tailing.setAttribute("aria-pressed", "false")
    this.tailing.textContent = "Follow"
    this.state = null
    this.#isDirty = true
    this.#render()
  }

  #rate() {
    const from = performance.now() - 3000
    while (this.#arrivals.length && this.#arrivals[0][0] < from) this.#arrivals.shift()
    return this.#arrivals.reduce((sum, [, added]) => sum + added, 0) / 3
  }

  // -- rows --------------------------------------------------------------------------------------------------

  #row(index) { return this.loaded.at(this.#hidden ? this.#hidden[index] : index) }

  #refresh() { this.#isDirty = true; this.#isFresh = true; this.#render() }

  #render() {
    if (!this.#isDirty && !(this.#following && this.#arrivals.length)) return
    const wasAtEnd = this.rows.isAtEnd
    if (this.#isDirty && this.view !== "image") {
      this.#hidden = this.filter ? this.#kept() : null
      const shown = this.#hidden?.length ?? this.loaded.length
      if (!shown) this.listing.replaceChildren(this.#nothing())
      else {
        if (this.rows.element.parentNode !== this.listing) this.listing.replaceChildren(this.rows.element)
        this.rows.mark(-1)
        const keepsRows = this.json && !this.#isFresh && this.loaded.dropped === this.#droppedBefore
        this.rows.set(shown, { keepsRows })
        this.#droppedBefore = this.loaded.dropped
        this.#markSelected(shown)
        if (this.#following && !this.selected && (wasAtEnd || this.#isFresh)) this.rows.toEnd()
      }
      this.#isFresh = false
      this.#showFacts()
    }
    this.#isDirty = false
    this.#showStatus()
  }

  #kept() {
    const kept = []
    for (let index = 0; index < this.loaded.length; index += 1) if (this.filter(this.loaded.at(index))) kept.push(index)
    return kept
  }

  #markSelected(shown) {
    if (!this.selected) return
    let [low, high] = [0, shown - 1]
    while (low < high) {
      const middle = (low + high) >> 1
      if (this.#row(middle).offset < this.selected.offset) low = middle + 1
      else high = middle
    }
    if (this.#row(low).offset === this.selected.offset) this.rows.mark(low)
  }

  #nothing() {
    if (this.loaded.length) return empty("Nothing matches", `None of the ${count(this.loaded.length)} loaded rows does. The filter looks at what is loaded only.`)
    if (this.#following) return empty("Waiting for messages", "What is appended from now on appears here.")
    if (this.facts.tail > 0) return empty("Nothing here", "There is nothing at or after this offset yet.")
    return empty("An empty stream", "Append the first message, here or by any client.", h("button", { type: "button", class: "primary", onclick: () => actions.append(this.target, () => this.#appended()) }, "Append"))
  }

  #showStatus() {
    const what = this.json ? "messages" : "lines"
    const parts = []
    if (this.state === "live") parts.push(h("span", { class: "live" }, "Live"), ` · ${count(Math.round(this.#rate()))} ${this.json ? "messages" : "bytes"}/s`)
    else if (this.state) parts.push(h("span", { class: "warn" }, this.state === "waiting" ? "Reconnecting…" : "Connecting…"))
    if (parts.length) parts.push(" · ")
    if (this.#hidden) parts.push(`${count(this.#hidden.length)} of `)
    parts.push(`${count(this.loaded.length)} ${what} loaded, from ${count(this.loaded.first)} to ${count(this.loaded.next ?? 0)}`)
    if (this.loaded.dropped) parts.push(` · ${count(this.loaded.dropped)} older ${this.json ? "messages" : "bytes"} let go`)
    this.status.replaceChildren(...parts)
    this.earlier.disabled = this.loaded.first <= Math.max(this.facts.snapshot ?? 0, this.facts.earliest) || this.loaded.isFull
    this.later.disabled = Boolean(this.#following) || (this.loaded.next ?? 0) >= this.facts.tail
  }

  #draw(row) {
    const text = row.raw.length > PREVIEW_CHARACTERS ? row.raw.slice(0, PREVIEW_CHARACTERS) : row.raw
    return [
      h("span", { class: "number at" }, count(row.offset)),
      h("span", { class: "preview" }, this.json ? highlighted(text.replace(/\s*\n\s*/g, " ")) : untrusted(text), row.raw.length > text.length && h("span", { class: "dim" }, " …")),
      this.view !== "hex" && h("span", { class: "number size dim" }, bytes(row.size)),
    ]
  }

  // -- one message -------------------------------------------------------------------------------------------

  #select(row) {
    this.selected = row
    this.main.querySelector(".split")?.classList.toggle("has-detail", row !== null)
    if (row === null) {
      this.detail.replaceChildren(h("p", { class: "dim hint" }, "Select a message to see all of it. Arrow keys move, / filters, f follows."))
      return
    }
    const body = h("div", { class: "detail-body" })
    const ways = this.json ? ["Tree", "Text", "Hex"] : ["Text", "Hex"]
    const show = (way) => {
      this.way = way
      for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === way))
      body.replaceChildren(this.#shown(row, way))
    }
    const tabs = ways.map((way) => h("button", { type: "button", onclick: () => show(way) }, way))
    this.detail.replaceChildren(
      h("div", { class: "detail-head" },
        h("div", { class: "tabs", role: "group", "aria-label": "Show as" }, tabs, h("span", { class: "grow" }),
          h("button", { type: "button", class: "quiet", onclick: () => copy(row.raw, "The message is copied") }, "Copy"),
          h("button", { type: "button", class: "quiet", "aria-label": "Close the message", onclick: () => { this.rows.mark(-1); this.#select(null); this.rows.element.focus() } }, "✕")),
        h("p", { class: "dim numbers" }, `offset ${count(row.offset)} · ${bytes(row.size)} · `, h("a", { href: streamLink(this.target.bucket, this.target.stream, { ...this.place.params, at: row.offset, follow: null }) }, "link to here"))),
      body)
    show(ways.includes(this.way) ? this.way : ways[0])
  }

  #shown(row, way) {
    if (way === "Hex") return h("pre", { class: "code hex", tabindex: 0 }, hexLines(row.bytes ?? new TextEncoder().encode(row.raw)))
    if (way === "Tree") {
      try { return tree(parse(row.raw)) } catch { /* it is shown as text */ }
    }
    const text = row.bytes ? textOf(row.bytes) : row.raw
    const shown = text.slice(0, TEXT_CHARACTERS)
    return h("pre", { class: "code", tabindex: 0 }, h("bdi", {}, visible(shown)), text.length > shown.length && h("span", { class: "dim" }, `\n… ${count(text.length - shown.length)} more characters; Copy has all`))
  }

  // -- keys --------------------------------------------------------------------------------------------------

  key(name) {
    const keys = { f: () => this.tailing.click(), g: () => this.goTo("start"), G: () => this.goTo("end"), a: () => this.writes[0].click() }
    keys[name]?.()
  }
}

const HEX_LINES_MAX = 4096

function hexLines(all) {
  const lines = []
  for (let from = 0; from < all.length && lines.length < HEX_LINES_MAX; from += 16) {
    lines.push(`${from.toString(16).padStart(6, "0")}  ${hexOf(all.subarray(from, from + 16))}`)
  }
  if (all.length > HEX_LINES_MAX * 16) lines.push(`… ${count(all.length - HEX_LINES_MAX * 16)} more bytes`)
  return lines.join("\n")
}
