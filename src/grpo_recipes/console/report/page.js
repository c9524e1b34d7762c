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

// Search in the sampled completions: every step with a hit is open, and what has none is hidden.
for (const box of document.querySelectorAll(".steps")) {
  const search = document.createElement("input");
  const count = document.createElement("span");
  Object.assign(search, { type: "search", placeholder: "search prompts and completions" });
  search.setAttribute("aria-label", "search prompts and completions");
  count.className = "note";
  const line = document.createElement("p");
  line.className = "search";
  const verdict = document.createElement("select");
  verdict.setAttribute("aria-label", "which completions");
  verdict.append(...["all", "right", "wrong", "unscored"].map((kind) => new Option(kind, kind === "all" ? "" : kind)));
  line.append(search, ...(box.querySelector("[data-verdict]") ? [verdict] : []), count);
  box.prepend(line);
  const text = (node) => node.textContent.toLowerCase();
  const choose = () => {
    const wanted = search.value.trim().toLowerCase();
    let hits = 0;
    for (const group of box.querySelectorAll(".group")) {
      const asked = [...group.querySelectorAll(".prompt, .answer")].some((node) => text(node).includes(wanted));
      for (const one of group.querySelectorAll(".completion")) {
        one.hidden = (!asked && !text(one).includes(wanted)) || (verdict.value !== "" && one.dataset.verdict !== verdict.value);
        for (const folded of one.querySelectorAll("details")) folded.open = wanted !== "" && text(folded).includes(wanted);
        hits += !one.hidden;
      }
      group.hidden = !group.querySelector(".completion:not([hidden])");
    }
    box.classList.toggle("searched", wanted !== "");
    const steps = [...box.querySelectorAll(".step")];
    for (const step of steps) {
      if (wanted === "") continue;
      step.hidden = !step.querySelector(".group:not([hidden])");
      step.open = !step.hidden;
    }
    count.textContent = wanted + verdict.value === "" ? "" : `${hits} completion${hits === 1 ? "" : "s"}`;
    if (wanted === "") box.querySelector(".stepper input")?.dispatchEvent(new Event("input"));
  };
  search.addEventListener("input", choose);
  verdict.addEventListener("input", choose);
}

// Each figure as a file: its numbers, its drawing, and the drawing as pixels.
for (const figure of document.querySelectorAll("figure.chart")) {
  const title = figure.querySelector("h3").textContent;
  const file = title.replace(/[^\w.-]+/g, "-").toLowerCase();
  const bar = document.createElement("p");
  bar.className = "export";
  const offer = (kind, label, make) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: kind });
    button.setAttribute("aria-label", `${label} of ${title}`);
    button.addEventListener("click", async () => {
      const link = document.createElement("a");
      link.download = `${file}.${kind.toLowerCase()}`;
      link.href = URL.createObjectURL(await make());
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
    bar.append(button);
  };
  if (figure.dataset.x) offer("CSV", "numbers", () => new Blob([table(figure)], { type: "text/csv" }));
  offer("SVG", "drawing", () => new Blob([drawing(figure, title)], { type: "image/svg+xml" }));
  offer("PNG", "picture", () => pixels(drawing(figure, title)));
  figure.append(bar);
}

function table(figure) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = [["curve", figure.dataset.xname, "value", "low", "high"].join(",")];
  for (const path of figure.querySelectorAll("[data-y]")) {
    const xs = (path.dataset.x || figure.dataset.x).split(" ");
    const ranges = path.dataset.range ? path.dataset.range.split(" ") : [];
    path.dataset.y.split(" ").forEach((y, at) => {
      const [low, high] = ranges[at] && ranges[at] !== "-" ? ranges[at].split(":") : ["", ""];
      if (y !== "-") rows.push([quoted(path.dataset.label), xs[at], y, low, high].join(","));
    });
  }
  return rows.join("\n") + "\n";
}

// One SVG of the drawing with its labels, in the colours of the page; styles are written into it.
function drawing(figure, title) {
  const space = "http://www.w3.org/2000/svg";
  const frame = figure.getBoundingClientRect();
  const [width, height] = [Math.round(frame.width), Math.round(frame.height)];
  const made = (name, values, text = "") => {
    const node = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
    node.textContent = text;
    return node;
  };
  const whole = made("svg", { xmlns: space, width, height, viewBox: `0 0 ${width} ${height}` });
  whole.append(made("rect", { width, height, fill: getComputedStyle(figure).backgroundColor }));
  const words = (node, text = node.textContent, shift = 0) => {
    const [box, style] = [node.getBoundingClientRect(), getComputedStyle(node)];
    const size = parseFloat(style.fontSize);
    const [x, y] = [box.left - frame.left + shift, box.top - frame.top + 0.95 * size];
    whole.append(made("text", { x, y, fill: style.color, "font-size": size, "font-family": "sans-serif" }, text));
  };
  for (const node of figure.querySelectorAll("h3, figcaption > .note, .newest, .y-title")) words(node);
  for (const node of figure.querySelectorAll(".legend li")) {
    const box = node.getBoundingClientRect();
    const fill = getComputedStyle(node, "::before").color;
    whole.append(made("rect", { x: box.left - frame.left, y: box.top - frame.top + 8, width: 12, height: 5, fill }));
    words(node, node.textContent, 18);
  }
  const kept = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
    "opacity", "vector-effect", "font-size", "text-anchor"];
  for (const svg of figure.querySelectorAll(".plot svg")) {
    const [box, copy] = [svg.getBoundingClientRect(), svg.cloneNode(true)];
    const [from, to] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
    from.forEach((node, at) => {
      const style = getComputedStyle(node);
      for (const name of kept) to[at].setAttribute(name, style.getPropertyValue(name));
      if (node.tagName === "text") to[at].setAttribute("font-family", "sans-serif");
      for (const name of Object.keys(to[at].dataset)) delete to[at].dataset[name];
    });
    const place = { x: box.left - frame.left, y: box.top - frame.top, width: box.width, height: box.height };
    for (const [name, value] of Object.entries({ ...place, overflow: "visible" })) copy.setAttribute(name, value);
    whole.append(copy);
  }
  whole.setAttribute("aria-label", title);
  return new XMLSerializer().serializeToString(whole);
}

function pixels(svg) {
  return new Promise((done) => {
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = document.createElement("canvas");
      Object.assign(canvas, { width: 2 * image.width, height: 2 * image.height });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(done);
    });
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  });
}

// The page of a run that goes on loads itself again, less often the older it is; what is open and chosen stays.
const live = document.querySelector(".live");
const folds = () => [...document.querySelectorAll("details:not(.step)")];
const chosen = document.querySelector(".stepper input");
if (history.state && history.state.folds) {
  folds().forEach((fold, at) => { fold.open = Boolean(history.state.folds[at]); });
  if (chosen && !history.state.newest) {
    chosen.value = history.state.step;
    chosen.dispatchEvent(new Event("input"));
  }
}
if (live) {
  const wait = () => Math.max(15, (Date.now() / 1000 - Number(live.dataset.written)) / 4);
  const again = () => {
    const busy = document.querySelector(".tip:not([hidden])") || document.querySelector(".search input")?.value || String(getSelection());
    if (busy) return setTimeout(again, 5000);
    const step = chosen ? chosen.value : null;
    history.replaceState({ folds: folds().map((fold) => fold.open), step, newest: !chosen || chosen.value === chosen.max }, "");
    return location.reload();
  };
  setTimeout(again, 1000 * wait());
}
