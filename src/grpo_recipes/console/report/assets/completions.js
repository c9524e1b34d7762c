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
  slider.addEventListener("input", () => choose(slider.value));
  const move = (count) => () => choose(Number(slider.value) + count);
  bar.append(button("‹", "previous step", move(-1)), slider, button("›", "next step", move(1)));
  steps[0].before(bar);
  choose(steps.length - 1);
  memory.add("step", () => (slider.value === slider.max ? null : slider.value), (state) => state !== null && choose(state));
}

// Search and filter the completions: steps with a hit are opened, and everything else is hidden.
const KINDS = { right: "right", wrong: "wrong", unscored: "unscored", clipped: "clipped", positive: "advantage above 0", negative: "advantage below 0" };

for (const box of document.querySelectorAll(".steps")) {
  const completions = [...box.querySelectorAll(".completion")];
  const kindsOf = (completion) => (completion.dataset.kinds || completion.dataset.verdict || "").split(" ");
  const occurring = Object.keys(KINDS).filter((kind) => completions.some((completion) => kindsOf(completion).includes(kind)));
  const line = document.createElement("p");
  line.className = "search";
  const field = (input, label, values) => {
    Object.assign(input, values);
    input.setAttribute("aria-label", label);
    input.addEventListener("input", () => choose());
    return input;
  };
  const number = (label, name) => field(document.createElement("input"), label, { type: "number", step: "any", placeholder: name });
  const search = field(document.createElement("input"), "Search prompts and completions", { type: "search", placeholder: "Search prompts and completions" });
  const kind = field(document.createElement("select"), "Filter completions", {});
  kind.append(new Option("all", ""), ...occurring.map((name) => new Option(KINDS[name], name)));
  const limits = {
    reward: [number("Lowest reward", "reward from"), number("Highest reward", "to")],
    step: box.querySelector(".step") ? [number("First step", "step from"), number("Last step", "to")] : [],
  };
  const count = document.createElement("span");
  Object.assign(count, { className: "note" });
  count.setAttribute("role", "status");
  const inputs = [search, kind, ...limits.reward, ...limits.step];
  const clear = button("Clear filters", "", () => {
    for (const input of inputs) input.value = "";
    choose();
  });
  clear.hidden = true;
  const range = (pair) => {
    const span = document.createElement("span");
    span.append(...pair);
    return span;
  };
  const ranges = Object.values(limits).filter((pair) => pair.length).map(range);
  line.append(search, ...(occurring.length ? [kind] : []), ...ranges, clear, count);
  box.prepend(line);

  const text = (node) => node.textContent.toLowerCase();
  const isInside = (value, [low, high]) => {
    const isFree = (input) => !input || input.value === "";
    if (isFree(low) && isFree(high)) return true;
    return value !== undefined && (isFree(low) || Number(value) >= Number(low.value)) && (isFree(high) || Number(value) <= Number(high.value));
  };
  const choose = () => {
    const query = search.value.trim().toLowerCase();
    const isFiltered = inputs.some((input) => input.value.trim() !== "");
    clear.hidden = !isFiltered;
    let hits = 0;
    for (const group of box.querySelectorAll(".group")) {
      const isStep = isInside(group.closest(".step")?.dataset.step, limits.step);
      const promptMatches = [...group.querySelectorAll(".prompt, .answer")].some((node) => text(node).includes(query));
      for (const completion of group.querySelectorAll(".completion")) {
        const isKind = kind.value === "" || kindsOf(completion).includes(kind.value);
        const matches = promptMatches || text(completion).includes(query);
        completion.hidden = !(isStep && isKind && matches && isInside(completion.dataset.reward, limits.reward));
        for (const folded of completion.querySelectorAll("details:not(.tokens)")) folded.open = query !== "" && text(folded).includes(query);
        hits += !completion.hidden;
      }
      group.hidden = !group.querySelector(".completion:not([hidden])");
    }
    box.classList.toggle("searched", isFiltered);
    for (const step of isFiltered ? box.querySelectorAll(".step") : []) {
      step.hidden = !step.querySelector(".group:not([hidden])");
      step.open = !step.hidden;
    }
    count.textContent = isFiltered ? `${hits} completion${hits === 1 ? "" : "s"}` : "";
    if (!isFiltered) box.querySelector(".stepper input")?.dispatchEvent(new Event("input"));
  };
}
