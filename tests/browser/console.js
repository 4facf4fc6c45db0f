// Uses the console in a real Chromium: node console.js URL SCENARIO CHROMIUM TOKEN
//
// A scenario prints what it waits for on standard output and hears on standard input that it was done. The last line is
// JSON: {"problems": […], "hosts": […], …}. Problems are errors of the page, its console, and the policy's.
import { createInterface } from "node:readline"
import { chromium } from "../yjs/node_modules/playwright-core/index.mjs"

const [url, scenario, executablePath, token] = process.argv.slice(2)
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"] })
const context = await browser.newContext({ viewport: { width: 1280, height: 900 } })
const page = await context.newPage()
page.setDefaultTimeout(60_000)
const problems = []
const hosts = new Set()
page.on("pageerror", (error) => problems.push(String(error)))
page.on("console", (message) => { if (message.type() === "error" && !/status of (40[0-9]|41[0-9])|ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY/.test(message.text())) problems.push(message.text()) })
page.on("dialog", (dialog) => { problems.push(`a dialog: ${dialog.message()}`); dialog.dismiss() })
page.on("request", (request) => { if (!request.url().startsWith("blob:")) hosts.add(new URL(request.url()).host) })

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const ask = async (what) => { console.log(what); await lines.next() }
const JSON_TYPE = { "content-type": "application/json" }
const send = async (method, path, body, headers = JSON_TYPE) => {
  const answer = await fetch(url + path, { method, headers, body })
  if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`)
}
const open = async (hash) => { await page.goto("about:blank"); await page.goto(`${url}/console/${hash}`) }
const see = (selector, text) => page.locator(selector, text === undefined ? {} : { hasText: text }).first().waitFor()
const statusHas = (text) => page.waitForFunction((wanted) => document.querySelector(".status")?.textContent.includes(wanted), text)
const button = (name) => page.getByRole("button", { name, exact: true })

const scenarios = { everything, hostile, token: fewRights, follow }

async function everything() {
  await page.goto(`${url}/`)
  if (page.url() !== `${url}/console/`) throw new Error(`the root leads to ${page.url()}`)
  await see("h1", "Nothing here yet")
  await send("PUT", "/v1/stream/chat")
  await see(".welcome li.done", "Create a stream")
  await send("POST", "/v1/stream/chat", '{"from":"ada","text":"hello"}')
  await see(".arrived li", "hello")

  for (let number = 0; number < 1200; number += 1) if (number % 100 === 0) await Promise.all(Array.from({ length: 100 }, (_, more) => send("PUT", `/v1/stream/shop1/${(number + more) % 2 ? "odd" : "even"}/${String(number + more).padStart(4, "0")}`)))
  await open("#/streams/shop1")
  await see(".stream-rows .row", "even/0000")
  const drawn = await page.locator(".stream-rows .row").count()
  if (drawn > 80) problems.push(`${drawn} rows exist`)
  for (let round = 0; round < 6; round += 1) { await page.locator(".stream-rows").evaluate((rows) => { rows.scrollTop = rows.scrollHeight }); await page.waitForTimeout(300) }
  await see(".pane-head", "1,200 streams")
  await see(".stream-rows .row", "odd/1199")
  await page.keyboard.press("/")
  await page.keyboard.type("odd/000")
  await see(".pane-head", "5 streams")
  if (!page.url().includes("prefix=odd%2F000")) problems.push(`the prefix is not in ${page.url()}`)
  await page.keyboard.press("ArrowDown")
  await page.keyboard.press("ArrowDown")
  await page.keyboard.press("Enter")
  await see("h1", "odd/0003")
  await see("h2", "An empty stream")

  // Work: each through its dialog.
  await open("#/streams/shop1")
  await button("New stream").click()
  await page.getByLabel("Stream", { exact: true }).fill("orders")
  await page.getByLabel("First messages").fill('[{"id": 1, "big": 12345678901234567890, "who": {"name": "ada"}}]')
  await button("Create").click()
  await see(".message-rows .row", "12345678901234567890")
  await button("Append").click()
  await page.getByLabel("JSON: a value").fill("{oops")
  await see(".problem", "not JSON")
  await page.getByLabel("JSON: a value").fill('[{"id": 2, "who": {"name": "grace"}}, {"id": 3}]')
  await page.getByText("Copy as curl").click()
  const curl = await page.locator("dialog .code").textContent()
  if (!curl.startsWith(`curl -X POST '${url}/v1/stream/shop1/orders'`)) problems.push(curl)
  await page.locator("dialog button[type=submit]").click()
  await see(".message-rows .row", "grace")
  await page.locator(".message-rows .row", { hasText: "ada" }).click()
  await see(".tree", "12345678901234567890")
  await button("Hex").click()
  await see(".detail .hex", "7b 22 69 64")
  await page.getByLabel("Filter what is loaded").fill('.who.name=grace')
  await statusHas("1 of 3 messages")
  await page.reload()
  await statusHas("1 of 3 messages")
  await page.getByLabel("Filter what is loaded").fill("")
  await statusHas("3 messages loaded")
  await page.locator(".message-rows .row", { hasText: "ada" }).click()
  await button("Fork").click()
  await page.locator("dialog button[type=submit]").click()
  await see("h1", "orders-fork")
  await statusHas("1 messages loaded")
  await open("#/stream/shop1/orders")
  await see(".message-rows .row", "grace")
  await page.locator(".message-rows .row", { hasText: "grace" }).click()
  await button("Snapshot").click()
  await page.getByLabel("Content", { exact: true }).fill('{"state": true}')
  await page.locator("dialog button[type=submit]").click()
  await see(".facts", "Snapshot at")
  await button("Start").click()
  await statusHas("1 messages loaded")
  await page.locator(".actions").getByRole("button", { name: "Close" }).click()
  await page.locator("dialog button[type=submit]").click()
  await see(".badge", "closed")
  await button("Delete").click()
  await see("dialog", "shop1/orders")
  if (await page.locator("dialog button[type=submit]").isEnabled()) problems.push("deletes without a name")
  await page.getByLabel("Type the stream's name").fill("orders")
  await page.locator("dialog button[type=submit]").click()
  await see(".stream-rows")
  const gone = await fetch(`${url}/v1/stream/shop1/orders`)
  if (![404, 410].includes(gone.status)) problems.push(`deleted, and ${gone.status}`)

  // Text, bytes and a picture.
  await send("PUT", "/v1/stream/shop1/lines", "one\ntwo\r\nthree", { "content-type": "text/plain" })
  await open("#/stream/shop1/lines")
  await see(".message-rows .row", "three")
  await statusHas("3 lines loaded")
  await send("PUT", "/v1/stream/shop1/bytes", new Uint8Array([0, 1, 2, 255]), { "content-type": "application/octet-stream" })
  await open("#/stream/shop1/bytes")
  await see(".message-rows .row", "00 01 02 ff")
  const png = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64")
  await send("PUT", "/v1/stream/shop1/picture", png, { "content-type": "image/png" })
  await open("#/stream/shop1/picture")
  await page.waitForFunction(() => document.querySelector(".picture img")?.naturalWidth === 1)

  await open("#/server")
  await see(".well")
  await page.waitForFunction(() => document.querySelectorAll(".chart .line[points*=' ']").length > 5)
  await see(".table-holder", "this one")
  await send("PUT", "/v1/stream/wakes/watch")
  await send("PUT", "/v1/stream/__ds/subscriptions/watch", JSON.stringify({ type: "pull-wake", pattern: "shop1/odd/*", wake_stream: "wakes/watch" }))
  await open("#/subscriptions/watch")
  await see(".facts", "600")
  await open("#/stream/shop1/nothing")
  await see(".failed", "Not found")
  await page.setViewportSize({ width: 390, height: 800 })
  for (const hash of ["#/streams/shop1", "#/stream/shop1/lines", "#/server", "#/subscriptions/watch"]) {
    await open(hash)
    await page.waitForTimeout(500)
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)
    if (over > 0) problems.push(`${hash} is ${over} px too wide at 390 px`)
  }
  return {}
}

async function hostile() {
  const evil = ["<img src=x onerror=window.pwned=1>", "<script>window.pwned=1</script>", "javascript:window.pwned=1", "\u202egnp.exe", "\u001b[31mred\u001b]0;title\u0007", "<svg onload=window.pwned=1>", "{{7*7}}${window.pwned=1}", "x".repeat(1_000_000)]
  const name = "<b onmouseover=pwned=1>\u202ex</b>"
  const path = `/v1/stream/evil1/${encodeURIComponent(name)}`
  await send("PUT", path, JSON.stringify([...evil, Object.fromEntries(evil.map((one) => [one.slice(0, 60), one])), JSON.parse(`${"[".repeat(500)}1${"]".repeat(500)}`)]))
  await open("#/streams/evil1")
  await see(".stream-rows .row", "<b onmouseover=pwned=1>⟨U+202E⟩x</b>")
  await page.locator(".stream-rows .row").first().click()
  await see(".message-rows .row", "<img src=x")
  await button("Start").click() // one larger than the rest is at the end, and not much is loaded beside it
  await see(".message-rows .row", "<svg onload")
  const rows = await page.locator(".message-rows .row").count()
  for (let index = 0; index < rows; index += 1) {
    await page.locator(".message-rows .row").nth(index).click()
    for (const way of ["Text", "Hex", "Tree"]) await page.locator(".detail").getByRole("button", { name: way }).click()
  }
  const text = await page.locator(".message-rows").textContent()
  for (const raw of ["\u202e", "\u001b"]) if (text.includes(raw)) problems.push("a control character is obeyed")
  for (const name of ["Append", "Fork", "Snapshot", "Copy as…", "Delete"]) { await button(name).click(); await page.keyboard.press("Escape") }
  await send("PUT", "/v1/stream/evil1/vector", '<svg xmlns="http://www.w3.org/2000/svg" onload="window.pwned=1"><script>window.pwned=1</script></svg>', { "content-type": "image/svg+xml" })
  await open("#/stream/evil1/vector")
  await see("h2", "No picture that can be shown")
  await open("#/stream/evil1/vector?view=text")
  await see(".message-rows .row", "<svg xmlns")
  await send("PUT", "/v1/stream/evil1/page", "<!doctype html><script>window.pwned=1</script>", { "content-type": "text/html" })
  await open("#/stream/evil1/page")
  await see(".message-rows .row", "<!doctype html>")
  await open(`#/streams/${encodeURIComponent("<img src=x onerror=window.pwned=1>")}?prefix=%3Cscript%3E`)
  await see(".failed")
  const inline = await page.evaluate(() => { try { document.body.innerHTML = "<p>"; return "taken" } catch (error) { return error.name } })
  if (inline !== "TypeError") problems.push(`innerHTML is ${inline}`)
  await page.waitForTimeout(200)
  problems.splice(problems.findIndex((one) => one.includes("TrustedHTML")), 1) // that was this attempt
  return { pwned: await page.evaluate(() => window.pwned ?? null), images: await page.locator("img[src^='blob:']").count(), rows }
}

async function fewRights() {
  await open("#/streams")
  await see("dialog", "Your token")
  await page.getByLabel("Token or JWT").fill(token)
  await button("Use it").click()
  await see("h2", "Which bucket?")
  await page.getByLabel("Find or open a bucket").fill("team-a")
  await page.keyboard.press("Enter")
  await see(".stream-rows .row", "chat")
  await page.locator(".stream-rows .row").first().click()
  await see(".message-rows .row", "hello")
  await page.locator("#follow").click()
  await statusHas("Live")
  await button("Append").click()
  await page.getByLabel("JSON: a value").fill("{}")
  await page.getByText("Copy as curl").click()
  const curl = await page.locator("dialog .code").textContent()
  await page.locator("dialog button[type=submit]").click()
  await see("dialog .failed", "The token does not allow this")
  await page.keyboard.press("Escape")
  await page.evaluate(() => { location.hash = "#/server" })
  await see(".failed", "The token does not allow this")
  await page.evaluate(() => { location.hash = "#/streams/team-b" })
  await see(".failed", "The token does not allow this")
  const kept = await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href, history.state]))
  await page.reload()
  await see("dialog", "Your token")
  return { curl, kept }
}

async function follow() {
  await page.setViewportSize({ width: 1280, height: 3200 })
  await open("#/stream/team-a/chat?at=start")
  await page.locator("#follow").click()
  await statusHas("Live")
  await ask("write")
  await statusHas("20 messages loaded")
  await ask("restart")
  await statusHas("40 messages loaded")
  await ask("write")
  await statusHas("60 messages loaded")
  await page.locator("#follow").click()
  await ask("write")
  await page.waitForTimeout(500)
  await statusHas("60 messages loaded")
  await page.locator("#follow").click()
  await statusHas("80 messages loaded")
  await page.locator(".message-rows .row").nth(79).waitFor()
  const seen = await page.locator(".message-rows .row .preview").allTextContents()
  await ask("flood")
  await statusHas("let go")
  await page.waitForFunction(() => /· 7,080 older messages let go/.test(document.querySelector(".status").textContent))
  await statusHas("5,000 messages loaded")
  const rows = await page.locator(".message-rows .row").count()
  await ask("close")
  await see(".badge", "closed")
  return { seen: seen.map(Number), rows }
}

try {
  const result = await scenarios[scenario]()
  console.log(JSON.stringify({ problems, hosts: [...hosts], ...result }))
} catch (error) {
  console.log(JSON.stringify({ problems: [...problems, String(error.stack)], hosts: [...hosts], at: page.url() }))
}
await browser.close()
process.exit(0)
