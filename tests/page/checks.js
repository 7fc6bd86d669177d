// SPDX-License-Identifier: Apache-2.0
// Tests evaluate this object in the page. It finds text with a low contrast, as defined by WCAG 2.2 from the relative
// luminance of two colours.
({
  canvas: document.createElement("canvas").getContext("2d", { willReadFrequently: true }),

  /** Returns red, green, blue (0 to 255) and alpha (0 to 1) of any CSS colour. */
  parts(colour) {
    this.canvas.clearRect(0, 0, 1, 1);
    this.canvas.fillStyle = colour;
    this.canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = this.canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  },

  /** Returns the background colour behind an element: that of the element or of its nearest ancestor that is opaque. */
  behind(element) {
    for (let one = element; one; one = one.parentElement) {
      const found = this.parts(getComputedStyle(one).backgroundColor);
      if (found[3] > 0.99) return found;
    }
    return this.parts("canvas");
  },

  luminance(parts) {
    const linear = parts.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  },

  /** Returns the class or tag, and the contrast, of each element whose text has a contrast below 4.5 to 1. */
  faint() {
    const found = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("noscript, script")) continue;
      const pair = [this.parts(getComputedStyle(element).color), this.behind(element)].map((one) => this.luminance(one));
      const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
      if (contrast < 4.5) found.add(`${element.className || element.tagName}: ${contrast.toFixed(2)}`);
    }
    return [...found];
  },
})
