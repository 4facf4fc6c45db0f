// The server: small live charts from /metrics, what is in memory and in the cold tier, and the nodes of a cluster.

import { call, json } from "./api.js"
import { bytes, count, failure, h, seconds, short, svg, untrusted } from "./dom.js"
import { pause } from "./follow.js"
import { parseMetrics, quantile, total } from "./metrics.js"
import { streamLink } from "./place.js"

const INTERVAL_SECONDS = 2
const SAMPLES = 90
const SAMPLES_LEAST = 30
const [WIDTH, HEIGHT] = [240, 56]

const rate = (name) => (now, before, passed) => (before ? Math.max(0, total(now, name) - total(before, name)) / passed : NaN)
const gauge = (name) => (now) => total(now, name)
const isLive = (labels) => labels.route === "sse" || labels.route === "long-poll" || labels.route === "feed"

const CHARTS = [
  ["Requests", "per second", rate("millstream_requests_total"), short],
  ["Messages appended", "per second", rate("millstream_appended_messages_total"), short],
  ["Bytes appended", "per second", rate("millstream_appended_bytes_total"), bytes],
  ["Bytes sent", "per second", rate("millstream_sent_bytes_total"), bytes],
  ["Time to answer", "99th percentile", (now, before) => quantile(before, now, "millstream_request_seconds", 0.99, (labels) => !isLive(labels)), seconds],
  ["Time to be durable", "99th percentile", (now, before) => quantile(before, now, "millstream_commit_seconds", 0.99), seconds],
  ["Connections", "open", gauge("millstream_connections"), count],
  ["Live reads", "under way", gauge("millstream_live_readers"), count],
  ["Hot bytes", "messages in memory", gauge("millstream_hot_bytes"), bytes],
  ["Cold bytes", "in the object store", gauge("millstream_cold_bytes"), bytes],
  ["Flush backlog", "not in the cold tier yet", gauge("millstream_flush_backlog_bytes"), bytes],
  ["Unsent bytes", "for clients that do not read", gauge("millstream_unsent_bytes"), bytes],
]

const ALARMS = [
  ["millstream_backpressure", "Writers are refused for want of memory: see hot.bytes_max and the flush backlog."],
  ["millstream_flush_failing", "The last flush to the cold tier failed; it is tried again. The log has everything."],
  ["millstream_log_stopped", "The log takes no more writes until a restart."],
  ["millstream_store_lost", "The object store has another owner."],
  ["millstream_cold_damaged_objects", "Objects in the store are missing or damaged: millstream cold verify names them."],
  ["millstream_background_tasks_failing", "A vital background task does not run."],
]

export async function serverView(main, place) {
  const alarms = h("div", { class: "alarms", role: "status" })
  const charts = CHARTS.map(([title, unit, value, format]) => new Chart(title, unit, value, format))
  const memory = h("section", { class: "card wide" })
  const nodes = h("section", { class: "card wide" })
  const problem = h("div")
  main.replaceChildren(h("div", { class: "server-page" }, h("div", { class: "pane-head" }, h("h1", {}, "Server"), h("span", { class: "dim", id: "version" })), alarms, problem,
    h("div", { class: "charts" }, charts.map((chart) => chart.element)), memory, nodes))
  let before = null
  for (let round = 0; !place.signal.aborted; round += 1) {
    try {
      if (!document.hidden) {
        const now = { at: performance.now(), series: parseMetrics(await (await call("GET", "metrics", { signal: place.signal })).text()) }
        for (const chart of charts) chart.take(now.series, before?.series, before ? (now.at - before.at) / 1000 : 0)
        showAlarms(alarms, now.series)
        before = now
        if (round % 3 === 0) await showDetails(memory, nodes, place.signal)
        problem.replaceChildren()
      }
    } catch (error) {
      if (place.signal.aborted) return
      problem.replaceChildren(failure(error))
      if (error.status === 401 || error.status === 403) return
    }
    await pause(INTERVAL_SECONDS, place.signal)
  }
}

function showAlarms(alarms, series) {
  const raised = ALARMS.filter(([name]) => total(series, name) > 0)
  const shown = raised.map(([, text]) => h("p", { class: "alarm" }, text))
  const text = raised.map(([name]) => name).join() || "well"
  if (alarms.dataset.shown === text) return
  alarms.dataset.shown = text
  alarms.replaceChildren(...(shown.length ? shown : [h("p", { class: "well" }, "All is well: writes are taken, flushes succeed, nothing is damaged.")]))
}

class Chart {
  #values = []

  constructor(title, unit, value, format) {
    Object.assign(this, { value, format })
    this.line = svg("polyline", { class: "line" })
    this.area = svg("polygon", { class: "area" })
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title }, this.area, this.line)
    this.now = h("strong", { class: "numbers" }, "–")
    this.most = h("span", { class: "dim numbers" })
    this.element = h("section", { class: "card chart" }, h("h2", {}, title), h("p", { class: "dim" }, unit), h("p", { class: "value" }, this.now, this.most), this.drawing)
  }

  take(now, before, passed) {
    this.#values.push(this.value(now, before, passed))
    if (this.#values.length > SAMPLES) this.#values.shift()
    const known = this.#values.filter(Number.isFinite)
    const most = Math.max(...known, 0)
    const last = this.#values.at(-1)
    this.now.textContent = Number.isFinite(last) ? this.format(last) : "–"
    this.most.textContent = known.length > 1 ? `max ${this.format(most)}` : ""
    this.drawing.setAttribute("aria-label", `${this.element.firstChild.textContent}: ${this.now.textContent}, ${this.most.textContent}`)
    const step = WIDTH / (Math.max(SAMPLES_LEAST, this.#values.length) - 1)
    const points = this.#values.flatMap((value, place) => Number.isFinite(value)
      ? [[WIDTH - (this.#values.length - 1 - place) * step, HEIGHT - 2 - (most ? value / most : 0) * (HEIGHT - 6)]] : [])
    const text = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ")
    this.line.setAttribute("points", text)
    this.area.setAttribute("points", points.length ? `${points[0][0].toFixed(1)},${HEIGHT} ${text} ${points.at(-1)[0].toFixed(1)},${HEIGHT}` : "")
  }
}

async function showDetails(memory, nodes, signal) {
  const [stats, status] = await Promise.all([json("GET", "cluster/hot-cold-stats", { signal }), json("GET", "cluster/status", { signal })])
  document.getElementById("version").textContent = `millstream ${status.version}, node ${status.node_id}`
  const share = stats.budget_bytes / stats.hot_bytes_max
  memory.replaceChildren(h("h2", {}, "Memory and history"),
    h("dl", { class: "facts" }, facts([
      ["Memory used", [`${bytes(stats.budget_bytes)} of ${bytes(stats.hot_bytes_max)} `, h("meter", { min: 0, max: 1, value: share, high: 0.8, "aria-label": "Memory used" })]],
      ["Hot", bytes(stats.hot_bytes)], ["Cold", `${bytes(stats.cold_bytes)} stored for ${bytes(stats.cold_payload_bytes)} in ${count(stats.segment_count)} segments`],
      ["Flush backlog", bytes(stats.flush_backlog_bytes)], ["Flushes", count(stats.flush_count)],
      ["Backpressure", stats.backpressure ? h("span", { class: "warn" }, stats.backpressure_reason ?? "yes") : "none"],
      ["Streams in memory", count(stats.resident_streams)]])),
    stats.largest_streams?.length > 0 && table("Largest in memory", ["Stream", "Hot bytes"], stats.largest_streams.slice(0, 8).map((one) => {
      const [bucket, ...name] = one.stream.split("/")
      return [h("a", { href: streamLink(bucket, name.join("/")) }, untrusted(one.stream)), bytes(one.hot_bytes)]
    })))
  nodes.replaceChildren(h("h2", {}, status.cluster ? "Cluster " : "Nodes", status.cluster && untrusted(status.cluster)),
    table("Nodes", ["Node", "Address", "State", "Leads shards"], status.members.map((member) => [
      `${member.node_id}${member.node_id === status.node_id ? " (this one)" : ""}`, untrusted(member.advertise ?? ""),
      h("span", { class: `badge ${member.ready ? "good" : "bad"}` }, member.ready ? untrusted(member.state) : "not ready"), member.leads.join(", ") || "none"])),
    table("Shards", ["Shard", "Leader", "Role here", "Position", "Behind", "Not flushed"], status.shards.map((shard) => [
      String(shard.shard), shard.leader_id === null ? h("span", { class: "warn" }, "none") : `node ${shard.leader_id}`, shard.role,
      count(shard.applied_position), count(Math.max(0, shard.known_log_sequence - shard.log_sequence)), count(Math.max(0, shard.applied_position - shard.flushed_position))])))
}

export const facts = (pairs) => pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))

export function table(title, columns, rows) {
  return h("div", { class: "table-holder", tabindex: 0, role: "group", "aria-label": title }, h("table", {}, h("caption", {}, title),
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))))
}
