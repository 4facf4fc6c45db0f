// Who somebody is: a name to go by, kept from one visit to the next, and the colour that goes with it.
const NAMES = ["Ada", "Alan", "Barbara", "Donald", "Edsger", "Frances", "Grace", "Hedy", "John", "Katherine", "Radia", "Tony"]
const COLOURS = ["#c2410c", "#b45309", "#4d7c0f", "#047857", "#0e7490", "#1d4ed8", "#6d28d9", "#a21caf", "#be123c"]

const any = (list) => list[Math.floor(Math.random() * list.length)]

export function whoAmI() {
  const asked = new URLSearchParams(location.search).get("name")
  return person(asked ?? sessionStorage.getItem("name") ?? any(NAMES))
}

export function person(name) {
  sessionStorage.setItem("name", name)
  const sum = [...name].reduce((total, letter) => total + letter.codePointAt(0), 0)
  const color = COLOURS[sum % COLOURS.length]
  return { name, color, colorLight: `${color}33` }
}

export function showPeople(list, awareness) {
  const people = [...awareness.getStates()].filter(([, state]) => state.user)
  list.replaceChildren(
    ...people.map(([client, { user }]) => {
      const item = document.createElement("li")
      item.textContent = user.name.trim().slice(0, 1).toUpperCase() || "?"
      item.title = client === awareness.clientID ? `${user.name} (you)` : user.name
      item.style.background = user.color
      return item
    }),
  )
}
