// Draw the charts of a page again after a zoom, with another smoothing, or on another axis.
//
// A page is readable without scripts: each chart is an SVG that stretches over 2000 x 1000 units, with labels around it.
// `LineChart` reads the numbers from the attributes of the figure and of its curves, and replaces the paths. In its first
// state it shows the paths of the page. The templates (charts.html.j2) describe the attributes.

const WIDTH = 2000;
const HEIGHT = 1000;
const SVG = "http://www.w3.org/2000/svg";
const AXES = { step: "optimizer step", min: "minutes in steps", tokens: "tokens" };

// Steps, minutes and tokens of each group of runs on the page.
const clocks = [...document.querySelectorAll(".clocks li")].map((node) => ({
  step: numbers(node.dataset.step),
  min: numbers(node.dataset.min),
  tokens: numbers(node.dataset.tokens),
  rows: Number(node.dataset.rows),
  window: Number(node.dataset.window),
}));
// The clock that relates axes; a run without a step has an empty clock.
const reference = clocks.find((clock) => clock.rows) || clocks[0];

// Convert between steps, minutes and tokens with straight lines between the points of a clock.
function convert(clock, from, to, x) {
  if (from === to || !clock) return x;
  const [xs, ys] = [clock[from], clock[to]];
  let index = xs.findIndex((value) => value >= x);
  if (index < 0) index = xs.length - 1;
  if (index === 0 || xs[index] === x) return ys[index];
  const share = (x - xs[index - 1]) / (xs[index] - xs[index - 1]);
  return ys[index - 1] + Math.min(share, 1) * (ys[index] - ys[index - 1]);
}

// Means over `span` neighbors; gaps stay gaps if all neighbors are gaps.
function smoothed(values, span) {
  if (span <= 1) return values;
  const half = Math.floor(span / 2);
  return values.map((_, index) => {
    const around = values.slice(Math.max(0, index - half), index + half + 1).filter((value) => !Number.isNaN(value));
    return around.length ? around.reduce((sum, value) => sum + value, 0) / around.length : NaN;
  });
}

// Split points at gaps that are longer than the usual distance of values, and drop points that are gaps.
function stretches(points) {
  const known = points.map((_, index) => index).filter((index) => !points[index].some(Number.isNaN));
  const distances = known.slice(1).map((index, before) => index - known[before]);
  const usual = [...distances].sort((a, b) => a - b)[Math.floor(distances.length / 2)] || 1;
  const parts = [];
  known.forEach((index, order) => {
    if (order === 0 || distances[order - 1] > usual) parts.push([]);
    parts[parts.length - 1].push(points[index]);
  });
  return parts;
}

// Lowest and highest value without rare outliers, as in chart.py.
function usualRange(values) {
  const ordered = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!ordered.length) return [0, 1];
  const rare = ordered.length < 20 ? 0 : Math.max(1, Math.floor(ordered.length / 100));
  const [low, high] = [ordered[rare], ordered[ordered.length - 1 - rare]];
  const margin = 1.5 * (high - low);
  return [Math.max(ordered[0], low - margin), Math.min(ordered[ordered.length - 1], high + margin)];
}

// Round numbers about `count` intervals apart; integers if `isWhole`.
function ticksOf(low, high, count, isWhole = false) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  let distance = power * [1, 2, 2.5, 5, 10].find((factor) => power * factor >= raw * 0.999);
  if (isWhole) distance = Math.max(1, Math.ceil(distance));
  const [first, last] = [Math.ceil(low / distance - 1e-9), Math.floor(high / distance + 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * distance);
}

// Add the ends of the axis to its ticks if there is room, as in chart.py; only integers if `isWhole`.
function withEnds(ticks, low, high, isWhole) {
  const gap = ticks.length > 1 ? 0.6 * (ticks[1] - ticks[0]) : 0;
  const hasRoom = (end) => ticks.every((tick) => Math.abs(end - tick) > gap) && (!isWhole || Number.isInteger(end));
  return [...[low].filter(hasRoom), ...ticks, ...[high].filter(hasRoom)];
}

// The labels of ticks, with more digits if two ticks would have the same label, as in chart.py.
function distinctTexts(ticks, text) {
  const texts = ticks.map(text);
  if (new Set(texts).size === texts.length) return texts;
  const [scale, unit] = texts[0].endsWith("%") ? [100, " %"] : [1, ""];
  const digits = Math.max(0, 1 - Math.floor(Math.log10(scale * (ticks[1] - ticks[0]))));
  return ticks.map((tick) => (scale * tick).toLocaleString("en", { maximumFractionDigits: digits }) + unit);
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of high / low > 1000 ? [1] : [1, 2, 5]) ticks.push(factor * 10 ** power);
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

class Curve {
  constructor(group, figure) {
    const data = group.dataset;
    this.group = group;
    this.label = data.label;
    this.kind = data.kind;
    this.clock = clocks[Number(data.clock)];
    this.steps = numbers(data.x || figure.dataset.x);
    if (!this.steps.length) this.steps = this.clock.step;
    this.ys = numbers(data.y);
    this.band = data.band ? data.band.split(" ").map((pair) => (pair === "-" ? [NaN, NaN] : pair.split(":").map(Number))) : null;
    this.hasRange = data.bandLabel !== undefined;
    this.isBandRaw = data.bandRaw !== undefined;
    this.isBandFixed = data.bandFixed !== undefined;
    this.seeds = data.seeds ? data.seeds.split("|").map(numbers) : [];
    this.paths = [...group.querySelectorAll("path")];
    this.first = this.paths.map((path) => path.getAttribute("d"));
    this.positions = {};
    this.lines = {};
    this.bands = {};
  }

  // The positions of the points on an axis of the page.
  xs(axis) {
    if (axis === "step" || !this.clock) return this.steps;
    if (!this.positions[axis]) this.positions[axis] = this.steps.map((step) => convert(this.clock, "step", axis, step));
    return this.positions[axis];
  }

  // The values smoothed over `span` points.
  line(span) {
    if (!this.lines[span]) this.lines = { [span]: smoothed(this.ys, span) };
    return this.lines[span];
  }

  // The edges of the area, smoothed like the line; null if there is none, or none with this smoothing.
  edges(span, isFirstWindow) {
    if (!this.band || (this.isBandFixed && !isFirstWindow)) return null;
    if (!this.isBandRaw) return this.band;
    if (!this.bands[span]) {
      const [low, high] = [0, 1].map((side) => smoothed(this.band.map((pair) => pair[side]), span));
      this.bands = { [span]: low.map((value, index) => [value, high[index]]) };
    }
    return this.bands[span];
  }

  // The number of points that a window of steps covers.
  span(window) {
    if (this.kind === "dots" || !this.clock) return 1;
    const points = Math.round((window * this.clock.step.length) / this.clock.rows);
    return Math.max(1, points) | 1;
  }

  restore() {
    this.paths.forEach((path, index) => {
      if (this.first[index] === null) path.remove();
      else path.setAttribute("d", this.first[index]);
    });
    this.paths = this.paths.filter((_, index) => this.first[index] !== null);
    this.first = this.first.filter((d) => d !== null);
  }

  path(kind) {
    const selector = kind === "line" ? ".line, .dots, .layer" : `.${kind}`;
    let path = this.group.querySelector(selector);
    if (!path) {
      path = document.createElementNS(SVG, "path");
      path.setAttribute("class", kind);
      this.group.prepend(path);
      this.paths.push(path);
      this.first.push(null);
    }
    return path;
  }
}

// A figure with curves. `view` is the state of all charts of the page (linked.js).
class LineChart {
  constructor(figure, view) {
    Object.assign(this, { figure, view, log: false });
    this.area = figure.querySelector(".area");
    this.curves = [...figure.querySelectorAll(".curve")].map((group) => new Curve(group, figure));
    this.xname = figure.dataset.xname;
    this.frame = numbers(figure.dataset.frame);
    this.isStacked = this.curves[0].kind === "layer";
    this.isPlain = figure.dataset.plain !== undefined;
    this.up = figure.querySelector(".up");
    this.across = figure.querySelector(".across");
    this.grid = figure.querySelector(".grid");
    this.marks = [...figure.querySelectorAll(".resumed")];
    this.first = [this.up, this.across, this.grid].map((node) => node.cloneNode(true));
    this.newest = figure.querySelector(".newest");
    this.firstNewest = this.newest && this.newest.textContent;
    this.measure();
  }

  // A chart on minutes has no steps, so the page's axis and zoom do not apply.
  get axis() {
    return this.xname === "step" ? this.view.axis : this.xname;
  }

  get isLinked() {
    return this.axis === this.view.axis;
  }

  get window() {
    return this.isPlain || this.isStacked ? 1 : this.view.window;
  }

  get isFirstWindow() {
    return this.window === (this.isPlain || this.isStacked ? 1 : this.view.firstWindow);
  }

  // The newest value of the first curve.
  get newestText() {
    if (this.isFirstWindow) return this.firstNewest;
    const [curve] = this.curves;
    const span = curve.span(this.window);
    const known = curve.line(span).filter((value) => !Number.isNaN(value));
    return known.length ? this.label(known[known.length - 1], span) : "";
  }

  // A value of a line that is a mean over `span` points.
  label(value, span) {
    return this.text(value) + (span > 1 ? " smoothed" : "");
  }

  text(value) {
    const { percent, unit } = this.figure.dataset;
    if (percent !== undefined) return `${formatted(Math.round(value * 1000) / 10)} %`;
    return formatted(value) + (unit ? ` ${unit}` : "");
  }

  // Compute the range of both axes, and whether they differ from the page's drawing.
  measure() {
    const { zoom, hidden } = this.view;
    this.x = zoom && this.isLinked ? zoom : this.fullX();
    this.shown = this.curves.filter((curve) => !hidden.has(curve.label));
    const isFirst = this.axis === this.xname && !(zoom && this.isLinked) && !this.log && this.shown.length === this.curves.length;
    this.isFirst = isFirst && this.isFirstWindow;
    this.y = this.isFirst ? [this.frame[2], this.frame[3]] : this.measureValues();
  }

  // The range of the horizontal axis without a zoom.
  fullX() {
    if (this.axis === this.xname) return [this.frame[0], this.frame[1]];
    return [0, Math.max(...this.curves.flatMap((curve) => curve.xs(this.axis)).filter(Number.isFinite))];
  }

  measureValues() {
    const [from, to] = this.x;
    const { zoom } = this.view;
    const [lines, behind] = [[], []];
    const stack = this.isStacked ? this.stack() : null;
    const edges = this.shown.map((curve) => curve.edges(curve.span(this.window), this.isFirstWindow));
    this.shown.forEach((curve, order) => {
      const xs = curve.xs(this.axis);
      const line = stack ? stack[order].map(([, high]) => high) : curve.line(curve.span(this.window));
      xs.forEach((x, index) => {
        if (x < from || x > to) return;
        lines.push(line[index]);
        if (!stack) behind.push(curve.ys[index], ...(edges[order] ? edges[order][index] : []));
      });
    });
    const [bottom, top] = [this.frame[2], this.frame[3]];
    const isWhole = !this.log && !(zoom && this.isLinked) && this.shown.length === this.curves.length;
    if (isWhole && lines.every((value) => Number.isNaN(value) || (value >= bottom && value <= top))) return [bottom, top];
    const usable = (values) => (this.log ? values.filter((value) => value > 0) : values);
    const ranges = [usualRange(usable(lines)), usualRange(usable(behind.length ? behind : lines))];
    let [low, high] = [Math.min(ranges[0][0], ranges[1][0]), Math.max(ranges[0][1], ranges[1][1])];
    if (stack) low = 0;
    if (this.log) return [low / 1.1 || 1e-12, high * 1.1 || 1];
    if (low === high) [low, high] = low ? [Math.min(low, 0), Math.max(high, 0)] : [0, 1];
    if (low > 0 && low <= 0.5 * high) low = 0;
    const ticks = ticksOf(low, high, 4);
    const distance = ticks.length > 1 ? ticks[1] - ticks[0] : high - low;
    [low, high] = [Math.floor(low / distance + 1e-9) * distance, Math.ceil(high / distance - 1e-9) * distance];
    return this.figure.dataset.percent === undefined ? [low, high] : [Math.max(low, 0), Math.min(high, 1)];
  }

  // Lower and upper edge of each shown layer; hidden layers leave no space.
  stack() {
    let below = this.shown.length ? this.shown[0].ys.map(() => 0) : [];
    return this.shown.map((curve) => {
      const edges = curve.ys.map((value, index) => [below[index], below[index] + (value || 0)]);
      below = edges.map(([, high]) => high);
      return edges;
    });
  }

  locateX(x) {
    return Math.round((WIDTH * (x - this.x[0])) / (this.x[1] - this.x[0]));
  }

  locateY(y) {
    const scale = this.log ? Math.log : (value) => value;
    const [low, high] = this.y.map(scale);
    const share = (scale(y) - low) / (high - low);
    return Number.isNaN(share) || !Number.isFinite(scale(y)) ? NaN : Math.round(HEIGHT * (1 - Math.min(Math.max(share, 0), 1)));
  }

  draw() {
    this.measure();
    for (const curve of this.curves) curve.group.toggleAttribute("hidden", this.view.hidden.has(curve.label));
    this.figure.classList.toggle("zoomed", Boolean(this.view.zoom) && this.isLinked);
    if (this.isFirst) {
      this.curves.forEach((curve) => curve.restore());
      this.up.setAttribute("width", this.first[0].getAttribute("width"));
      [this.up, this.across].forEach((node, index) => node.replaceChildren(...this.first[index].cloneNode(true).childNodes));
      this.grid.setAttribute("d", this.first[2].getAttribute("d"));
    } else {
      const stack = this.isStacked ? this.stack() : [];
      this.shown.forEach((curve, order) => this.drawCurve(curve, stack[order]));
      this.drawAxes();
    }
    for (const mark of this.marks) {
      const x = convert(reference, "step", this.axis, Number(mark.dataset.step));
      mark.setAttribute("d", x < this.x[0] || x > this.x[1] ? "" : `M${this.locateX(x)} 0v${HEIGHT}`);
    }
  }

  drawCurve(curve, edges) {
    const xs = curve.xs(this.axis);
    const span = curve.span(this.window);
    const points = (ys) => xs.map((x, index) => [this.locateX(x), this.locateY(ys[index])]);
    const polyline = (ys) => stretches(points(ys)).map((part) => (part.length > 1 ? `M${part.join("L")}` : "")).join("");
    const area = (pairs) => {
      const rows = xs.map((x, index) => [this.locateX(x), ...pairs[index].map((value) => this.locateY(value))]);
      const outline = (part) => [...part.map(([x, , high]) => [x, high]), ...[...part].reverse().map(([x, low]) => [x, low])];
      return stretches(rows).map((part) => `M${outline(part).join("L")}z`).join("");
    };
    if (edges) return curve.path("line").setAttribute("d", area(edges));
    const line = curve.line(span);
    if (curve.kind === "dots") {
      const dots = points(line).filter(([x, y]) => x >= 0 && x <= WIDTH && !Number.isNaN(y));
      return curve.path("line").setAttribute("d", dots.map((point) => `M${point}h0`).join(""));
    }
    curve.path("line").setAttribute("d", polyline(line));
    const lone = stretches(points(line)).filter((part) => part.length === 1);
    if (lone.length || curve.group.querySelector(".lone")) curve.path("lone").setAttribute("d", lone.map((part) => `M${part}h0`).join(""));
    const band = curve.edges(span, this.isFirstWindow);
    if (curve.band) curve.path("band").setAttribute("d", band ? area(band) : "");
    if (curve.seeds.length) {
      const faint = curve.paths.filter((path) => path.matches(".faint"));
      curve.seeds.forEach((ys, index) => faint[index].setAttribute("d", polyline(smoothed(ys, span))));
    } else if (!this.isPlain && (span > 1 || curve.group.querySelector(".faint"))) {
      curve.path("faint").setAttribute("d", span > 1 ? polyline(curve.ys) : "");
    }
    return undefined;
  }

  drawAxes() {
    const label = (text, values) => {
      const node = document.createElementNS(SVG, "text");
      for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
      node.textContent = text;
      return node;
    };
    let ticks = this.log ? logTicks(...this.y) : [];
    if (ticks.length < 3) ticks = ticksOf(...this.y, this.figure.matches(".large") ? 5 : 4);
    const heights = ticks.map((tick) => this.locateY(tick));
    const texts = distinctTexts(ticks, (tick) => (this.figure.dataset.percent === undefined ? formatted(tick) : this.text(tick)));
    this.up.setAttribute("width", Math.round(7.2 * Math.max(...texts.map((text) => text.length))));
    this.up.replaceChildren(...ticks.map((_, index) => label(texts[index], { x: "100%", y: `${heights[index] / 10}%`, dy: ".32em" })));
    this.grid.setAttribute("d", heights.map((height) => `M0 ${height}h${WIDTH}`).join(""));
    const [from, to] = this.x;
    const isWhole = this.axis === "step";
    const inside = ticksOf(from, to, 5, isWhole);
    const across = this.view.zoom && this.isLinked ? inside : withEnds(inside, from, to, isWhole);
    const anchor = (share) => (share < 0.04 ? "start" : share > 0.96 ? "end" : "middle");
    const nodes = across.map((tick) => {
      const share = (tick - from) / (to - from);
      return label(formatted(tick), { x: `${100 * share}%`, y: 12, "text-anchor": anchor(share) });
    });
    this.across.replaceChildren(...nodes, label(AXES[this.axis], { class: "x-title", x: "50%", y: 27, "text-anchor": "middle" }));
  }

  // Name and value of each shown curve at its point next to `x`, and the distance to the point in words.
  read(x) {
    return this.shown.flatMap((curve) => {
      const isUnknown = (index) => Number.isNaN(curve.ys[index]);
      if (this.isStacked && isUnknown(nearest(curve.xs(this.axis), x))) return [];
      const xs = curve.xs(this.axis).map((value, index) => (isUnknown(index) ? NaN : value));
      const index = nearest(xs, x);
      if (index < 0) return [];
      const span = curve.span(this.window);
      const value = curve.line(span)[index];
      const band = curve.hasRange ? curve.edges(span, this.isFirstWindow) : null;
      const range = band && !band[index].some(Number.isNaN) ? ` (${band[index].map(formatted).join(" to ")})` : "";
      const place = xs[index] === x ? "" : ` at ${formatted(xs[index])}`;
      const raw = span > 1 ? `, unsmoothed ${this.text(curve.ys[index])}` : "";
      return [{ curve, value: this.label(value, span), text: `${curve.label}: ${this.text(value)}${range}${raw}${place}` }];
    });
  }
}
