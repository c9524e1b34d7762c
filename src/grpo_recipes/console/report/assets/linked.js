// Link the charts of a page: one toolbar, one crosshair, one zoom, and legends that hide a curve in every chart.
//
// Hover or use the arrow keys to read all charts at a step. Drag to zoom, and double-click to reset. Click or press Enter
// to pin the step: the event "report:pin" then tells completions.js which step to show.

const view = { axis: "step", window: 1, firstWindow: 1, zoom: null, hidden: new Set(), at: null, pinned: null };
view.window = view.firstWindow = clocks.length ? Math.max(...clocks.map((clock) => clock.window)) : 1;

const charts = [...document.querySelectorAll("figure[data-lines]")].map((figure) => new LineChart(figure, view));
// Charts of distributions over steps: they only have the crosshair.
const maps = [...document.querySelectorAll("figure[data-frame]:not([data-lines])")];

function drawAll() {
  for (const chart of charts) {
    chart.draw();
    if (!chart.dropped) continue;
    chart.dropped.textContent = describeDropped(chart);
    chart.dropped.hidden = !chart.dropped.textContent;
  }
  showAt(view.at === null ? view.pinned : view.at, null);
  toolbar?.update();
}

// The points of the lines that a logarithmic axis can't show, as a sentence.
function describeDropped(chart) {
  const [from, to] = chart.x;
  const isDropped = (curve) => {
    const [xs, line] = [curve.xs(chart.axis), curve.line(curve.span(chart.window))];
    return line.filter((value, index) => value <= 0 && xs[index] >= from && xs[index] <= to);
  };
  const count = chart.log ? chart.shown.flatMap(isDropped).length : 0;
  return count ? `${count} value${count === 1 ? "" : "s"} of 0 or less not drawn on the log axis` : "";
}

// --- the crosshair

const isVisible = (node) => node.getClientRects().length > 0;

function showAt(x, source) {
  view.at = x;
  for (const chart of charts) {
    const isRead = x !== null && (chart.isLinked || chart === source) && isVisible(chart.figure);
    if (isRead && (chart === source || source === null || source.isLinked)) readAt(chart, x, chart === source);
    else clearRead(chart);
  }
  for (const figure of maps) {
    const [low, high] = numbers(figure.dataset.frame);
    const step = x === null || (source && !source.isLinked) ? NaN : convert(reference, view.axis, "step", x);
    const isInside = step >= low && step <= high;
    drawCursor(figure, isInside ? (step - low) / (high - low || 1) : null);
  }
}

function drawCursor(figure, share) {
  const cursor = figure.querySelector(".cursor");
  if (share === null || share < 0 || share > 1) return cursor.removeAttribute("d");
  cursor.classList.toggle("pinned", view.pinned !== null && view.at === view.pinned);
  return cursor.setAttribute("d", `M${Math.round(share * WIDTH)} 0v${HEIGHT}`);
}

function readAt(chart, x, hasTip) {
  const [from, to] = chart.x;
  const share = to > from ? (x - from) / (to - from) : 0.5;
  const rows = chart.read(x);
  drawCursor(chart.figure, share);
  const tip = chart.figure.querySelector(".tip");
  tip.hidden = !hasTip;
  if (hasTip) {
    const name = chart.axis === "step" || chart.axis === "min" ? chart.axis : "tokens";
    tip.textContent = [`${name} ${formatted(x)}`, ...rows.map((row) => row.text)].join("\n");
    tip.classList.toggle("right", share < 0.5);
  }
  if (chart.newest && rows.length) chart.newest.textContent = rows[0].value;
  for (const [label, output] of chart.outputs || []) {
    output.textContent = rows.find((row) => row.curve.label === label)?.value || "";
  }
}

function clearRead(chart) {
  drawCursor(chart.figure, null);
  chart.figure.querySelector(".tip").hidden = true;
  if (chart.newest) chart.newest.textContent = chart.newestText;
  for (const [, output] of chart.outputs || []) output.textContent = "";
}

function pin(x) {
  view.pinned = x;
  showAt(x, null);
  const step = x === null ? null : convert(reference, view.axis, "step", x);
  document.dispatchEvent(new CustomEvent("report:pin", { detail: step }));
}

// --- zoom

function fullRange() {
  const ranges = charts.filter((chart) => chart.isLinked).map((chart) => chart.fullX());
  return [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))];
}

function zoomTo(from, to) {
  const [low, high] = fullRange();
  const range = [Math.max(low, Math.min(from, to)), Math.min(high, Math.max(from, to))];
  view.zoom = range[0] <= low && range[1] >= high ? null : range;
  drawAll();
}

// Zoom by a factor around the crosshair, or around the middle.
function zoomBy(factor) {
  const [from, to] = view.zoom || fullRange();
  const center = view.at ?? view.pinned ?? (from + to) / 2;
  zoomTo(center - (center - from) * factor, center + (to - center) * factor);
}

function resetZoom() {
  view.zoom = null;
  drawAll();
}

// --- pointer and keys on a chart

for (const chart of charts) {
  const canvas = chart.figure.querySelector(".canvas");
  const frame = document.createElementNS(SVG, "rect");
  frame.setAttribute("class", "selection");
  frame.setAttribute("height", HEIGHT);
  let start = null;
  const positionOf = (event) => {
    const box = chart.area.getBoundingClientRect();
    const [from, to] = chart.x;
    return from + Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * (to - from);
  };
  const pointNear = (x) => {
    const [from, to] = chart.x;
    const xs = chart.curves[0].xs(chart.axis).map((value) => (value < from || value > to ? NaN : value));
    const index = nearest(xs, x);
    return index < 0 ? x : xs[index];
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = { x: positionOf(event), clientX: event.clientX, isMouse: event.pointerType === "mouse" };
  });
  canvas.addEventListener("pointermove", (event) => {
    showAt(pointNear(positionOf(event)), chart);
    if (!start || !start.isMouse || !chart.isLinked || Math.abs(event.clientX - start.clientX) < 6) return;
    if (event.buttons === 0) return;
    const [a, b] = [start.x, positionOf(event)].map((x) => chart.locateX(x)).sort((first, second) => first - second);
    frame.setAttribute("x", a);
    frame.setAttribute("width", b - a);
    chart.area.append(frame);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!start) return;
    const [first, last, wasDragged] = [start.x, positionOf(event), Boolean(frame.parentNode)];
    start = null;
    frame.remove();
    if (wasDragged) zoomTo(first, last);
    else if (chart.isLinked) pin(view.pinned === pointNear(last) ? null : pointNear(last));
  });
  canvas.addEventListener("pointerleave", () => {
    start = null;
    frame.remove();
    showAt(view.pinned, null);
  });
  canvas.addEventListener("dblclick", resetZoom);
  chart.figure.addEventListener("blur", () => showAt(view.pinned, null));
  chart.figure.addEventListener("keydown", (event) => {
    if (event.target !== chart.figure) return;
    const action = keys(chart, pointNear)[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

function keys(chart, pointNear) {
  const move = (count) => () => {
    const xs = chart.curves[0].xs(chart.axis).filter((x) => x >= chart.x[0] && x <= chart.x[1]);
    const at = view.at === null ? xs.length - 1 : nearest(xs, view.at) + count;
    showAt(xs[Math.min(xs.length - 1, Math.max(0, at))], chart);
  };
  return {
    ArrowLeft: move(-1),
    ArrowRight: move(1),
    Home: move(-Infinity),
    End: move(Infinity),
    "+": () => zoomBy(0.5),
    "-": () => zoomBy(2),
    Escape: () => (view.pinned === null ? resetZoom() : pin(null)),
    Enter: () => view.at !== null && chart.isLinked && pin(pointNear(view.at)),
  };
}

// --- legends and log axes

for (const chart of charts) {
  chart.outputs = [...chart.figure.querySelectorAll(".legend li")].map((entry) => {
    const label = entry.textContent;
    const toggle = button("", "", (event) => {
      if (event.shiftKey) showOnly(label, chart);
      else view.hidden[view.hidden.has(label) ? "delete" : "add"](label);
      drawAll();
      updateLegends();
    });
    toggle.title = `Show or hide ${label}. With Shift: show only ${label}.`;
    const output = document.createElement("span");
    output.className = "at";
    toggle.append(...entry.childNodes);
    entry.append(toggle, output);
    return [label, output];
  });
  const values = chart.curves.flatMap((curve) => curve.ys);
  if (!chart.isStacked && values.some((value) => value > 0)) {
    const toggle = button("log", `Logarithmic axis of ${chart.figure.querySelector("h3").textContent}`, () => {
      chart.log = !chart.log;
      toggle.setAttribute("aria-pressed", chart.log);
      drawAll();
    });
    toggle.className = "log";
    toggle.setAttribute("aria-pressed", "false");
    chart.figure.querySelector("h3").after(toggle);
    chart.dropped = document.createElement("p");
    Object.assign(chart.dropped, { className: "note dropped", hidden: true });
    chart.figure.querySelector(".plot").after(chart.dropped);
  }
}
updateLegends();

function showOnly(label, chart) {
  const others = chart.curves.map((curve) => curve.label).filter((other) => other !== label);
  const isOnly = others.every((other) => view.hidden.has(other)) && !view.hidden.has(label);
  view.hidden.delete(label);
  for (const other of others) view.hidden[isOnly ? "delete" : "add"](other);
}

function updateLegends() {
  for (const toggle of document.querySelectorAll(".legend button")) {
    toggle.setAttribute("aria-pressed", !view.hidden.has(toggle.textContent));
  }
}

// --- links from a card to a chart at a step

for (const link of document.querySelectorAll(".card a[data-step]")) {
  link.addEventListener("click", () => {
    const target = charts.find((chart) => `#${chart.figure.id}` === link.hash);
    target?.figure.closest("details")?.setAttribute("open", "");
    if (target) showAt(convert(reference, "step", view.axis, Number(link.dataset.step)), target);
  });
}

// --- the toolbar

const toolbar = charts.length && clocks.length ? makeToolbar() : null;

function makeToolbar() {
  const bar = document.createElement("div");
  bar.className = "toolbar";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "All charts");

  const field = (text, input, ...more) => {
    const label = document.createElement("label");
    label.append(text, input, ...more);
    return label;
  };
  const axis = document.createElement("select");
  const available = Object.keys(AXES).filter((name) => clocks.every((clock) => !clock.rows || clock[name].some(Number.isFinite)));
  axis.append(...available.map((name) => new Option({ step: "steps", min: "minutes", tokens: "tokens" }[name], name)));
  axis.addEventListener("input", () => {
    const move = (x) => (x === null ? null : convert(reference, view.axis, axis.value, x));
    Object.assign(view, { pinned: move(view.pinned), at: null, zoom: null });
    view.axis = axis.value;
    drawAll();
  });

  const rows = Math.max(...clocks.map((clock) => clock.rows));
  const windows = [1, 3, 5, 9, 15, 25, 51, 101, 201, 401].filter((size) => size === 1 || size <= rows / 2);
  const sizes = [...new Set([...windows, view.firstWindow])].sort((a, b) => a - b);
  const slider = document.createElement("input");
  const output = document.createElement("output");
  Object.assign(slider, { type: "range", min: 0, max: sizes.length - 1 });
  slider.addEventListener("input", () => {
    view.window = sizes[slider.value];
    drawAll();
  });

  const zoom = document.createElement("span");
  const reset = button("Reset zoom", "", resetZoom);
  zoom.append(button("+", "Zoom in", () => zoomBy(0.5)), button("−", "Zoom out", () => zoomBy(2)), reset);
  bar.append(field("Axis ", axis), ...(sizes.length > 1 ? [field("Smoothing ", slider, output)] : []), zoom);

  const hint = document.createElement("p");
  hint.className = "note hint";
  const target = document.querySelector(".steps .step") ? "read a step and its completions" : "read a step";
  hint.textContent = matchMedia("(hover: none)").matches ? `Tap a chart to ${target}.` : `Drag to zoom. Click a chart to ${target}.`;
  bar.append(hint);
  (document.querySelector(".clocks")).after(bar);

  const update = () => {
    axis.value = view.axis;
    slider.value = sizes.indexOf(view.window);
    output.textContent = view.window === 1 ? "none" : `${view.window} steps`;
    slider.setAttribute("aria-valuetext", output.textContent);
    reset.disabled = view.zoom === null;
    const [means, behind] = document.querySelectorAll(".smoothing span");
    const isFirst = view.window === view.firstWindow;
    const hasFixedBands = !isFirst && charts.some((chart) => chart.curves.some((curve) => curve.isBandFixed));
    if (!means) return;
    behind.hidden = view.window === 1;
    means.textContent = view.window === 1 ? "Lines are not smoothed." : `Lines are means over ${view.window} steps around each point, fewer at the ends.`;
    if (hasFixedBands) means.textContent += ` Intervals are only drawn ${view.firstWindow === 1 ? "without smoothing" : `over ${view.firstWindow} steps`}.`;
  };
  update();
  return { update };
}

memory.add(
  "charts",
  () => ({ axis: view.axis, window: view.window, zoom: view.zoom, hidden: [...view.hidden], pinned: view.pinned, log: charts.map((chart) => chart.log) }),
  (state) => {
    Object.assign(view, { axis: state.axis, zoom: state.zoom, hidden: new Set(state.hidden) });
    if (state.window) view.window = state.window;
    charts.forEach((chart, index) => { chart.log = Boolean(state.log[index]); });
    for (const chart of charts) chart.figure.querySelector(".log")?.setAttribute("aria-pressed", chart.log);
    drawAll();
    updateLegends();
    if (state.pinned !== null) pin(state.pinned);
  },
);
