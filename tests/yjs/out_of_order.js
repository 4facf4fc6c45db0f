// Documents whose updates arrive out of order, with the real Yjs as author and as judge.
//
//   node out_of_order.js make SEED COUNT   prints [{updates, text}, …]: hex, in an order in which some come late
//   node out_of_order.js judge < reads     takes [{snapshot, rest, text}, …], prints how many show that text
import * as Y from "yjs"

const hex = (bytes) => Buffer.from(bytes).toString("hex")
const bytes = (text) => new Uint8Array(Buffer.from(text, "hex"))

function view(doc) {
  const map = Object.entries(doc.getMap("map").toJSON()).sort()
  return JSON.stringify([doc.getText("text").toString(), map, doc.getArray("list").toJSON()])
}

function dice(seed) {
  let state = seed
  return (sides) => {
    state = (state * 1103515245 + 12345) % 2147483648
    return Math.floor((state / 2147483648) * sides)
  }
}

function edit(doc, roll) {
  const [text, map, list] = [doc.getText("text"), doc.getMap("map"), doc.getArray("list")]
  const action = roll(100)
  if (action < 55) text.insert(roll(text.length + 1), "abcdef"[roll(6)].repeat(1 + roll(3)))
  else if (action < 70 && text.length > 2) text.delete(roll(text.length - 2), 1 + roll(2))
  else if (action < 85) map.set("xyz"[roll(3)], roll(100))
  else if (action < 95 || list.length === 0) list.push([roll(100)])
  else list.delete(0, 1)
}

function make(seed, count) {
  const roll = dice(seed)
  return Array.from({ length: count }, (_, number) => {
    const updates = []
    const authors = [1, 2, 3].map((author) => {
      const doc = new Y.Doc()
      doc.clientID = 10 * number + author
      doc.on("update", (update, origin) => origin === "other" || updates.push(update))
      return { doc, seen: 0 }
    })
    for (let step = 0; step < 60; step++) {
      const author = authors[roll(3)]
      if (roll(10) < 3) {
        for (; author.seen < updates.length; author.seen++) Y.applyUpdate(author.doc, updates[author.seen], "other")
      }
      edit(author.doc, roll)
    }
    const whole = new Y.Doc()
    for (const update of updates) Y.applyUpdate(whole, update)
    const placed = updates.map((update, index) => ({ update, at: index + (roll(5) === 0 ? roll(25) : 0) }))
    placed.sort((one, other) => one.at - other.at)
    return { updates: placed.map(({ update }) => hex(update)), text: view(whole) }
  })
}

async function judge() {
  let input = ""
  for await (const chunk of process.stdin) input += chunk
  return JSON.parse(input).filter(({ snapshot, rest, text }) => {
    const doc = new Y.Doc()
    for (const update of [snapshot, ...rest]) Y.applyUpdate(doc, bytes(update))
    return view(doc) === text
  }).length
}

const [command, seed, count] = process.argv.slice(2)
console.log(JSON.stringify(command === "make" ? make(Number(seed), Number(count)) : await judge()))
