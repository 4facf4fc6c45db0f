// Following a stream live, through disconnects and restarts, so that nothing is missed and nothing comes twice.
//
// JSON comes by SSE over `fetch`, which can send a token where an EventSource cannot. Anything else comes by long-poll:
// SSE would change the line endings of text.

import { call, parseOffset, streamPath } from "./api.js"
import { read } from "./messages.js"

const WAIT_SECONDS_MAX = 5
const LASTING = new Set([401, 403, 404, 410, 307, 400])

/**
 * Calls `take(content, next)` with everything from `offset` on and `state(word)` with "live", "waiting" or "closed".
 * Ends when the stream is closed or `signal` aborts; throws what trying again cannot mend.
 */
export async function follow(bucket, stream, { json, offset, take, state, signal }) {
  const place = { offset: String(offset), cursor: null }
  const once = json ? followEvents : followPolls
  for (let failures = 0; !signal.aborted; ) {
    try {
      const isOver = await once(bucket, stream, place, (content, next) => {
        failures = 0
        take(content, next)
      }, () => { failures = 0; state("live") }, signal)
      if (isOver) {
        state("closed")
        return
      }
    } catch (error) {
      if (signal.aborted) return
      if (LASTING.has(error.status)) throw error
      state("waiting")
      failures += 1
      await pause(Math.min(WAIT_SECONDS_MAX, 0.3 * 2 ** failures) * (0.75 + Math.random() / 2), signal)
    }
  }
}

async function followPolls(bucket, stream, place, take, live, signal) {
  const options = { offset: place.offset, cursor: place.cursor, live: "long-poll", json: false, signal }
  const found = await read(bucket, stream, options)
  live()
  place.offset = String(found.next)
  place.cursor = found.cursor ?? place.cursor
  if (found.content.length) take(found.content, found.next)
  return found.isClosed && found.isAtTail
}

async function followEvents(bucket, stream, place, take, live, signal) {
  const query = { offset: place.offset, cursor: place.cursor, live: "sse" }
  const answer = await call("GET", streamPath(bucket, stream), { query, signal })
  if (answer.status === 204) return true
  live()
  for await (const event of eventsOf(answer.body)) {
    const next = parseOffset(event.id)
    place.offset = String(next)
    if (event.name === "data") {
      place.cursor = null // it is of the place before; the control event that follows has the new one
      take(event.data, next)
    } else if (event.name === "control") {
      const control = JSON.parse(event.data)
      place.cursor = control.streamCursor ?? null
      if (control.streamClosed) return true
    }
  }
  return false
}

/** The events of a body, one after the other (HTML Living Standard, 9.2.6). */
async function* eventsOf(body) {
  let event = { name: "", data: [], id: "" }
  let rest = ""
  for await (const text of chunksOf(body)) {
    const lines = (rest + text).split("\n")
    rest = lines.pop()
    for (const line of lines) {
      if (line === "") {
        if (event.name) yield { ...event, data: event.data.join("\n") }
        event = { name: "", data: [], id: "" }
        continue
      }
      const colon = line.indexOf(":")
      const value = line.slice(colon + (line[colon + 1] === " " ? 2 : 1))
      if (line.startsWith("event:")) event.name = value
      else if (line.startsWith("id:")) event.id = value
      else if (line.startsWith("data:")) event.data.push(value)
    }
  }
}

async function* chunksOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader()
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      yield value
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}

export function pause(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000)
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve() }, { once: true })
  })
}
