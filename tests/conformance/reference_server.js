// The protocol's reference server, for the client's tests: prints its URL and runs until its input ends.
import { DurableStreamTestServer } from "@durable-streams/server"

const server = new DurableStreamTestServer({ port: 0, longPollTimeout: 500 })
console.log(await server.start())
process.stdin.resume()
process.stdin.on("end", () => process.exit(0))
