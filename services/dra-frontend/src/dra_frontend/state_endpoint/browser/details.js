// SPDX-License-Identifier: Apache-2.0
// Describes the selection: a CPU, or the claims and containers that match the search.

import { enforcedOf, memoryOf } from "./lists.js";
import { listOf, make, numbersOf, USES } from "./values.js";

const MOST = 12;
const KEPT_BY = {
  partition: "the kernel (cpuset partition)",
  isolated: "the kernel (isolated cpuset partition)",
  pool: "the shared pool",
};

/** Returns the details of one CPU. */
export function cpuDetails(view, number) {
  const cpu = view.cpus.find((one) => one.cpu === number);
  if (!cpu) return [make("p", {}, `This node has no CPU ${number}.`)];
  const claim = view.claims.find((one) => one.uid === cpu.claimUid);
  const rows = [["Use", `${cpu.use}: ${USES[cpu.use][1]}`]];
  if (cpu.claimUid) rows.push(["Claim", cpu.claim || `${cpu.claimUid} (no record)`]);
  if (claim) rows.push(["Enforced", enforcedOf(claim)]);
  if (cpu.exclusivity) rows.push(["Kept by", KEPT_BY[cpu.exclusivity] ?? cpu.exclusivity]);
  if (cpu.fallbackReason) rows.push(["Why", cpu.fallbackReason]);
  rows.push(["Place", placeOf(view, cpu)]);
  rows.push(["Containers", containerList(containersOn(view, cpu))]);
  return [make("p", { className: "subject" }, `CPU ${number}`), facts(rows)];
}

/** Returns the details of the matching claims, and of the matching containers without a claim. */
export function matchDetails(view, uids, containers) {
  const claims = view.claims.filter((one) => uids.has(one.uid));
  const shown = claims.slice(0, MOST).flatMap((claim) => claimDetails(view, claim));
  if (claims.length > MOST) shown.push(make("p", {}, `and ${claims.length - MOST} more claims`));
  for (const uid of uids) if (!claims.some((one) => one.uid === uid)) shown.push(...lostDetails(view, uid));
  if (containers.length) shown.push(make("p", { className: "subject" }, "Containers without a claim"), containerList(containers));
  return shown.length ? shown : [make("p", {}, "Nothing matches.")];
}

function claimDetails(view, claim) {
  const users = view.containers.filter((one) => one.claims?.includes(claim.uid));
  const rows = [["Enforced", enforcedOf(claim)]];
  if (claim.cpus) rows.push(["CPUs", listOf(numbersOf(claim.cpus))]);
  if (claim.memory) rows.push(["Memory", memoryOf(claim).join(", ")]);
  rows.push(["Pods", claim.pods.join(", ") || "none"], ["Containers", containerList(users)]);
  return [make("p", { className: "subject" }, claim.claim), facts(rows)];
}

/** Returns the details of a claim without a record: the CPUs held for the claim, and its containers. */
function lostDetails(view, uid) {
  const cpus = view.cpus.filter((one) => one.claimUid === uid).map((one) => one.cpu);
  const users = view.containers.filter((one) => one.claims?.includes(uid));
  return [make("p", { className: "subject" }, `${uid} (no record)`),
    facts([["CPUs", listOf(cpus) || "none"], ["Containers", containerList(users)]])];
}

function placeOf(view, cpu) {
  if (cpu.numaNode === undefined) return "unknown while the CPU is offline";
  const siblings = view.cpus.filter((one) => one.numaNode === cpu.numaNode && one.core === cpu.core && one.cpu !== cpu.cpu);
  const parts = [`socket ${cpu.socket}`, `NUMA node ${cpu.numaNode}`];
  if (cpu.l3 >= 0) parts.push(`L3 ${cpu.l3}`);
  parts.push(siblings.length ? `core shared with CPU ${listOf(siblings.map((one) => one.cpu))}` : "a core of its own");
  if (cpu.coreType && cpu.coreType !== "standard") parts.push(cpu.coreType);
  if (cpu.isolcpus) parts.push("isolcpus");
  return parts.join(", ");
}

/** Returns the containers of the CPU's claim, and other containers unless the kernel keeps them off the CPU. */
function containersOn(view, cpu) {
  const byKernel = cpu.exclusivity === "partition" || cpu.exclusivity === "isolated";
  return view.containers.filter((one) => {
    if (cpu.claimUid && one.claims?.includes(cpu.claimUid)) return true;
    return !byKernel && numbersOf(one.cpus).has(cpu.cpu);
  });
}

function containerList(containers) {
  if (!containers.length) return "none";
  const items = containers.slice(0, MOST).map((one) => make("li", {}, `${one.name} of ${one.pod}`));
  if (containers.length > MOST) items.push(make("li", {}, `and ${containers.length - MOST} more`));
  return make("ul", {}, ...items);
}

function facts(rows) {
  return make("dl", {}, ...rows.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}
