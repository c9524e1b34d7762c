// What a reader does on the page of a run, by the name of the frame. test_interaction.py checks the results.
// The tools are defined in interaction_probe.html.
const actions = {
  crosshair: async ({ all, seen, figure, point }) => {
    point(figure("KL divergence"), 0.5);
    const shown = seen("figure[data-frame]");
    const reading = (title) => figure(title).querySelector(".newest").textContent;
    const result = {
      charts: shown.length,
      cursors: shown.filter((node) => node.querySelector(".cursor").hasAttribute("d")).length,
      tips: seen(".tip").map((tip) => tip.textContent),
      kl: reading("KL divergence"),
      rate: reading("Learning rate"),
      legend: all(".legend li", figure("Completion length")).map((entry) => entry.textContent),
      cursor: figure("Entropy").querySelector(".cursor").getAttribute("d"),
    };
    point(figure("KL divergence"), 0.5, "pointerleave");
    return { ...result, after: [all(".cursor[d]").length, reading("Learning rate")] };
  },

  zoom: async ({ view, figure, drag, labels, drawing }) => {
    const [loss, entropy] = [figure("Loss"), figure("Entropy")];
    const [first, area] = [drawing(entropy), entropy.querySelector(".area")];
    drag(loss, 0.5, 0.75);
    const result = { across: labels(entropy, "across"), clipped: view.getComputedStyle(area).overflow };
    result.resumed = entropy.querySelector(".resumed").getAttribute("d");
    entropy.querySelector(".canvas").dispatchEvent(new view.MouseEvent("dblclick", { bubbles: true }));
    return { ...result, restored: drawing(entropy) === first };
  },

  redraw: async ({ page, all, figure, point, set, labels, drawing }) => {
    const entropy = figure("Entropy"), [axis, smoothing] = all(".toolbar select, .toolbar input");
    const [first, window] = [drawing(entropy), smoothing.value];
    const tip = () => entropy.querySelector(".tip").textContent.split("\n");
    set(smoothing, 0);
    point(entropy, 0.5);
    const line = entropy.querySelector(".line").getAttribute("d");
    const result = { output: page.querySelector(".toolbar output").textContent, raw: line, tip: tip()[1] };
    set(smoothing, window);
    result.restored = drawing(entropy) === first;
    result.axes = [...axis.options].map((option) => option.textContent);
    for (const name of ["min", "tokens"]) {
      set(axis, name);
      point(entropy, 1);
      result[name] = [entropy.querySelector(".x-title").textContent, tip()[0]];
    }
    set(axis, "step");
    const kl = figure("KL divergence"), log = kl.querySelector(".log"), linear = labels(kl, "up");
    log.click();
    result.log = [log.getAttribute("aria-pressed"), labels(kl, "up")];
    log.click();
    return { ...result, linear: labels(kl, "up").join() === linear.join() };
  },

  smoothing: async ({ page, all, figure, drag, point, set, labels }) => {
    const [reward, kl, loss] = ["Reward", "KL divergence", "Loss"].map(figure), slider = all(".toolbar input")[0];
    const note = () => all(".smoothing span").filter((part) => !part.hidden).map((part) => part.textContent).join("");
    const band = () => reward.querySelector(".band").getAttribute("d");
    const last = (node) => node.querySelector(".newest").textContent;
    const result = { notes: [note()], last: [last(kl)] };
    const [first, window] = [band(), slider.value];
    set(slider, 0);
    point(reward, 1);
    Object.assign(result, { isMoved: band() !== first, tip: reward.querySelector(".tip").textContent.split("\n")[1] });
    point(reward, 1, "pointerleave");
    result.notes.push(note());
    result.last.push(last(kl));
    drag(loss, 0.5, 0.75);
    all(".toolbar button").find((button) => button.textContent === "Reset zoom").click();
    result.across = labels(loss, "across");
    const dropped = loss.querySelector(".dropped");
    result.dropped = [dropped.hidden];
    loss.querySelector(".log").click();
    result.dropped.push(dropped.textContent);
    loss.querySelector(".log").click();
    set(slider, window);
    result.notes.push(note());
    return { ...result, dropped: [...result.dropped, dropped.hidden], restored: band() === first };
  },

  legend: async ({ view, all, seen, figure }) => {
    const [phases, reward, length] = ["Seconds per step", "Reward", "Completion length"].map(figure);
    const buttons = (node) => Object.fromEntries(all(".legend button", node).map((toggle) => [toggle.textContent, toggle]));
    const path = (name) => phases.querySelector(`[data-label="${name}"] path`).getAttribute("d");
    const before = path("update");
    buttons(phases).sample.click();
    const result = { moved: path("update") !== before };
    const dots = (node) => seen("path.dots", node).length;
    buttons(reward).evaluation.click();
    result.hidden = [dots(reward), dots(length), buttons(length).evaluation.getAttribute("aria-pressed")];
    buttons(length).evaluation.click();
    const single = figure("Single rewards");
    buttons(single).format_tags.dispatchEvent(new view.MouseEvent("click", { shiftKey: true, bubbles: true }));
    return { ...result, dots: dots(reward), only: seen(".curve", single).map((node) => node.dataset.label) };
  },

  tokens: async ({ view, page, all, seen, figure, click, press }) => {
    const open = async (fold) => {
      fold.querySelector("summary").click();
      await new Promise((done) => setTimeout(done, 50));
      return all(".token", fold);
    };
    const folds = [];
    for (const fold of seen(".steps .tokens")) {
      const [tokens, text, reading] = [await open(fold), fold.querySelector(".token-text"), fold.querySelector(".token-reading")];
      const result = { summary: fold.querySelector("summary").textContent, legend: reading.textContent, tokens: tokens.map((token) => token.textContent) };
      result.kinds = tokens.map((token) => token.className.replace("token", "").trim());
      result.grounds = tokens.map((token) => view.getComputedStyle(token).backgroundColor);
      tokens[1].dispatchEvent(new view.PointerEvent("pointerover", { bubbles: true }));
      result.hovered = reading.textContent;
      result.keyed = ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"].map((key) => {
        press(text, key);
        return reading.textContent;
      });
      folds.push({ ...result, marked: all(".read", fold).map((token) => tokens.indexOf(token)), isReached: page.activeElement === text });
    }
    const width = page.documentElement.scrollWidth;
    click(figure("Reward"), 0);
    const copied = await open(page.querySelector(".reader .tokens"));
    copied[0].dispatchEvent(new view.PointerEvent("pointerdown", { bubbles: true }));
    return { folds, width, copied: [copied.length, page.querySelector(".reader .token-reading").textContent] };
  },

  pin: async ({ page, all, seen, figure, click, press, point }) => {
    const panel = page.querySelector(".reader"), reward = figure("Reward"), cursor = () => seen(".cursor.pinned[d]").length;
    const read = () => [panel.hidden, panel.querySelector("b").textContent, cursor() > 12];
    const before = panel.hidden;
    click(reward, 0);
    const first = [...read(), panel.querySelector(".group .said").textContent.trim()];
    panel.querySelector("[aria-label='Next sampled step']").click();
    const next = read();
    click(reward, 0.5);
    const middle = read();
    panel.querySelector("[aria-label='Close the completions']").click();
    const closed = [panel.hidden, cursor()];
    click(reward, 0);
    all("button", panel).find((node) => node.textContent === "Show in the list").click();
    const listed = [panel.hidden, seen(".steps .step").map((step) => step.dataset.step)];
    press(reward, "Home");
    press(reward, "Enter");
    const keyed = panel.hidden;
    press(reward, "Escape");
    const phases = figure("Seconds per step");
    point(phases, 1);
    const layers = phases.querySelector(".tip").textContent.split("\n").map((line) => line.split(" ")[0]);
    const hint = page.querySelector(".hint").textContent.split(" chart to ")[1];
    return { before, first, next, middle, closed, listed, keyed: [keyed, panel.hidden], layers, hint };
  },

  filters: async ({ page, all, seen, set }) => {
    const [search, kind, low, high, from, to] = all(".search input, .search select");
    const kinds = [...kind.options].map((option) => option.textContent);
    const shown = () => {
      const steps = seen(".steps .step");
      return [seen(".steps .completion").length, steps.length, page.querySelector(".search .note").textContent];
    };
    const results = { kinds, all: shown() };
    for (const [name, values] of Object.entries({
      unscored: [[kind, "unscored"]], clipped: [[kind, "clipped"]], positive: [[kind, "positive"]],
      reward: [[low, "0.4"], [high, "1.6"]], step: [[from, "1"], [to, "20"]], both: [[search, "15"], [from, "40"]],
    })) {
      values.forEach(([input, value]) => set(input, value));
      results[name] = shown();
      values.forEach(([input]) => set(input, ""));
    }
    const restored = shown();
    set(low, "0.4");
    set(search, "15");
    const clear = [...all(".search button")].find((node) => node.textContent === "Clear filters");
    const offered = !clear.hidden;
    clear.click();
    return { ...results, restored, cleared: [...shown(), search.value, offered, clear.hidden] };
  },

  copy: async ({ view, page, all }) => {
    const copied = [];
    Object.defineProperty(view.navigator, "clipboard", { value: { writeText: async (text) => copied.push(text) } });
    const copy = async (node) => {
      node.parentNode.querySelector(".copy").click();
      await new Promise((done) => setTimeout(done, 10));
    };
    const completion = all(".steps .step[open] .said")[0];
    for (const node of [page.querySelector(".card pre"), completion]) await copy(node);
    return { copied, text: completion.textContent, label: completion.parentNode.querySelector(".copy").textContent };
  },

  sort: async ({ page, all }) => {
    const table = all("#time table")[0], [phase, , , time] = table.querySelectorAll("th");
    const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].textContent);
    phase.querySelector("button").click();
    const names = column(0);
    time.querySelector("button").click();
    const result = { names, up: [column(0), time.getAttribute("aria-sort"), phase.getAttribute("aria-sort")] };
    time.querySelector("button").click();
    return { ...result, down: [column(0), time.getAttribute("aria-sort")], tables: all("th[aria-sort]").length };
  },

  comparison: async ({ page, all, seen, figure, set, point, labels }) => {
    const toggles = Object.fromEntries(all(".legend button", figure("Reward")).map((toggle) => [toggle.textContent, toggle]));
    const names = Object.keys(toggles);
    const shown = (title) => seen(".curve", figure(title)).map((node) => node.dataset.label);
    toggles[names[0]].click();
    const result = { names, hidden: [shown("Reward"), shown("Entropy"), shown("Reward by time")] };
    Object.assign(result, { headline: page.querySelector("h1").textContent, warnings: seen(".trouble").map((text) => text.textContent.trim()) });
    toggles[names[0]].click();
    set(page.querySelector(".toolbar select"), "min");
    point(figure("Reward"), 1);
    result.tip = seen(".tip").map((tip) => tip.textContent);
    const table = page.querySelector("#runs table"), cells = () => [...table.tBodies[0].rows].map((row) => row.cells[1].textContent);
    const slider = page.querySelector(".toolbar input"), note = () => page.querySelector(".smoothing span").textContent;
    result.smoothing = [note(), page.querySelector(".toolbar output").textContent];
    set(slider, 0);
    result.smoothing.push(note());
    table.querySelectorAll("th button")[1].click();
    return { ...result, sorted: cells(), sections: all("h2").map((title) => title.textContent) };
  },

  axes: async ({ page, all, seen, figure, set, point }) => {
    const axis = page.querySelector(".toolbar select"), result = { axes: [...axis.options].map((option) => option.value) };
    for (const name of ["min", "step"]) {
      set(axis, name);
      point(figure("Reward"), 1);
      result[name] = seen(".tip").map((tip) => tip.textContent.split("\n")[0]);
    }
    return result;
  },

  cards: async ({ page, all, seen }) => {
    const link = page.querySelector(".card a[data-step]"), target = page.querySelector(link.hash), fold = target.closest("details");
    const result = { linked: link.textContent, opened: [fold?.open ?? true] };
    link.click();
    result.opened.push(fold?.open ?? true);
    result.tip = target.querySelector(".tip").textContent.split("\n")[0];
    result.cursors = seen("figure[data-frame]").every((node) => node.querySelector(".cursor").hasAttribute("d"));
    const drawn = all("figure.chart h3").map((title) => title.textContent);
    return { ...result, constant: page.querySelector(".constant").textContent, drawn: drawn.filter((title) => title.includes("always")) };
  },

  pair: async ({ page, all }) => {
    const pair = page.querySelector(".pair"), sides = all(".sides > div", pair);
    const places = sides.map((side) => side.getBoundingClientRect());
    return {
      prompts: all(".prompt", pair).map((prompt) => prompt.textContent.trim()),
      steps: sides.map((side) => side.querySelector("h4").textContent),
      said: sides.map((side) => all(".said", side).map((text) => text.textContent.trim())),
      isBeside: places[0].top === places[1].top && places[0].right <= places[1].left,
      isBelow: places[0].bottom <= places[1].top,
    };
  },

  heat: async ({ view, all }) => {
    const rows = all(".heat-map tbody tr").map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
    const color = (cell) => view.getComputedStyle(cell.querySelector("rect")).fillOpacity;
    return { rows, head: all(".heat-map thead th").map((cell) => cell.textContent), colors: all(".heat-map td").map(color) };
  },

  keyboard: async ({ page, all, figure, press, labels }) => {
    const entropy = figure("Entropy"), full = labels(entropy, "across"), pins = [];
    const tip = () => entropy.querySelector(".tip").textContent.split("\n")[0];
    page.addEventListener("report:pin", (event) => pins.push(event.detail));
    const steps = ["ArrowRight", "ArrowLeft", "ArrowLeft", "Home", "End"].map((key) => {
      press(entropy, key);
      return tip();
    });
    for (const key of ["Home", "Enter", "+"]) press(entropy, key);
    const zoomed = labels(entropy, "across");
    for (const key of ["Escape", "Escape"]) press(entropy, key);
    const controls = all("input, select, button");
    const isNamed = (node) => node.labels?.length || node.textContent || node.getAttribute("aria-label");
    return {
      steps, zoomed, pins, restored: labels(entropy, "across").join() === full.join(),
      reachable: controls.every((node) => node.tabIndex === 0), named: controls.every(isNamed),
    };
  },
};
