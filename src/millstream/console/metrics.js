// The text format of Prometheus, and what can be said of two samples of it.

export function parseMetrics(text) {
  const series = new Map()
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line)
    if (!found) continue
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((one) => [one[1], one[2]]))
    const list = series.get(found[1]) ?? []
    list.push({ labels, value: found[3] === "+Inf" ? Infinity : Number(found[3]) })
    series.set(found[1], list)
  }
  return series
}

export function total(series, name, wanted = () => true) {
  let sum = 0
  for (const one of series.get(name) ?? []) if (wanted(one.labels)) sum += one.value
  return sum
}

/** The value below which a share of what a histogram counted between two samples lies; NaN if it counted nothing. */
export function quantile(before, now, name, share, wanted = () => true) {
  const counts = new Map()
  const add = (series, sign) => {
    for (const { labels, value } of series?.get(`${name}_bucket`) ?? []) {
      if (wanted(labels)) counts.set(labels.le, (counts.get(labels.le) ?? 0) + sign * value)
    }
  }
  add(now, 1)
  add(before, -1)
  const bounds = [...counts].map(([le, value]) => [le === "+Inf" ? Infinity : Number(le), value]).sort((a, b) => a[0] - b[0])
  const all = bounds.at(-1)?.[1] ?? 0
  if (all <= 0) return NaN
  let [lower, below] = [0, 0]
  for (const [bound, value] of bounds) {
    if (value >= share * all) return bound === Infinity ? lower : lower + ((bound - lower) * (share * all - below)) / Math.max(1, value - below)
    lower = bound
    below = value
  }
  return lower
}
