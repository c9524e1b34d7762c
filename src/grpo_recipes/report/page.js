"use strict";

// A vertical line and the values at the pointer, in every chart that holds its numbers.
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const area = figure.querySelector(".area");
  const canvas = figure.querySelector(".canvas");
  const tip = figure.querySelector(".tip");
  const cursor = figure.querySelector(".cursor");
  const low = Number(figure.dataset.low);
  const high = Number(figure.dataset.high);
  const common = numbers(figure.dataset.x);
  const curves = [...figure.querySelectorAll("[data-y]")].map((path) => ({
    label: path.dataset.label,
    xs: path.dataset.x ? numbers(path.dataset.x) : common,
    ys: numbers(path.dataset.y),
    ranges: path.dataset.range ? path.dataset.range.split(" ") : null,
  }));
  let place = common.length - 1;

  const show = (x) => {
    const lines = [];
    for (const curve of curves) {
      const at = nearest(curve.xs, x);
      if (Number.isNaN(curve.ys[at])) continue;
      const range = curve.ranges && curve.ranges[at] !== "-" ? ` (${curve.ranges[at].split(":").map(said).join(" to ")})` : "";
      const where = curve.xs[at] === x ? "" : ` at ${said(curve.xs[at])}`;
      lines.push(`${curve.label}: ${value(curve.ys[at])}${range}${where}`);
    }
    const share = high > low ? (x - low) / (high - low) : 0.5;
    cursor.setAttribute("d", `M${Math.round(share * 2000)} 0v1000`);
    tip.textContent = [`${figure.dataset.xname} ${said(x)}`, ...lines].join("\n");
    tip.classList.toggle("right", share < 0.5);
    tip.hidden = false;
  };
  const value = (number) => {
    if (figure.dataset.percent !== undefined) return `${said(Math.round(number * 1000) / 10)} %`;
    return said(number) + (figure.dataset.unit ? ` ${figure.dataset.unit}` : "");
  };
  const hide = () => {
    tip.hidden = true;
    cursor.removeAttribute("d");
  };

  canvas.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    place = nearest(common, low + ((event.clientX - box.left) / box.width) * (high - low));
    show(common[place]);
  });
  canvas.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    place = Math.min(common.length - 1, Math.max(0, tip.hidden ? place : place + step));
    show(common[place]);
  });
}

function numbers(text) {
  return text.split(" ").map((part) => (part === "-" ? NaN : Number(part)));
}

function nearest(xs, x) {
  let best = 0;
  for (let index = 1; index < xs.length; index += 1) {
    if (Math.abs(xs[index] - x) < Math.abs(xs[best] - x)) best = index;
  }
  return best;
}

function said(number) {
  return Number(number).toLocaleString("en", { maximumSignificantDigits: 4 });
}

// A slider in place of the list of steps.
for (const box of document.querySelectorAll(".steps")) {
  const steps = [...box.querySelectorAll(".step")];
  if (steps.length < 2) continue;
  const bar = document.createElement("div");
  const slider = document.createElement("input");
  bar.className = "stepper";
  Object.assign(slider, { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1 });
  slider.setAttribute("aria-label", "step");
  const choose = (index) => {
    slider.value = index;
    slider.setAttribute("aria-valuetext", `step ${steps[slider.value].dataset.step}`);
    steps.forEach((step, at) => {
      step.hidden = at !== Number(slider.value);
      step.open = !step.hidden;
    });
  };
  const button = (text, label, move) => {
    const made = document.createElement("button");
    Object.assign(made, { type: "button", textContent: text });
    made.setAttribute("aria-label", label);
    made.addEventListener("click", () => choose(Number(slider.value) + move));
    return made;
  };
  slider.addEventListener("input", () => choose(slider.value));
  bar.append(button("‹", "step before", -1), slider, button("›", "step after", 1));
  steps[0].before(bar);
  choose(steps.length - 1);
}

// What is folded is printed too.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not(.step)")) folded.open = true;
});
