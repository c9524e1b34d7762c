// Read the completions of the step that is pinned in a chart, in a panel at the lower edge of the window.
// linked.js sends "report:pin" with the step, or with null if nothing is pinned.

const sampled = [...document.querySelectorAll(".steps .step")];
const reader = sampled.length ? makeReader() : null;
if (reader) document.addEventListener("report:pin", (event) => reader.show(event.detail));

function makeReader() {
  const panel = document.createElement("aside");
  panel.className = "reader";
  panel.hidden = true;
  panel.setAttribute("aria-label", "Completions of the pinned step");
  const title = document.createElement("b");
  const content = document.createElement("div");
  title.setAttribute("role", "status");
  content.className = "reader-content";
  content.tabIndex = 0;
  let index = 0;

  const steps = sampled.map((step) => Number(step.dataset.step));
  const show = (step) => {
    panel.hidden = step === null;
    document.body.classList.toggle("reading", step !== null);
    if (step === null) return;
    index = nearest(steps, step);
    const pinned = Math.round(step);
    title.textContent = steps[index] === pinned ? `Step ${formatted(pinned)}` : `Step ${formatted(steps[index])} (nearest to ${formatted(pinned)})`;
    content.replaceChildren(...[...sampled[index].querySelectorAll(".group")].map((group) => group.cloneNode(true)));
    for (const part of content.querySelectorAll("[hidden]")) part.hidden = false;
    content.scrollTop = 0;
  };
  // Pin another sampled step. The crosshair of all charts follows.
  const move = (count) => () => {
    const next = Math.min(steps.length - 1, Math.max(0, index + count));
    pin(convert(reference, "step", view.axis, steps[next]));
  };
  const open = () => {
    const slider = document.querySelector(".stepper input");
    if (slider) {
      slider.value = index;
      slider.dispatchEvent(new Event("input"));
    }
    pin(null);
    document.getElementById("completions").scrollIntoView();
  };
  const head = document.createElement("p");
  head.append(
    title,
    button("‹", "Previous sampled step", move(-1)),
    button("›", "Next sampled step", move(1)),
    button("Show in the list", "", open),
    button("×", "Close the completions", () => pin(null)),
  );
  panel.append(head, content);
  panel.addEventListener("keydown", (event) => event.key === "Escape" && pin(null));
  document.body.append(panel);
  return { show };
}
