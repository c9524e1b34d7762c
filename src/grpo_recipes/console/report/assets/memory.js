"use strict";

// Shared by all scripts of a page: numbers as text, and a memory that survives a reload of the page.

// Numbers from a data attribute; "-" is a gap.
function numbers(text) {
  return text ? text.split(" ").map((part) => (part === "-" ? NaN : Number(part))) : [];
}

// The index of the value in `xs` that is nearest to `x`. `xs` may have gaps (NaN).
function nearest(xs, x) {
  let best = -1;
  xs.forEach((value, index) => {
    if (!Number.isNaN(value) && (best < 0 || Math.abs(value - x) < Math.abs(xs[best] - x))) best = index;
  });
  return best;
}

// A number with at most four digits: 0.1234, 12,340, 1.2e-6.
function formatted(number) {
  const size = Math.abs(number);
  if (size && (size < 1e-3 || size >= 1e9)) return number.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(number).toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 6 : 4 });
}

function button(text, label, action) {
  const node = document.createElement("button");
  Object.assign(node, { type: "button", textContent: text });
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", action);
  return node;
}

// A part of the page registers how its state is saved before a reload, and restored after it.
const memory = {
  parts: {},
  add(name, save, restore) {
    this.parts[name] = { save, restore };
  },
  save() {
    const state = Object.entries(this.parts).map(([name, part]) => [name, part.save()]);
    history.replaceState(Object.fromEntries(state), "");
  },
  restore() {
    for (const [name, part] of Object.entries(this.parts)) {
      if (history.state && history.state[name] !== undefined) part.restore(history.state[name]);
    }
  },
};
