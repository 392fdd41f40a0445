// Elements are made here and nowhere else: text becomes text nodes, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with properties, `data`- and `aria`-attributes by their names, and children: elements or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Puts children in the place of those that are there, unless they look the same: who uses a button keeps its focus. */
export function show(parent, ...children) {
  const next = make(parent.tagName, {}, ...children);
  if (next.innerHTML === parent.innerHTML) return;
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...next.childNodes);
  if (focused === undefined) return;
  for (const element of parent.querySelectorAll("[data-key]")) {
    if (element.dataset.key === focused) element.focus();
  }
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count >= 10 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}
