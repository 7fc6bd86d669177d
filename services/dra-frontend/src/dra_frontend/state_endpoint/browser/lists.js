// SPDX-License-Identifier: Apache-2.0
// Draws the lists: problems, claims and the key.

import { kindOf, listOf, make, numbersOf, sizeOf, USES } from "./values.js";

const ENFORCED = { True: ["✓", "yes"], False: ["✗", "no"], Unknown: ["?", "not known"] };
const LEVELS = { fault: ["✗", "Problem"], warning: ["!", "Warning"] };

/** Returns the problems as list items, faults first. The documentation explains each code. */
export function problemsOf(view) {
  return view.problems.map(({ level, code, text }) => {
    const [mark, word] = LEVELS[level] ?? LEVELS.warning;
    const sign = make("span", { className: "mark", aria: { hidden: "true" } }, mark);
    const name = code ? [" ", make("code", {}, code)] : [];
    return make("li", { className: level }, sign, make("strong", {}, `${word}: `), text, ...name);
  });
}

/** Returns whether a claim is enforced, as a symbol, a word and the reason. */
export function enforcedOf(claim) {
  const { status, message } = claim.enforced;
  const [mark, word] = ENFORCED[status] ?? ENFORCED.Unknown;
  const sign = make("span", { className: "mark", aria: { hidden: "true" } }, mark);
  return make("span", { className: `enforced ${status.toLowerCase()}` }, sign, make("strong", {}, word), message ? `: ${message}` : "");
}

/** Returns a description of each part of a claim's memory. */
export function memoryOf(claim) {
  return (claim.memory ?? []).map((part) => `${sizeOf(part.bytes)} ${kindOf(part.pageSize)} on node ${part.numaNode}`);
}

/** Returns the claim table's rows. The first cell of each row is a button that selects the claim. */
export function claimRows(view) {
  const byName = (a, b) => a.claim.localeCompare(b.claim, "en", { numeric: true });
  return [...view.claims].sort(byName).map((claim) => {
    const name = make("button", { type: "button", className: "name", data: { claim: claim.uid } }, claim.claim);
    name.setAttribute("aria-pressed", "false");
    const memory = memoryOf(claim).map((text) => make("div", {}, text));
    return make("tr", { data: { claim: claim.uid } },
      make("th", { scope: "row" }, name),
      make("td", {}, claim.pods.join(", ") || "–"),
      make("td", { className: "number" }, listOf(numbersOf(claim.cpus)) || "–"),
      make("td", {}, ...(memory.length ? memory : ["–"])),
      make("td", {}, enforcedOf(claim)));
  });
}

/** Returns the rows of the key: each use that occurs on this node, with its number of CPUs. */
export function keyRows(view) {
  const rows = [];
  for (const [use, [mark, meaning]] of Object.entries(USES)) {
    const count = view.cpus.filter((cpu) => cpu.use === use).length;
    if (!count) continue;
    const sample = make("span", { className: `cpu sample ${use}`, aria: { hidden: "true" } }, make("i", {}, mark));
    rows.push(make("tr", {},
      make("th", { scope: "row" }, sample, use),
      make("td", { className: "number" }, String(count)),
      make("td", {}, meaning)));
  }
  return rows;
}
