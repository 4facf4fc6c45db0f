// The official Durable Streams suite against the server at MILLSTREAM_URL.
import { describe } from "vitest"
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

describe("millstream", () => {
  runConformanceTests({
    baseUrl: process.env.MILLSTREAM_URL,
    longPollTimeoutMs: 500,
    subscriptions: true,
  })
})
