// Export each figure as CSV (its numbers), SVG or PNG (its drawing).
for (const figure of document.querySelectorAll("figure.chart")) {
  const title = figure.querySelector("h3").textContent;
  const file = title.replace(/[^\w.-]+/g, "-").toLowerCase();
  const bar = document.createElement("p");
  bar.className = "export";
  const offer = (kind, label, make) => {
    const save = async () => {
      const link = document.createElement("a");
      link.download = `${file}.${kind.toLowerCase()}`;
      link.href = URL.createObjectURL(await make());
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    };
    bar.append(button(kind, `${label} of ${title}`, save));
  };
  if (figure.dataset.lines !== undefined) offer("CSV", "numbers", () => new Blob([table(figure)], { type: "text/csv" }));
  offer("SVG", "drawing", () => new Blob([drawing(figure, title)], { type: "image/svg+xml" }));
  offer("PNG", "picture", () => pixels(drawing(figure, title)));
  figure.append(bar);
}

// The numbers of a figure before smoothing, with the edges of the area around a curve.
function table(figure) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = [["curve", figure.dataset.xname, "value", "low", "high"].join(",")];
  for (const curve of charts.find((chart) => chart.figure === figure).curves) {
    curve.ys.forEach((y, index) => {
      const [low, high] = curve.band && !curve.band[index].some(Number.isNaN) ? curve.band[index] : ["", ""];
      if (!Number.isNaN(y)) rows.push([quoted(curve.label), curve.steps[index], y, low, high].join(","));
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
