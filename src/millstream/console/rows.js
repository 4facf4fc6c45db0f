// A list of any number of rows of one height, of which only those in sight exist. A listbox to assistive technology.

import { h } from "./dom.js"

const MARGIN_ROWS = 12
const NEAR_PIXELS = 600
let lists = 0

export class Rows {
  #drawn = new Map()
  #count = 0
  #frame = 0

  /** `draw(index)` gives a row's cells; `select(index)` and `open(index)` hear of clicks and keys. */
  constructor({ label, height = 30, draw, select, open, nearEnd, className = "" }) {
    Object.assign(this, { height, draw, select, open, nearEnd, selected: -1 })
    this.id = `rows-${(lists += 1)}`
    this.space = h("div", { class: "rows-space", role: "presentation" })
    this.element = h("div", {
      class: `rows ${className}`, role: "listbox", tabindex: 0, "aria-label": label,
      onscroll: () => this.schedule(), onkeydown: (event) => this.#key(event),
    }, this.space)
    this.observer = new ResizeObserver(() => this.schedule())
    this.observer.observe(this.element)
  }

  get isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.element
    return scrollTop + clientHeight >= scrollHeight - this.height
  }

  /** There are so many rows now; `keepsRows` if those before are the same ones. */
  set(count, { keepsRows = false } = {}) {
    this.#count = count
    this.space.style.height = `${count * this.height}px`
    if (!keepsRows) this.#clear()
    this.render()
  }

  #clear() {
    for (const row of this.#drawn.values()) row.remove()
    this.#drawn.clear()
  }

  schedule() {
    this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.render() })
  }

  render() {
    const { scrollTop, clientHeight, scrollHeight } = this.element
    const from = Math.max(0, Math.floor(scrollTop / this.height) - MARGIN_ROWS)
    const to = Math.min(this.#count, Math.ceil((scrollTop + clientHeight) / this.height) + MARGIN_ROWS)
    for (const [index, row] of this.#drawn) {
      if (index < from || index >= to) {
        row.remove()
        this.#drawn.delete(index)
      }
    }
    for (let index = from; index < to; index += 1) if (!this.#drawn.has(index)) this.#add(index)
    if (this.nearEnd && this.#count && scrollTop + clientHeight > scrollHeight - NEAR_PIXELS) this.nearEnd()
  }

  #add(index) {
    const row = h("div", {
      class: "row", role: "option", id: `${this.id}-${index}`, "aria-selected": String(index === this.selected),
      "aria-posinset": index + 1, "aria-setsize": this.#count,
      // On the press: between press and release a row that is followed live may have been drawn anew.
      onmousedown: (event) => { if (event.button === 0) this.choose(index) }, onclick: () => this.open?.(index),
    }, this.draw(index))
    row.style.top = `${index * this.height}px`
    this.#drawn.set(index, row)
    this.space.append(row)
  }

  /** Mark a row, without telling anybody. */
  mark(index) {
    this.#drawn.get(this.selected)?.setAttribute("aria-selected", "false")
    this.selected = index
    this.#drawn.get(index)?.setAttribute("aria-selected", "true")
    if (index >= 0) this.element.setAttribute("aria-activedescendant", `${this.id}-${index}`)
    else this.element.removeAttribute("aria-activedescendant")
  }

  choose(index) {
    if (!this.#count) return
    index = Math.max(0, Math.min(this.#count - 1, index))
    this.reveal(index)
    this.mark(index)
    this.select?.(index)
  }

  reveal(index) {
    const top = index * this.height
    const { scrollTop, clientHeight } = this.element
    if (top < scrollTop) this.element.scrollTop = top
    else if (top + this.height > scrollTop + clientHeight) this.element.scrollTop = top + this.height - clientHeight
    this.render()
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight
    this.render()
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1)
    const steps = {
      ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity,
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return
    if (event.key in steps) this.choose(this.selected < 0 ? 0 : Math.min(this.selected + steps[event.key], this.#count - 1))
    else if (event.key === "Enter" && this.selected >= 0) this.open?.(this.selected)
    else return
    event.preventDefault()
  }
}
