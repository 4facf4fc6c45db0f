// Where the visitor is: `#/view/segment/…?name=value`, so that a link shows somebody else the same.

export function parsePlace(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?")
  const [view = "", ...rest] = path.split("/").filter((one) => one !== "").map(decode)
  return { view, path: rest, params: Object.fromEntries(new URLSearchParams(query)) }
}

function decode(text) {
  try { return decodeURIComponent(text) } catch { return text }
}

export function linkTo(path, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "")
  const query = new URLSearchParams(kept).toString()
  return `#/${path.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`
}

export const streamLink = (bucket, stream, params) => linkTo(["stream", bucket, stream], params)

export function go(path, params) {
  location.hash = linkTo(path, params)
}

/** The place of the view in sight. `set` changes parameters without showing the view anew. */
export class Place {
  constructor(parsed, signal) {
    Object.assign(this, parsed, { signal })
  }

  set(changes) {
    Object.assign(this.params, changes)
    history.replaceState(null, "", linkTo([this.view, ...this.path], this.params))
  }
}
