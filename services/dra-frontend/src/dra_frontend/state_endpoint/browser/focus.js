// SPDX-License-Identifier: Apache-2.0
// The CPUs are one stop of the Tab key; arrow keys, Home and End move among them.

const all = () => [...document.querySelectorAll("button[data-cpu]")];

/** Makes a CPU the one that Tab leads to; focuses what has the same CPU or claim as an element that was replaced. */
export function restoreFocus(element) {
  const { cpu, claim } = element?.dataset ?? {};
  const buttons = all();
  const stop = buttons.find((one) => one.dataset.cpu === cpu) ?? buttons.find((one) => one.tabIndex === 0) ?? buttons[0];
  for (const button of buttons) button.tabIndex = button === stop ? 0 : -1;
  if (document.contains(element)) return;
  if (cpu !== undefined) stop?.focus();
  else if (claim) document.querySelector(`button.name[data-claim="${CSS.escape(claim)}"]`)?.focus();
}

/** Moves the focus by a key. */
export function moveFocus(event) {
  const buttons = all();
  const at = buttons.indexOf(event.target);
  if (at < 0) return;
  const targets = {
    ArrowLeft: () => buttons[at - 1],
    ArrowRight: () => buttons[at + 1],
    ArrowUp: () => nearest(buttons, event.target, -1),
    ArrowDown: () => nearest(buttons, event.target, 1),
    Home: () => buttons[0],
    End: () => buttons.at(-1),
  };
  const target = targets[event.key]?.();
  if (!target) return;
  event.preventDefault();
  target.focus();
}

/** Returns the CPU in the next row above or below, the one that is least to the side. */
function nearest(buttons, from, direction) {
  const origin = from.getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const button of buttons) {
    const box = button.getBoundingClientRect();
    const away = (box.top - origin.top) * direction;
    const cost = away * 3 + Math.abs(box.left - origin.left);
    if (away > origin.height / 2 && cost < least) [best, least] = [button, cost];
  }
  return best;
}
