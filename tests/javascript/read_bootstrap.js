// Reads a bootstrap with a parser from npm and prints what it found: node read_bootstrap.js URL
import { parseMultipart } from "@remix-run/multipart-parser"

const response = await fetch(process.argv[2])
const boundary = /boundary=(\S+)$/.exec(response.headers.get("content-type"))[1]
const body = new Uint8Array(await response.arrayBuffer())
const parts = []
const noLimits = { maxFileSize: Infinity, maxParts: Infinity, maxTotalSize: Infinity }
for (const part of parseMultipart(body, { boundary, ...noLimits })) {
  const payload = Buffer.from(part.bytes).toString("base64")
  parts.push({ content_type: part.headers["content-type"], payload })
}
console.log(JSON.stringify({ status: response.status, headers: Object.fromEntries(response.headers), parts }))
