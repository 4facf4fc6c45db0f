// Real Yjs clients, driven from the tests: one JSON command a line on stdin, one JSON answer a line on stdout.
//
// Each client is a Y.Doc with an awareness and the published provider. `wait` commands are answered when the condition
// holds, or with an error when it has not held for so many milliseconds.
import readline from "node:readline"
import * as Y from "yjs"
import { Awareness } from "y-protocols/awareness"
import { YjsProvider } from "@durable-streams/y-durable-streams"

const clients = new Map()

const commands = {
  open({ id, baseUrl, docId, liveMode, headers }) {
    const doc = new Y.Doc()
    const awareness = new Awareness(doc)
    const provider = new YjsProvider({ doc, baseUrl, docId, awareness, liveMode, headers })
    const client = { doc, awareness, provider, errors: [] }
    provider.on("error", (error) => client.errors.push(String(error)))
    clients.set(id, client)
    return doc.clientID
  },
  async load({ id, ...options }) {
    const started = performance.now()
    const clientID = commands.open({ id, ...options })
    await until(() => clients.get(id).provider.synced, 60_000)
    return { clientID, milliseconds: performance.now() - started }
  },
  insert({ id, index, text }) {
    const shared = clients.get(id).doc.getText("text")
    shared.insert(index ?? shared.length, text)
  },
  remove({ id, index, length }) {
    clients.get(id).doc.getText("text").delete(index, length)
  },
  text({ id }) {
    return clients.get(id).doc.getText("text").toString()
  },
  presence({ id, state }) {
    clients.get(id).awareness.setLocalStateField("user", state)
  },
  present({ id }) {
    return present(id)
  },
  errors({ id }) {
    return clients.get(id).errors
  },
  // The provider sends what happens while it is connected; what happened before is the application's to send again.
  async reconnect({ id }) {
    const { doc, provider } = clients.get(id)
    await until(() => provider.connected || !provider.connecting, 20_000)
    await provider.connect()
    await until(() => provider.synced, 20_000)
    doc.emit("update", [Y.encodeStateAsUpdate(doc), "application", doc])
  },
  async disconnect({ id }) {
    await clients.get(id).provider.disconnect()
  },
  async flush({ id }) {
    await clients.get(id).provider.flush()
  },
  async waitDisconnected({ id, milliseconds }) {
    await until(() => !clients.get(id).provider.connected, milliseconds)
  },
  async waitText({ id, text, milliseconds }) {
    await until(() => commands.text({ id }) === text, milliseconds, () => commands.text({ id }))
  },
  async waitLength({ id, length, milliseconds }) {
    await until(() => commands.text({ id }).length === length, milliseconds, () => commands.text({ id }).length)
  },
  async waitPresent({ id, names, milliseconds }) {
    const wanted = JSON.stringify([...names].sort())
    await until(() => JSON.stringify(present(id)) === wanted, milliseconds, () => present(id))
  },
  close({ id }) {
    clients.get(id).provider.destroy()
    clients.get(id).awareness.destroy()
    clients.get(id).doc.destroy()
    clients.delete(id)
  },
}

function present(id) {
  const states = [...clients.get(id).awareness.getStates().values()]
  return states.map((state) => state.user).filter((user) => user !== undefined).sort()
}

async function until(holds, milliseconds, seen = () => undefined) {
  const deadline = Date.now() + milliseconds
  while (!holds()) {
    if (Date.now() > deadline) throw new Error(`not within ${milliseconds} ms; instead: ${JSON.stringify(seen())}`)
    await new Promise((resolve) => setTimeout(resolve, 5))
  }
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { command, ...options } = JSON.parse(line)
  let answer
  try {
    answer = { value: (await commands[command](options)) ?? null }
  } catch (error) {
    answer = { error: String(error) }
  }
  process.stdout.write(JSON.stringify(answer) + "\n")
}
process.exit(0)
