// A text that everybody edits at once: CodeMirror shows it, Yjs merges it, millstream keeps it.
import * as Y from "yjs"
import { Awareness } from "y-protocols/awareness"
import { yCollab, yUndoManagerKeymap } from "y-codemirror.next"
import { EditorState } from "@codemirror/state"
import { EditorView, drawSelection, highlightActiveLine, keymap, placeholder } from "@codemirror/view"
import { defaultKeymap, indentWithTab } from "@codemirror/commands"
import { markdown } from "@codemirror/lang-markdown"
import { defaultHighlightStyle, syntaxHighlighting } from "@codemirror/language"
import { Provider } from "./provider.js"
import { person, showPeople, whoAmI } from "./people.js"

const query = new URLSearchParams(location.search)
const docId = query.get("doc") ?? "welcome"
const baseUrl = `${location.origin}/v1/yjs/${query.get("service") ?? "notes"}`
const element = (id) => document.getElementById(id)

const doc = new Y.Doc()
const awareness = new Awareness(doc)
const text = doc.getText("text")
const undoManager = new Y.UndoManager(text)
const provider = new Provider({ doc, awareness, baseUrl, docId })

let me = whoAmI()
const beSeen = () => awareness.setLocalState({ ...awareness.getLocalState(), user: me })
beSeen()
element("name").value = me.name
element("name").addEventListener("input", ({ target }) => {
  me = person(target.value)
  beSeen()
})

element("document").textContent = docId
document.title = `${docId} · millstream`
element("stream").href = `${baseUrl}/docs/${docId}?offset=-1`

awareness.on("change", () => showPeople(element("people"), awareness))
showPeople(element("people"), awareness)

const words = { connecting: "connecting …", connected: "saved as you type", disconnected: "offline, trying again …" }
const showStatus = (status) => {
  element("status").textContent = words[status]
  element("status").dataset.status = status
}
provider.on("status", (status) => {
  showStatus(status)
  if (status === "connected") beSeen() // a lost connection took the presence with it
})
showStatus("connecting")
addEventListener("pagehide", () => provider.leave())

const view = new EditorView({
  parent: element("editor"),
  state: EditorState.create({
    doc: text.toString(),
    extensions: [
      keymap.of([...yUndoManagerKeymap, ...defaultKeymap, indentWithTab]),
      drawSelection(),
      highlightActiveLine(),
      EditorView.lineWrapping,
      EditorView.contentAttributes.of({ "aria-label": "The text", spellcheck: "true" }),
      placeholder("Write something …"),
      markdown(),
      syntaxHighlighting(defaultHighlightStyle),
      yCollab(text, awareness, { undoManager }),
    ],
  }),
})
view.focus()
