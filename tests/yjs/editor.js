// Two people in the editor, each in a Chromium page of their own: node editor.js URL CHROMIUM FOLDER
//
// They type at the same time, in different places; both pages must show both texts and the other's caret and name.
// Prints what each page shows as JSON, and leaves screenshots in the folder.
import { chromium } from "playwright-core"
import path from "node:path"

const [url, executablePath, folder] = process.argv.slice(2)
const browser = await chromium.launch({
  executablePath,
  args: [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
  ],
})

// The first update of each page is long on its way: what is typed meanwhile must wait for it, and not be lost.
function slowFirstUpdate() {
  let isFirst = true
  return async (route) => {
    if (route.request().method() === "POST" && isFirst) {
      isFirst = false
      await new Promise((resolve) => setTimeout(resolve, 400))
    }
    await route.continue()
  }
}

async function open(name) {
  const context = await browser.newContext({ viewport: { width: 1000, height: 640 } })
  const page = await context.newPage()
  const problems = []
  page.on("pageerror", (error) => problems.push(String(error)))
  await page.route("**/docs/plan", slowFirstUpdate())
  await page.goto(`${url}?doc=plan&name=${name}`)
  await page.waitForSelector("#status[data-status=connected]")
  return { name, page, problems }
}

const show = ({ page, problems }) =>
  page.evaluate(
    (problems) => ({
      text: [...document.querySelectorAll(".cm-line")].map((line) => {
        const copy = line.cloneNode(true)
        copy.querySelectorAll(".cm-ySelectionCaret").forEach((caret) => caret.remove())
        return copy.textContent.replaceAll("\u2060", "")
      }),
      carets: [...document.querySelectorAll(".cm-ySelectionInfo")].map((info) => info.textContent),
      people: [...document.querySelectorAll("#people li")].map((person) => person.title).sort(),
      problems,
    }),
    problems,
  )

const lines = (page, count) =>
  page.waitForFunction((count) => document.querySelectorAll(".cm-line").length === count, count, { timeout: 40_000 })

const sees = ({ page }, text, name) =>
  page.waitForFunction(
    ([text, name]) =>
      document.querySelector(".cm-content").textContent.includes(text) &&
      [...document.querySelectorAll(".cm-ySelectionInfo")].some((info) => info.textContent === name),
    [text, name],
    { timeout: 40_000 },
  )

const [ada, grace] = [await open("Ada"), await open("Grace")]
try {
  await ada.page.click(".cm-content")
  await ada.page.keyboard.type("# The plan\n\n")
  await lines(grace.page, 3)
  await grace.page.click(".cm-content")
  await grace.page.keyboard.press("Control+End")
  await ada.page.keyboard.press("Control+Home")
  await ada.page.keyboard.press("End")
  await Promise.all([
    ada.page.keyboard.type(", as Ada sees it", { delay: 15 }),
    grace.page.keyboard.type("Grace writes: one stream for every document.", { delay: 15 }),
  ])
  await sees(ada, "one stream for every document.", "Grace")
  await sees(grace, ", as Ada sees it", "Ada")
  console.log(JSON.stringify({ ada: await show(ada), grace: await show(grace) }))
} catch (error) {
  console.error(error, JSON.stringify({ ada: await show(ada), grace: await show(grace) }))
  process.exitCode = 1
} finally {
  for (const { page, name } of [ada, grace]) await page.screenshot({ path: path.join(folder, `${name}.png`) })
  await browser.close()
}
