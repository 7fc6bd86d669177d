// SPDX-License-Identifier: Apache-2.0
// Values as people read them, and elements with them. Whatever comes from the node becomes text, never markup.

export const USES = {
  exclusive: ["E", "one container of a claim has it"],
  isolated: ["I", "as exclusive, and the kernel balances no threads there"],
  "pod-shared": ["S", "the containers of one pod share it"],
  held: ["H", "kept for a claim that ends or whose record is lost"],
  pool: ["", "free to claim; all containers without a claim run here"],
  withheld: ["W", "always in the pool; no claim can have it"],
  reserved: ["R", "kept for the system"],
  offline: ["×", "switched off in the kernel"],
};

export const UNITS = ["Ki", "Mi", "Gi", "Ti", "Pi"];

/** Makes an element: properties, then children; a string is a text. Data attributes are given as `data`. */
export function make(tag, properties = {}, ...children) {
  const { data = {}, aria = {}, ...plain } = properties;
  const element = Object.assign(document.createElement(tag), plain);
  Object.assign(element.dataset, data);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

/** Returns the numbers of a list such as "0-3,8". */
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

/** Returns bytes with at most one decimal, cut and not rounded, as the commands do: "512Mi", "62.8Gi". */
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

/** Returns what the memory of a device or a part of a claim is called. */
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
