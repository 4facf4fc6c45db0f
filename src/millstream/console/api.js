// The public HTTP API, with the visitor's own token. The token lives in this module's memory and nowhere else.

/** Where the server is: one level above the console, wherever it is mounted. */
export const ROOT = new URL("../", import.meta.url)

let token = ""
const listeners = new Set()

export const hasToken = () => token !== ""

export function setToken(value) {
  token = value.trim()
  for (const tell of listeners) tell({ token: true })
}

/** Hears of `{token}` when it changes, `{refused}` when one is needed, `{up}` when the server is or is not there. */
export const listen = (tell) => listeners.add(tell)
const tell = (what) => listeners.forEach((one) => one(what))

export class ApiError extends Error {
  constructor(status, code, message, { hint, headers, title, links } = {}) {
    super(message)
    Object.assign(this, { status, code, hint, headers, title, links })
  }
}

const TITLES = {
  401: "A token is needed",
  403: "The token does not allow this",
  404: "Not found",
  409: "Conflict",
  410: "Gone",
  413: "Too large",
  429: "Too many requests",
  503: "Not possible at the moment",
}

/** The path of a stream for requests: encoded as a whole, so that no browser normalises dots in it. */
export const streamPath = (bucket, stream) => `v1/stream/${encodeURIComponent(bucket)}/${encodeURIComponent(stream)}`
export const bucketedPath = (bucket, stream) => `${encodeURIComponent(bucket)}/${encodeURIComponent(stream)}`

/** The same for people: slashes as they are. */
export function readablePath(bucket, stream) {
  const path = (bucket === "_default" && !stream.includes("/") ? [stream] : [bucket, ...stream.split("/")])
  return `/v1/stream/${path.map(encodeURIComponent).join("/")}`
}

export async function call(method, path, { query = {}, headers = {}, body, signal } = {}) {
  const url = new URL(path, ROOT)
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value)
  }
  const sent = token ? { ...headers, authorization: `Bearer ${token}` } : headers
  let answer
  try {
    answer = await fetch(url, {
      method, headers: sent, body, signal, redirect: "manual", credentials: "omit", referrerPolicy: "no-referrer",
      cache: "no-store",
    })
  } catch (error) {
    if (error.name === "AbortError") throw error
    tell({ up: false })
    const hint = "See whether it runs; the console goes on by itself when it is back."
    throw new ApiError(0, "unreachable", "No answer came.", { title: "The server cannot be reached", hint })
  }
  tell({ up: true })
  if (answer.type === "opaqueredirect") throw await elsewhere()
  if (!answer.ok && answer.status !== 304) throw await problem(answer)
  return answer
}

export const json = async (method, path, options) => (await call(method, path, options)).json()

async function problem(answer) {
  const said = await answer.json().catch(() => ({}))
  const { code, message, hint } = said.error ?? {}
  if (answer.status === 401) tell({ refused: true })
  return new ApiError(answer.status, code ?? "", message ?? `The server answered ${answer.status}.`, {
    hint, headers: answer.headers, title: TITLES[answer.status],
  })
}

/** In a cluster, what only the leader can do is redirected to another host, to which this page may not talk. */
async function elsewhere() {
  const status = await json("GET", "cluster/status").catch(() => ({}))
  const links = (status.members ?? [])
    .filter((member) => member.node_id !== status.node_id && /^https?:\/\//.test(member.advertise))
    .map((member) => `${member.advertise.replace(/\/$/, "")}/console/${location.hash}`)
  return new ApiError(307, "not_leader", "Another node of the cluster leads this bucket.", {
    title: "Ask the leader", hint: "Open the console there, or set cluster.forward = true.", links,
  })
}

/** An offset as the number of bytes before it. */
export const parseOffset = (text) => (text ? Number(text.includes("_") ? text.split("_")[1] : text) : 0)
export const formatOffset = (number) => `${"0".repeat(16)}_${String(number).padStart(16, "0")}`

/** The buckets there are, or null if the token may not know all of them. */
export async function buckets() {
  try {
    return (await json("GET", "cluster/cold")).buckets
  } catch (error) {
    if (error.status === 403) return null
    throw error
  }
}

export const listing = (bucket, query, signal) =>
  json("GET", `${encodeURIComponent(bucket)}/streams`, { query, signal })

export async function head(bucket, stream, signal) {
  const { headers } = await call("HEAD", streamPath(bucket, stream), { signal })
  return {
    contentType: headers.get("content-type") ?? "",
    tail: parseOffset(headers.get("stream-next-offset")),
    isClosed: headers.get("stream-closed") === "true",
    ttl: headers.get("stream-ttl"),
    expiresAt: headers.get("stream-expires-at"),
    snapshot: headers.has("stream-snapshot-offset") ? parseOffset(headers.get("stream-snapshot-offset")) : null,
    earliest: parseOffset(headers.get("stream-earliest-offset")),
  }
}
