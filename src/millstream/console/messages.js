// What was read of a stream, as rows: the messages of a JSON stream, lines or lines of hex of any other. Bounded.

import { call, parseOffset, streamPath } from "./api.js"

export const MESSAGES_MAX = 5000
export const BYTES_MAX = 8 << 20
const LINE_BYTES_MAX = 4096
const HEX_BYTES = 16

const encoder = new TextEncoder()

export const isJson = (contentType) => /^application\/(.+\+)?json\b/i.test(contentType)
export const isText = (contentType) => isJson(contentType) || /^text\/|[/+](xml|yaml|javascript|x-ndjson)\b/i.test(contentType)

/** The elements of a JSON array as they were written: numbers, spacing and repeated keys survive. */
export function splitArray(text) {
  const found = []
  let depth = 0
  let start = -1
  for (let place = 0; place < text.length; place += 1) {
    const code = text.charCodeAt(place)
    if (code === 0x22) {
      if (start < 0) start = place
      for (place += 1; text.charCodeAt(place) !== 0x22 && place < text.length; place += 1) {
        if (text.charCodeAt(place) === 0x5c) place += 1
      }
    } else if (code === 0x5b || code === 0x7b) {
      depth += 1
      if (depth === 2 && start < 0) start = place
    } else if (code === 0x5d || code === 0x7d) {
      depth -= 1
      if (depth === 0 && start >= 0) found.push(text.slice(start, place).trimEnd())
    } else if (code === 0x2c && depth === 1) {
      found.push(text.slice(start, place).trimEnd())
      start = -1
    } else if (start < 0 && depth === 1 && code > 0x20) start = place
  }
  return found
}

/** The messages of one answer, each with its offset, counted back from where the answer ends. */
export function messagesOf(text, next) {
  const messages = splitArray(text).map((raw) => ({ raw, size: encoder.encode(raw).length, offset: 0 }))
  for (let place = messages.length - 1; place >= 0; place -= 1) {
    next -= messages[place].size
    messages[place].offset = next
  }
  return messages
}

/** One read: `content` is text of a JSON stream and bytes of any other. */
export async function read(bucket, stream, { offset, bytesMax, json, live, cursor, signal }) {
  const query = { offset, max_bytes: bytesMax, live, cursor }
  const answer = await call("GET", streamPath(bucket, stream), { query, signal })
  const hasBody = answer.status === 200
  return {
    content: json ? (hasBody ? await answer.text() : "[]") : new Uint8Array(hasBody ? await answer.arrayBuffer() : 0),
    next: parseOffset(answer.headers.get("stream-next-offset")),
    cursor: answer.headers.get("stream-cursor"),
    isAtTail: answer.headers.has("stream-up-to-date"),
    isClosed: answer.headers.get("stream-closed") === "true",
  }
}

/** Messages of a JSON stream. What is too much falls out at the end away from where it grows. */
export class MessageRows {
  #rows = []
  #bytes = 0
  dropped = 0

  get length() { return this.#rows.length }
  get first() { return this.#rows[0]?.offset ?? this.next ?? 0 }
  at(place) { return this.#rows[place] }

  append(content, next) {
    const messages = messagesOf(content, next)
    this.next = next
    for (const message of messages) this.#bytes += message.size
    this.#rows.push(...messages)
    let drop = 0
    while (this.#rows.length - drop > MESSAGES_MAX || (this.#bytes > BYTES_MAX && drop < this.#rows.length - 1)) {
      this.#bytes -= this.#rows[drop].size
      drop += 1
    }
    if (drop) this.#rows.splice(0, drop)
    this.dropped += drop
    return messages.length
  }

  prepend(content, next) {
    const messages = messagesOf(content, next).filter((message) => message.offset < this.first)
    for (const message of messages) this.#bytes += message.size
    this.#rows.unshift(...messages)
    return messages.length
  }

  get isFull() { return this.#rows.length >= MESSAGES_MAX || this.#bytes >= BYTES_MAX }
}

/** Bytes of a stream, cut into lines of text or of hex. */
export class ByteRows {
  #bytes = new Uint8Array()
  #starts = []
  dropped = 0

  constructor(asHex) {
    this.asHex = asHex
    this.first = 0
  }

  get length() { return this.#starts.length }
  get bytes() { return this.#bytes }
  get next() { return this.first + this.#bytes.length }
  get isFull() { return this.#bytes.length >= BYTES_MAX }

  at(place) {
    const start = this.#starts[place]
    const bytes = this.#bytes.subarray(start, this.#starts[place + 1] ?? this.#bytes.length)
    return { offset: this.first + start, size: bytes.length, bytes, raw: this.asHex ? hexOf(bytes) : textOf(bytes).replace(/\r?\n$/, "") }
  }

  append(content, next) {
    if (!this.#bytes.length) this.first = next - content.length
    this.#bytes = joined(this.#bytes, content)
    if (this.#bytes.length > BYTES_MAX) {
      const drop = this.#bytes.length - BYTES_MAX
      this.#bytes = this.#bytes.slice(drop)
      this.first += drop
      this.dropped += drop
    }
    this.#cut()
    return content.length
  }

  prepend(content, next) {
    const missing = content.subarray(0, Math.max(0, content.length - (next - this.first)))
    this.#bytes = joined(missing, this.#bytes)
    this.first -= missing.length
    this.#cut()
    return missing.length
  }

  #cut() {
    const starts = []
    const { length } = this.#bytes
    for (let start = 0; start < length; ) {
      starts.push(start)
      if (this.asHex) start += HEX_BYTES - ((this.first + start) % HEX_BYTES)
      else {
        const line = this.#bytes.indexOf(10, start)
        start = Math.min(line < 0 ? length : line + 1, start + LINE_BYTES_MAX)
      }
    }
    this.#starts = starts
  }
}

function joined(left, right) {
  const both = new Uint8Array(left.length + right.length)
  both.set(left)
  both.set(right, left.length)
  return both
}

export const textOf = (bytes) => new TextDecoder().decode(bytes)

export function hexOf(bytes) {
  let hex = ""
  let text = ""
  for (let place = 0; place < HEX_BYTES; place += 1) {
    hex += place < bytes.length ? bytes[place].toString(16).padStart(2, "0") : "  "
    hex += place === 7 ? "  " : " "
    if (place < bytes.length) text += bytes[place] > 31 && bytes[place] < 127 ? String.fromCharCode(bytes[place]) : "·"
  }
  return `${hex} ${text}`
}

const RASTERS = [
  ["image/png", [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]],
  ["image/jpeg", [0xff, 0xd8, 0xff]],
  ["image/gif", [0x47, 0x49, 0x46, 0x38]],
]

/** The type of a picture that is safe to show, by its first bytes and never by what it is called; or null. */
export function rasterType(bytes) {
  for (const [type, magic] of RASTERS) if (magic.every((byte, place) => bytes[place] === byte)) return type
  const letters = (from, to) => String.fromCharCode(...bytes.subarray(from, to))
  return letters(0, 4) === "RIFF" && letters(8, 12) === "WEBP" ? "image/webp" : null
}

/** What a filter keeps: `.path`, `.path=value`, `.path!=value`, `.path~text` of JSON, or any text. */
export function parseFilter(query) {
  const wanted = query.trim()
  if (!wanted) return null
  const path = /^\$?((?:\.[\w$-]+|\[\d+\]|\["[^"]*"\])+)\s*(?:(!=|==?|~)\s*(.*))?$/s.exec(wanted)
  if (!path) {
    const text = wanted.toLowerCase()
    return (row) => row.raw.toLowerCase().includes(text)
  }
  const steps = [...path[1].matchAll(/\.([\w$-]+)|\[(\d+)\]|\["([^"]*)"\]/g)].map((step) => step[1] ?? step[2] ?? step[3])
  const operator = path[2]
  const value = unquoted((path[3] ?? "").trim())
  return (row) => {
    let found = valueOf(row)
    for (const step of steps) found = found !== null && typeof found === "object" && Object.hasOwn(found, step) ? found[step] : undefined
    if (operator === undefined) return found !== undefined
    const text = typeof found === "string" ? found : found === undefined ? undefined : JSON.stringify(found)
    if (operator === "~") return text !== undefined && text.toLowerCase().includes(value.toLowerCase())
    return (text === value) === (operator !== "!=")
  }
}

function unquoted(text) {
  if (!text.startsWith('"')) return text
  try { return String(JSON.parse(text)) } catch { return text }
}

function valueOf(row) {
  if (!("value" in row)) {
    try { row.value = JSON.parse(row.raw) } catch { row.value = undefined }
  }
  return row.value
}
