// The published provider, made fit for a browser that loses its connection now and then.
import * as Y from "yjs"
import { YjsProvider } from "@durable-streams/y-durable-streams"

const RETRY_MILLISECONDS = 2000

export class Provider extends YjsProvider {
  constructor(options) {
    super({ ...options, connect: false })
    this.isLeaving = false
    // Whether there are changes that the server may not have: made while away, or on their way when it went.
    this.hasUnsent = false
    this.doc.on("update", (_, origin) => {
      if (origin !== "server" && !this.connected) this.hasUnsent = true
    })
    this.on("error", () => (this.hasUnsent = true))
    this.on("status", (status) => {
      if (status === "disconnected" && !this.isLeaving) setTimeout(() => this.connect(), RETRY_MILLISECONDS)
    })
    this.on("synced", (synced) => synced && this.sendUnsent())
    this.connect()
  }

  sendUnsent() {
    if (!this.hasUnsent) return
    this.hasUnsent = false
    this.doc.emit("update", [Y.encodeStateAsUpdate(this.doc), "unsent", this.doc])
  }

  async leave() {
    this.isLeaving = true
    await this.disconnect()
  }

  // A browser does not show a script where a redirect leads before it has followed it.
  async discoverSnapshot(context) {
    const response = await fetch(`${this.docUrl()}?offset=snapshot`, {
      headers: this.headers,
      signal: context.controller.signal,
    })
    if (!response.ok) throw new Error(`the document could not be opened: ${response.status}`)
    if (new URL(response.url).searchParams.get("offset").endsWith("_snapshot")) {
      Y.applyUpdate(this.doc, new Uint8Array(await response.arrayBuffer()), "server")
      context.startOffset = response.headers.get("stream-next-offset")
    } else {
      await response.body?.cancel()
      context.startOffset = "-1"
    }
  }
}
