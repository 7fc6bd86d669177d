// SPDX-License-Identifier: Apache-2.0
// Draws sockets, NUMA nodes with their memory, L3 groups, cores and CPUs.

import { grouped, kindOf, listOf, make, sizeOf, USES } from "./values.js";

/**
 * Returns the machine as elements: a section for each socket, or for each set of sockets that NUMA nodes span, one for
 * NUMA nodes without CPUs, and one for CPUs whose location is unknown.
 */
export function machineOf(view) {
  const placed = view.cpus.filter((cpu) => cpu.numaNode !== undefined);
  const cpusByNode = grouped(placed, (cpu) => cpu.numaNode);
  const sections = [];
  for (const [title, nodes] of grouped(view.numaNodes, socketOf)) {
    const cards = nodes.map((node) => nodeCard(node, cpusByNode.get(node.id) ?? [], view.memory));
    const className = nodes.length > 1 ? "socket whole" : "socket";
    sections.push(make("section", { className }, make("h3", {}, title), make("div", { className: "nodes" }, ...cards)));
  }
  const lost = view.cpus.filter((cpu) => cpu.numaNode === undefined);
  if (lost.length) {
    const cores = make("div", { className: "cores" }, ...lost.map((cpu) => cpuButton(cpu, view)));
    sections.push(make("section", { className: "socket whole" }, make("h3", {}, "Offline, location unknown"), cores));
  }
  nameClaims(sections, view);
  return sections;
}

function socketOf(node) {
  if (!node.sockets.length) return "Without CPUs";
  return `${node.sockets.length > 1 ? "Sockets" : "Socket"} ${listOf(node.sockets)}`;
}

function nodeCard(node, cpus, memory) {
  const free = cpus.filter((cpu) => cpu.use === "pool").length;
  const title = make("h4", {}, `NUMA node ${node.id}`);
  if (cpus.length) title.append(make("small", {}, `${free} of ${cpus.length} CPUs free`));
  else title.append(make("small", {}, "no CPUs"));
  const bars = memory.filter((one) => one.numaNode === node.id).map(memoryBar);
  const card = make("section", { className: "numa", data: { node: node.id } }, title);
  if (bars.length) card.append(make("div", { className: "bars" }, ...bars));
  const groups = [...grouped(cpus, (cpu) => `${cpu.socket}/${cpu.l3}`).values()];
  card.append(...groups.map((group) => cacheGroup(group, groups.length)));
  return card;
}

function memoryBar(one) {
  const kept = Math.max(0, one.totalBytes - one.capacityBytes);
  const percent = (bytes) => `${(100 * Math.min(1, bytes / (one.totalBytes || 1))).toFixed(2)}%`;
  const bar = make("span", { className: "bar", aria: { hidden: "true" } });
  for (const [kind, bytes] of [["claimed", one.claimedBytes], ["kept", kept]]) {
    const part = make("span", { className: kind });
    part.style.width = percent(bytes);
    bar.append(part);
  }
  const parts = [`${sizeOf(one.freeBytes)} free`];
  if (one.claimedBytes) parts.push(`${sizeOf(one.claimedBytes)} claimed`);
  // Rounding the capacity causes smaller differences, which are not worth mentioning.
  if (kept > one.totalBytes / 100) parts.push(`${sizeOf(kept)} not offered`);
  if (one.claimedBytes > one.capacityBytes) parts.push("more than the node has");
  const name = make("span", { className: "kind" }, kindOf(one.hugepages ? one.pageSize : ""));
  return make("p", { className: "memory" }, name, make("span", { className: "sizes" }, parts.join(", ")), bar);
}

function cacheGroup(cpus, groups) {
  const cores = [...grouped(cpus, (cpu) => cpu.core).values()];
  const boxes = cores.map((core) => make("div", { className: core.length > 1 ? "core many" : "core" }, ...core.map(cpuButton)));
  const known = cpus[0].l3 >= 0;
  const label = known ? `L3 cache ${cpus[0].l3}` : "no L3 cache";
  const box = make("div", { className: groups > 1 ? "l3 bordered" : "l3", role: "group", aria: { label } });
  if (known) box.append(make("span", { className: "l3-name", aria: { hidden: "true" } }, `L3 ${cpus[0].l3}`));
  box.append(make("div", { className: "cores" }, ...boxes));
  return box;
}

function cpuButton(cpu) {
  const data = { cpu: cpu.cpu, claim: cpu.claimUid ?? "" };
  const button = make("button", { type: "button", className: `cpu ${cpu.use}`, tabIndex: -1, data });
  button.setAttribute("aria-pressed", "false");
  if (cpu.coreType === "e-core") button.classList.add("efficiency");
  button.append(make("b", {}, String(cpu.cpu)), make("i", { aria: { hidden: "true" } }, USES[cpu.use][0]));
  return button;
}

/** Sets each CPU button's label for screen readers, which is also its tooltip. */
function nameClaims(sections, view) {
  const cpus = new Map(view.cpus.map((cpu) => [String(cpu.cpu), cpu]));
  for (const button of sections.flatMap((section) => [...section.querySelectorAll("[data-cpu]")])) {
    const cpu = cpus.get(button.dataset.cpu);
    const claim = cpu.claimUid ? `, claim ${cpu.claim || cpu.claimUid}` : "";
    button.title = `CPU ${cpu.cpu}, ${cpu.use}${claim}`;
    button.setAttribute("aria-label", button.title);
  }
}
