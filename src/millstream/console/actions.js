// What changes something: create, append, close, fork, snapshot, delete. Each is a dialog that shows its request as a program.

import { bucketedPath, call, formatOffset, head, readablePath, streamPath } from "./api.js"
import { bytes, count, failure, h, notice, untrusted } from "./dom.js"
import { isJson } from "./messages.js"
import { snippetTabs, urlOf } from "./snippets.js"

const literal = (text) => JSON.stringify(text)

/** A dialog over a form: `request()` says what would be sent, `done(answer)` what happens afterwards. */
function openDialog({ title, fields, verb, isDangerous, request, check, done }) {
  const problem = h("div", { class: "problem", role: "alert" })
  const tabs = snippetTabs()
  const submit = h("button", { type: "submit", class: isDangerous ? "danger" : "primary" }, verb)
  const update = () => {
    const wrong = check?.() ?? null
    submit.disabled = wrong !== null
    problem.replaceChildren(wrong ? h("p", { class: "warn" }, wrong) : "")
    tabs.update(request())
  }
  const send = async (event) => {
    event.preventDefault()
    if (submit.disabled) return
    submit.disabled = true
    const { method, path, headers, body } = request()
    try {
      const answer = await call(method, path, { headers, body })
      dialog.close()
      await done(answer)
    } catch (error) {
      problem.replaceChildren(failure(error))
      submit.disabled = false
    }
  }
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")
  const name = `dialog-${Math.random().toString(36).slice(2)}`
  const dialog = h("dialog", { "aria-labelledby": name, onclose: () => dialog.remove() },
    h("form", { onsubmit: send, oninput: update, method: "dialog" }, h("h2", { id: name }, title), fields, problem,
      h("details", { class: "as-program" }, h("summary", {}, "Copy as curl, Python or JavaScript"), tabs.element),
      h("div", { class: "buttons" }, close, submit)))
  document.body.append(dialog)
  update()
  dialog.showModal()
}

export const field = (label, control, hint) =>
  h("label", { class: "field" }, h("span", {}, label), control, hint && h("small", { class: "dim" }, hint))

const nameProblem = (bucket, stream) => {
  if (!bucket || !stream) return "Bucket and stream need a name."
  const size = new TextEncoder().encode(`${bucket}/${stream}`).length
  return size > 122 ? `Bucket and stream take ${size} bytes together; 122 are allowed.` : null
}

export function createBucket(done) {
  const name = h("input", { required: true, pattern: "[a-z0-9_\\-]{4,64}", placeholder: "orders", autocomplete: "off" })
  openDialog({
    title: "Create a bucket", verb: "Create",
    fields: field("Name", name, "4 to 64 of a–z, 0–9, _ and -"),
    check: () => (/^[a-z0-9_-]{4,64}$/.test(name.value) ? null : "A name has 4 to 64 of a–z, 0–9, _ and -."),
    request: () => ({
      method: "PUT", path: encodeURIComponent(name.value), url: urlOf("", "").replace(/\/v1\/stream\/.*$/, `/${name.value}`),
      python: [`client.bucket(${literal(name.value)}).create()`],
    }),
    done: () => { notice(`Bucket ${name.value} is there`); done(name.value) },
  })
}

export function createStream(bucket, done) {
  const owner = h("input", { value: bucket ?? "", required: true, autocomplete: "off" })
  const name = h("input", { required: true, placeholder: "2026/order-17", autocomplete: "off" })
  const type = h("input", { value: "application/json", list: "content-types", autocomplete: "off" })
  const ttl = h("input", { type: "number", min: 1, placeholder: "never" })
  const first = h("textarea", { rows: 4, spellcheck: "false", placeholder: "optional" })
  const types = h("datalist", { id: "content-types" }, ["application/json", "text/plain", "application/octet-stream"].map((one) => h("option", { value: one })))
  openDialog({
    title: "Create a stream", verb: "Create",
    fields: [h("div", { class: "two" }, field("Bucket", owner), field("Stream", name)),
      h("div", { class: "two" }, field("Content type", type), field("Expires after seconds without use", ttl)),
      types, field("First messages", first)],
    check: () => nameProblem(owner.value, name.value) ?? (first.value ? jsonProblem(first.value, type.value) : null),
    request: () => ({
      bucket: owner.value, stream: name.value,
      method: "PUT", path: streamPath(owner.value, name.value), url: urlOf(owner.value, name.value),
      headers: { "content-type": type.value, ...(ttl.value && { "stream-ttl": ttl.value }) }, body: first.value || undefined,
      python: [`stream.create(content_type=${literal(type.value)}${ttl.value ? `, ttl=${Number(ttl.value)}` : ""}${first.value ? `, body=${literal(first.value)}.encode()` : ""})`],
    }),
    done: () => { notice(`${owner.value}/${name.value} is there`); done(owner.value, name.value) },
  })
}

function jsonProblem(text, contentType) {
  if (!isJson(contentType)) return null
  try {
    const value = JSON.parse(text)
    return Array.isArray(value) && value.length === 0 ? "An empty array has no message in it." : null
  } catch (error) {
    return `That is not JSON: ${error.message}`
  }
}

export function append({ bucket, stream, contentType }, done) {
  const json = isJson(contentType)
  const text = h("textarea", { rows: 10, spellcheck: "false", placeholder: json ? '{"hello": "world"}' : "" })
  const closes = h("input", { type: "checkbox" })
  const neat = h("button", { type: "button", class: "quiet", onclick: () => {
    try { text.value = JSON.stringify(JSON.parse(text.value), null, 2) } catch { notice("That is not JSON yet.", "bad") }
  } }, "Format")
  const sum = () => {
    try {
      const value = JSON.parse(text.value)
      return Array.isArray(value) ? `${count(value.length)} messages` : "1 message"
    } catch { return "" }
  }
  const counted = h("small", { class: "dim" })
  openDialog({
    title: "Append", verb: "Append",
    fields: [h("p", { class: "dim" }, "To ", untrusted(`${bucket}/${stream}`), ` · ${contentType}`),
      field(json ? "JSON: a value, or an array of several" : "Text", text), h("div", { class: "tools" }, json && neat, counted),
      h("label", { class: "check" }, closes, " Close the stream with this")],
    check: () => {
      counted.textContent = json ? sum() : bytes(new TextEncoder().encode(text.value).length)
      return text.value ? jsonProblem(text.value, contentType) : "There is nothing to append yet."
    },
    request: () => ({
      bucket, stream, method: "POST", path: streamPath(bucket, stream), url: urlOf(bucket, stream), body: text.value,
      headers: { "content-type": contentType, ...(closes.checked && { "stream-closed": "true" }) },
      python: [`stream.append(${literal(text.value)}.encode()${closes.checked ? ", close=True" : ""})`],
    }),
    done: () => { notice("Appended, and durable"); done() },
  })
}

export function close({ bucket, stream }, done) {
  openDialog({
    title: "Close this stream?", verb: "Close it", isDangerous: true,
    fields: h("p", {}, untrusted(`${bucket}/${stream}`), " can be read as before. Nothing can ever be appended to it again."),
    request: () => ({
      bucket, stream, method: "POST", path: streamPath(bucket, stream), url: urlOf(bucket, stream),
      headers: { "stream-closed": "true" }, python: ["stream.close()"],
    }),
    done: () => { notice("Closed"); done() },
  })
}

export function fork({ bucket, stream, contentType }, offset, done) {
  const name = h("input", { value: `${stream}-fork`, required: true, autocomplete: "off" })
  const owner = h("input", { value: bucket, required: true, autocomplete: "off" })
  const at = h("input", { value: String(offset), inputmode: "numeric", pattern: "[0-9]+", required: true })
  openDialog({
    title: "Fork", verb: "Fork",
    fields: [h("p", { class: "dim" }, "A stream of its own that begins with what ", untrusted(`${bucket}/${stream}`), " has before the offset."),
      h("div", { class: "two" }, field("Bucket", owner), field("Stream", name)), field("Offset", at)],
    check: () => nameProblem(owner.value, name.value) ?? (/^\d+$/.test(at.value) ? null : "An offset is a whole number."),
    request: () => ({
      bucket: owner.value, stream: name.value,
      method: "PUT", path: streamPath(owner.value, name.value), url: urlOf(owner.value, name.value),
      headers: {
        "content-type": contentType, "stream-forked-from": readablePath(bucket, stream), "stream-fork-offset": formatOffset(at.value),
      },
      python: [`source = client.stream(${literal(`${bucket}/${stream}`)})`, `stream.create(fork_from=source, fork_offset=${literal(formatOffset(at.value))})`],
    }),
    done: () => { notice("Forked"); done(owner.value, name.value) },
  })
}

export function snapshot({ bucket, stream, contentType }, offset, done) {
  const at = h("input", { value: String(offset), inputmode: "numeric", pattern: "[0-9]+", required: true })
  const type = h("input", { value: isJson(contentType) ? "application/json" : contentType, autocomplete: "off" })
  const text = h("textarea", { rows: 8, spellcheck: "false" })
  openDialog({
    title: "Publish a snapshot", verb: "Publish and trim", isDangerous: true,
    fields: [h("p", {}, "The snapshot stands for everything before its offset: those messages of ", untrusted(`${bucket}/${stream}`), " can no longer be read afterwards."),
      h("div", { class: "two" }, field("Offset", at), field("Content type", type)), field("Content", text)],
    check: () => (/^\d+$/.test(at.value) ? (text.value ? null : "A snapshot has content.") : "An offset is a whole number."),
    request: () => ({
      bucket, stream, method: "PUT", path: `${bucketedPath(bucket, stream)}/snapshot/${formatOffset(at.value)}`,
      url: urlOf("", "").replace(/\/v1\/stream\/.*$/, `/${bucketedPath(bucket, stream)}/snapshot/${formatOffset(at.value)}`),
      headers: { "content-type": type.value }, body: text.value,
      python: [`stream.publish_snapshot(${literal(text.value)}.encode(), ${literal(formatOffset(at.value))}, ${literal(type.value)})`],
    }),
    done: () => { notice("The snapshot is published"); done() },
  })
}

export async function remove({ bucket, stream }, done) {
  const facts = await head(bucket, stream).catch(() => null)
  const typed = h("input", { autocomplete: "off", spellcheck: "false" })
  openDialog({
    title: "Delete this stream?", verb: "Delete for good", isDangerous: true,
    fields: [h("p", {}, "This deletes ", h("strong", {}, untrusted(`${bucket}/${stream}`)), facts && `, ${bytes(facts.tail)} of ${facts.contentType}${facts.snapshot === null ? "" : ", and its snapshot"}`, ". Forks of it keep what they have. It cannot be undone."),
      field("Type the stream's name to confirm", typed, untrusted(stream))],
    check: () => (typed.value === stream ? null : "Waiting for the name."),
    request: () => ({
      bucket, stream, method: "DELETE", path: streamPath(bucket, stream), url: urlOf(bucket, stream), python: ["stream.delete()"],
    }),
    done: () => { notice(`${bucket}/${stream} is deleted`); done() },
  })
}

export function removeBucket(bucket, done) {
  openDialog({
    title: "Delete this bucket?", verb: "Delete it", isDangerous: true,
    fields: h("p", {}, "The bucket ", h("strong", {}, untrusted(bucket)), " goes if it has no streams; otherwise the server refuses."),
    request: () => ({
      method: "DELETE", path: encodeURIComponent(bucket), url: urlOf("", "").replace(/\/v1\/stream\/.*$/, `/${encodeURIComponent(bucket)}`),
      python: [`client.bucket(${literal(bucket)}).delete()`],
    }),
    done: () => { notice("Deleted"); done() },
  })
}

/** How to read a stream from a place on, or follow it, as programs. */
export function showReading({ bucket, stream }, offset) {
  const reading = snippetTabs()
  const following = snippetTabs()
  const at = formatOffset(offset)
  reading.update({ bucket, stream, method: "GET", url: `${urlOf(bucket, stream)}?offset=${at}`, python: [`for chunk in stream.read(${literal(at)}):`, "    print(chunk.data)"] })
  following.update({ bucket, stream, method: "GET", follows: true, url: `${urlOf(bucket, stream)}?offset=${at}&live=sse`, python: [`for chunk in stream.follow(${literal(at)}):`, "    print(chunk.data)"] })
  const dialog = h("dialog", { "aria-label": "Read as a program", onclose: () => dialog.remove() },
    h("form", { method: "dialog" }, h("h2", {}, "Read from here"), reading.element, h("h2", {}, "Follow from here"), following.element,
      h("div", { class: "buttons" }, h("button", { type: "submit" }, "Done"))))
  document.body.append(dialog)
  dialog.showModal()
}
