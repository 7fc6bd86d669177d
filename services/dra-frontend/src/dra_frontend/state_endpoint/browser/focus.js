// SPDX-License-Identifier: Apache-2.0
// All CPUs together are a single Tab stop. The arrow keys, Home and End move the focus between them.

const all = () => [...document.querySelectorAll("button[data-cpu]")];

/** Makes one CPU the Tab stop. If `element` has been replaced, focuses the new element for the same CPU or claim. */
export function restoreFocus(element) {
  const { cpu, claim } = element?.dataset ?? {};
  const buttons = all();
  const stop = buttons.find((one) => one.dataset.cpu === cpu) ?? buttons.find((one) => one.tabIndex === 0) ?? buttons[0];
  for (const button of buttons) button.tabIndex = button === stop ? 0 : -1;
  if (document.contains(element)) return;
  if (cpu !== undefined) stop?.focus();
  else if (claim) document.querySelector(`button.name[data-claim="${CSS.escape(claim)}"]`)?.focus();
}

/** Moves the focus from one CPU to another if the key is an arrow key, Home or End. */
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

/** Returns the nearest CPU above or below, or null. Vertical distance counts three times as much as horizontal. */
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
