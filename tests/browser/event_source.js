// Follows a stream in a real Chromium with the code of docs/browsers.md: node event_source.js URL STREAM TOKEN CHROMIUM DOCUMENT
//
// Prints a line for each batch of messages. When it reads `reload` on standard input it reloads the page. Ends when the
// browser has stopped reconnecting, with a last line: {"state": …, "seen": […], "opened": …, "problems": […]}
import { readFileSync } from "node:fs"
import { createInterface } from "node:readline"
import { chromium } from "../yjs/node_modules/playwright-core/index.mjs"

const [url, stream, token, executablePath, document] = process.argv.slice(2)
const follow = readFileSync(document, "utf8").match(/```js\n([\s\S]*?)```/)[1]
const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"],
})
const page = await browser.newPage()
const problems = []
page.on("pageerror", (error) => problems.push(String(error)))
await page.exposeFunction("report", (line) => console.log(line))

// What was seen is kept beside the place in the stream, as the document says; so it is there after a reload.
const start = `
  ${follow}
  const seen = () => JSON.parse(sessionStorage.getItem("seen") ?? "[]")
  const count = (name) => sessionStorage.setItem(name, Number(sessionStorage.getItem(name) ?? 0) + 1)
  window.events = follow(${JSON.stringify(stream)}, (values) => {
    sessionStorage.setItem("seen", JSON.stringify([...seen(), ...values]))
    window.report("seen " + seen().length)
  }, ${JSON.stringify(token)})
  window.events.addEventListener("open", () => count("opened"))
`
const open = async () => {
  await page.goto(`${url}/healthz`)
  await page.evaluate(start)
}
await open()
for await (const line of createInterface({ input: process.stdin })) {
  if (line === "reload") await open()
  if (line === "finish") break
}
await page.waitForFunction(() => window.events.readyState === EventSource.CLOSED, undefined, { timeout: 60_000 })
const shown = await page.evaluate(() => ({
  state: window.events.readyState,
  seen: JSON.parse(sessionStorage.getItem("seen") ?? "[]"),
  opened: Number(sessionStorage.getItem("opened")),
}))
console.log(JSON.stringify({ ...shown, problems }))
await browser.close()
process.exit(0)
