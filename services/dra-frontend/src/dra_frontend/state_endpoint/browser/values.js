// SPDX-License-Identifier: Apache-2.0
// Formats values for display, and creates elements. Values from the node are inserted as text, never as markup.

export const USES = {
  exclusive: ["E", "allocated to a claim that only one container uses"],
  isolated: ["I", "like exclusive, but without the kernel's load balancing"],
  "pod-shared": ["S", "shared by the containers of one pod"],
  held: ["H", "kept for a claim that is being released or whose record is lost"],
  pool: ["", "free to claim; all containers without a claim run here"],
  withheld: ["W", "always in the pool; never allocated to a claim"],
  reserved: ["R", "kept for the system"],
  offline: ["×", "switched off in the kernel"],
};

export const UNITS = ["Ki", "Mi", "Gi", "Ti", "Pi"];

/** Creates an element from properties and children. String children become text; `data` contains data attributes. */
export function make(tag, properties = {}, ...children) {
  const { data = {}, aria = {}, ...plain } = properties;
  const element = Object.assign(document.createElement(tag), plain);
  Object.assign(element.dataset, data);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

/** Returns the numbers in a list such as "0-3,8". */
export function numbersOf(list) {
  const found = new Set();
  for (const part of (list || "").split(",").filter(Boolean)) {
    const [first, last] = part.split("-").map(Number);
    for (let number = first; number <= (last ?? first); number++) found.add(number);
  }
  return found;
}

/** Returns numbers as a list such as "0-3, 8". */
export function listOf(numbers) {
  const parts = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const part = parts.at(-1);
    if (part && part[1] === number - 1) part[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

/** Formats bytes with at most one decimal place, truncated rather than rounded, like the commands: "512Mi", "62.8Gi". */
export function sizeOf(bytes) {
  let size = bytes;
  let unit = "";
  for (const larger of UNITS) {
    if (size < 1024) break;
    size /= 1024;
    unit = larger;
  }
  return `${Math.floor(size * 10) / 10}${unit}`;
}

/** Returns the name of a kind of memory: plain memory, or hugepages of the given size. */
export function kindOf(pageSize) {
  return pageSize ? `hugepages-${pageSize}` : "memory";
}

/** Groups a list by a key, in the order in which keys first appear. */
export function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}
