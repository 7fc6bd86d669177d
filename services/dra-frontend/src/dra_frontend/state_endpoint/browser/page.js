// SPDX-License-Identifier: Apache-2.0
// Fetches the node document every two seconds while the page is visible, and redraws the page if the document has
// changed.

import { cpuDetails, matchDetails } from "./details.js";
import { moveFocus, restoreFocus } from "./focus.js";
import { claimRows, keyRows, problemsOf } from "./lists.js";
import { machineOf } from "./machine.js";
import { make, numbersOf } from "./values.js";

const PERIOD = 2000;
const $ = (selector) => document.querySelector(selector);
let shown = "";
let view = null;
let selected = { kind: "none" };
let timer = 0;
let updated = "";

async function refresh() {
  clearTimeout(timer);
  try {
    const answer = await fetch("v1/node", { cache: "no-store", signal: AbortSignal.timeout(10 * PERIOD) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    updated = new Date().toLocaleTimeString();
    if (text !== shown) draw(JSON.parse(text));
    shown = text;
    tell(`Live, ${updated}`, false);
  } catch (error) {
    tell(`Not live: no response (${error.message})${updated ? `; the state shown is from ${updated}` : ""}`, true);
  }
  if (!document.hidden) timer = setTimeout(refresh, PERIOD);
}

function tell(text, stale) {
  $("#live").textContent = text;
  $("#live").setAttribute("role", stale ? "alert" : "none");
  document.body.classList.toggle("stale", stale);
}

function draw(next) {
  view = next;
  document.title = `${view.node}: CPUs and memory`;
  $("#node").textContent = view.node;
  const [sign, word] = view.live ? ["✓", "Enforcement is live"] : ["✗", "Enforcement is down"];
  $("#enforced").replaceChildren(make("span", { className: "mark", aria: { hidden: "true" } }, sign), word);
  $("#enforced").className = view.live ? "true" : "false";
  const focused = document.activeElement;
  $("#problems").hidden = !view.problems.length;
  $("#problems ul").replaceChildren(...problemsOf(view));
  $("#sockets").replaceChildren(...machineOf(view));
  $("#sockets").classList.toggle("large", view.cpus.some((one) => one.cpu > 99));
  $("#key tbody").replaceChildren(...keyRows(view));
  $("#claims tbody").replaceChildren(...claimRows(view));
  $("#claims .none").hidden = view.claims.length > 0;
  $("#claims .wide").hidden = !view.claims.length;
  $("#versions").textContent = [`dra-driver-numa ${view.version}`, view.runtime].filter(Boolean).join(", ");
  restoreFocus(focused);
  markSelected();
}

function select(next) {
  selected = next;
  markSelected();
}

/** Highlights the selection and shows its details. */
function markSelected() {
  const { kind } = selected;
  const uids = kind === "match" ? selected.uids : new Set();
  const cpus = new Set(kind === "match" ? selected.cpus : []);
  if (kind === "cpu") {
    cpus.add(selected.number);
    const uid = view.cpus.find((one) => one.cpu === selected.number)?.claimUid;
    if (uid) uids.add(uid);
  }
  for (const button of document.querySelectorAll("button[data-cpu]")) {
    const chosen = cpus.has(Number(button.dataset.cpu)) || uids.has(button.dataset.claim);
    button.classList.toggle("chosen", chosen);
    button.setAttribute("aria-pressed", String(kind === "cpu" && Number(button.dataset.cpu) === selected.number));
  }
  for (const row of document.querySelectorAll("#claims tr[data-claim]")) {
    row.classList.toggle("chosen", uids.has(row.dataset.claim));
    row.querySelector("button").setAttribute("aria-pressed", String(uids.has(row.dataset.claim)));
  }
  $("#details div").replaceChildren(...describe(uids));
}

function describe(uids) {
  if (selected.kind === "cpu") return cpuDetails(view, selected.number);
  if (selected.kind === "match") return matchDetails(view, uids, selected.containers);
  const hint = "Choose a CPU or a claim, or type into Find. Arrow keys move between CPUs; Escape clears the selection.";
  return [make("p", { className: "hint" }, hint)];
}

function find(text) {
  const query = text.trim().toLowerCase();
  if (!query) return select({ kind: "none" });
  const number = query.match(/^(?:cpu\s*)?(\d+)$/);
  if (number) return select({ kind: "cpu", number: Number(number[1]) });
  const has = (name) => name.toLowerCase().includes(query);
  const found = view.containers.filter((one) => has(one.pod) || has(one.name));
  const claims = view.claims.filter((one) => has(one.claim) || one.pods.some(has) || has(one.uid));
  const uids = new Set([...claims.map((one) => one.uid), ...found.flatMap((one) => one.claims ?? [])]);
  const containers = found.filter((one) => !one.claims?.length);
  select({ kind: "match", uids, containers, cpus: containers.length === 1 ? numbersOf(containers[0].cpus) : [] });
}

function choose(event) {
  const button = event.target.closest("button");
  if (!button || !view) return;
  if (button.getAttribute("aria-pressed") === "true") select({ kind: "none" });
  else if (button.dataset.cpu) select({ kind: "cpu", number: Number(button.dataset.cpu) });
  else select({ kind: "match", uids: new Set([button.dataset.claim]), containers: [], cpus: [] });
}

document.addEventListener("click", choose);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && view) {
    $("#query").value = "";
    select({ kind: "none" });
  }
});
$("#query").addEventListener("input", (event) => view && find(event.target.value));
$("#sockets").addEventListener("keydown", moveFocus);
$("#sockets").addEventListener("focusin", (event) => restoreFocus(event.target));
refresh();
