import { defineConfig } from "vite"

// Built, the page works wherever it is put; in development, the documents are those of a server beside it.
export default defineConfig({
  base: "./",
  build: { chunkSizeWarningLimit: 1500 },
  server: { proxy: { "/v1": process.env.MILLSTREAM_URL ?? "http://127.0.0.1:4437" } },
})
