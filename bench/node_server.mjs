// The Node reference server on a port, in memory or, with a second argument, in a data directory.
import { DurableStreamTestServer } from "@durable-streams/server"

const [port, dataDir] = process.argv.slice(2)
const server = new DurableStreamTestServer({ port: Number(port), dataDir })
console.log(await server.start())

process.on("SIGTERM", async () => {
  await server.stop()
  process.exit(0)
})
