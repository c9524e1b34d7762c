"use strict";

// Show a vertical line and the values at the pointer, in every chart with numbers.
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
  let index = common.length - 1;

  const show = (x) => {
    const lines = [];
    for (const curve of curves) {
      const at = nearest(curve.xs, x);
      if (Number.isNaN(curve.ys[at])) continue;
      const range = curve.ranges && curve.ranges[at] !== "-" ? ` (${curve.ranges[at].split(":").map(formatted).join(" to ")})` : "";
      const where = curve.xs[at] === x ? "" : ` at ${formatted(curve.xs[at])}`;
      lines.push(`${curve.label}: ${value(curve.ys[at])}${range}${where}`);
    }
    const share = high > low ? (x - low) / (high - low) : 0.5;
    cursor.setAttribute("d", `M${Math.round(share * 2000)} 0v1000`);
    tip.textContent = [`${figure.dataset.xname} ${formatted(x)}`, ...lines].join("\n");
    tip.classList.toggle("right", share < 0.5);
    tip.hidden = false;
  };
  const value = (number) => {
    if (figure.dataset.percent !== undefined) return `${formatted(Math.round(number * 1000) / 10)} %`;
    return formatted(number) + (figure.dataset.unit ? ` ${figure.dataset.unit}` : "");
  };
  const hide = () => {
    tip.hidden = true;
    cursor.removeAttribute("d");
  };

  canvas.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    index = nearest(common, low + ((event.clientX - box.left) / box.width) * (high - low));
    show(common[index]);
  });
  canvas.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    index = Math.min(common.length - 1, Math.max(0, tip.hidden ? index : index + step));
    show(common[index]);
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

function formatted(number) {
  return Number(number).toLocaleString("en", { maximumSignificantDigits: 4 });
}

// A slider instead of the list of steps.
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
    const node = document.createElement("button");
    Object.assign(node, { type: "button", textContent: text });
    node.setAttribute("aria-label", label);
    node.addEventListener("click", () => choose(Number(slider.value) + move));
    return node;
  };
  slider.addEventListener("input", () => choose(slider.value));
  bar.append(button("‹", "previous step", -1), slider, button("›", "next step", 1));
  steps[0].before(bar);
  choose(steps.length - 1);
}

// Open folded parts for printing.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not(.step)")) folded.open = true;
});

// Search the sampled completions: steps with a hit are opened, and everything else is hidden.
for (const box of document.querySelectorAll(".steps")) {
  const search = document.createElement("input");
  const count = document.createElement("span");
  Object.assign(search, { type: "search", placeholder: "Search prompts and completions" });
  search.setAttribute("aria-label", "Search prompts and completions");
  count.className = "note";
  const line = document.createElement("p");
  line.className = "search";
  const verdict = document.createElement("select");
  verdict.setAttribute("aria-label", "Filter completions");
  verdict.append(...["all", "right", "wrong", "unscored"].map((kind) => new Option(kind, kind === "all" ? "" : kind)));
  line.append(search, ...(box.querySelector("[data-verdict]") ? [verdict] : []), count);
  box.prepend(line);
  const text = (node) => node.textContent.toLowerCase();
  const choose = () => {
    const query = search.value.trim().toLowerCase();
    let hits = 0;
    for (const group of box.querySelectorAll(".group")) {
      const promptMatches = [...group.querySelectorAll(".prompt, .answer")].some((node) => text(node).includes(query));
      for (const completion of group.querySelectorAll(".completion")) {
        completion.hidden = (!promptMatches && !text(completion).includes(query)) || (verdict.value !== "" && completion.dataset.verdict !== verdict.value);
        for (const folded of completion.querySelectorAll("details")) folded.open = query !== "" && text(folded).includes(query);
        hits += !completion.hidden;
      }
      group.hidden = !group.querySelector(".completion:not([hidden])");
    }
    box.classList.toggle("searched", query !== "");
    const steps = [...box.querySelectorAll(".step")];
    for (const step of steps) {
      if (query === "") continue;
      step.hidden = !step.querySelector(".group:not([hidden])");
      step.open = !step.hidden;
    }
    count.textContent = query + verdict.value === "" ? "" : `${hits} completion${hits === 1 ? "" : "s"}`;
    if (query === "") box.querySelector(".stepper input")?.dispatchEvent(new Event("input"));
  };
  search.addEventListener("input", choose);
  verdict.addEventListener("input", choose);
}

// Export each figure as CSV (its numbers), SVG or PNG (its drawing).
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

// Return an SVG of the drawing with its labels in the colours of the page; styles are inlined.
function drawing(figure, title) {
  const space = "http://www.w3.org/2000/svg";
  const frame = figure.getBoundingClientRect();
  const [width, height] = [Math.round(frame.width), Math.round(frame.height)];
  const element = (name, values, text = "") => {
    const node = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
    node.textContent = text;
    return node;
  };
  const whole = element("svg", { xmlns: space, width, height, viewBox: `0 0 ${width} ${height}` });
  whole.append(element("rect", { width, height, fill: getComputedStyle(figure).backgroundColor }));
  const words = (node, text = node.textContent, shift = 0) => {
    const [box, style] = [node.getBoundingClientRect(), getComputedStyle(node)];
    const size = parseFloat(style.fontSize);
    const [x, y] = [box.left - frame.left + shift, box.top - frame.top + 0.95 * size];
    whole.append(element("text", { x, y, fill: style.color, "font-size": size, "font-family": "sans-serif" }, text));
  };
  for (const node of figure.querySelectorAll("h3, figcaption > .note, .newest, .y-title")) words(node);
  for (const node of figure.querySelectorAll(".legend li")) {
    const box = node.getBoundingClientRect();
    const fill = getComputedStyle(node, "::before").color;
    whole.append(element("rect", { x: box.left - frame.left, y: box.top - frame.top + 8, width: 12, height: 5, fill }));
    words(node, node.textContent, 18);
  }
  const styles = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
    "opacity", "vector-effect", "font-size", "text-anchor"];
  for (const svg of figure.querySelectorAll(".plot svg")) {
    const [box, copy] = [svg.getBoundingClientRect(), svg.cloneNode(true)];
    const [from, to] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
    from.forEach((node, at) => {
      const style = getComputedStyle(node);
      for (const name of styles) to[at].setAttribute(name, style.getPropertyValue(name));
      if (node.tagName === "text") to[at].setAttribute("font-family", "sans-serif");
      for (const name of Object.keys(to[at].dataset)) delete to[at].dataset[name];
    });
    const frameBox = { x: box.left - frame.left, y: box.top - frame.top, width: box.width, height: box.height };
    for (const [name, value] of Object.entries({ ...frameBox, overflow: "visible" })) copy.setAttribute(name, value);
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

// Reload the page of a running run, less often the older the page is. Open folds and the chosen step are restored.
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
  const reload = () => {
    const busy = document.querySelector(".tip:not([hidden])") || document.querySelector(".search input")?.value || String(getSelection());
    if (busy) return setTimeout(reload, 5000);
    const step = chosen ? chosen.value : null;
    history.replaceState({ folds: folds().map((fold) => fold.open), step, newest: !chosen || chosen.value === chosen.max }, "");
    return location.reload();
  };
  setTimeout(reload, 1000 * wait());
}
