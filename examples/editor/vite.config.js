import { defineConfig } from "vite"

// Built, the page works wherever it is put; in development, the documents are those of a server beside it.
export default defineConfig({
  base: "./",
  // The client's queue waits by Node's `process.nextTick`; where there is none, what is typed while the first update is
  // on its way would be lost without a word.
  define: { "process.nextTick": "queueMicrotask" },
  build: { chunkSizeWarningLimit: 1500 },
  server: { proxy: { "/v1": process.env.MILLSTREAM_URL ?? "http://127.0.0.1:4437" } },
})
