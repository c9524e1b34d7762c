// The tokens of a completion: the background is the advantage, gray tokens are not trained. A line reads out the token
// under the pointer, or the token that the arrow keys chose. Listeners are on the document, because reader.js copies
// completions.

const LEGEND = "Green: advantage above 0. Red: below 0. No color: 0. Gray: masked, not trained. Point at a token, or press the arrow keys.";

function tokensOf(fold) {
  const { lengths, advantages, logprobs } = fold.dataset;
  const scores = advantages.split(" ").flatMap((part) => {
    const [count, advantage] = part.split(":");
    return Array(Number(count)).fill(advantage === "-" ? NaN : Number(advantage));
  });
  return { lengths: numbers(lengths), advantages: scores, logprobs: numbers(logprobs).map((hundredths) => (0 - hundredths) / 100) };
}

// Replace the text by an element for each token. The largest advantage of the prompt has the strongest background.
function splitTokens(fold) {
  const [text, { lengths, advantages }] = [fold.querySelector(".token-text"), tokensOf(fold)];
  const others = [...(fold.closest(".group") || fold.parentNode).querySelectorAll(".tokens")];
  const largest = Math.max(...others.flatMap((other) => tokensOf(other).advantages).filter(Number.isFinite).map(Math.abs), 1e-9);
  const characters = [...text.textContent];
  let start = 0;
  const nodes = lengths.map((length, index) => {
    const [node, advantage] = [document.createElement("span"), advantages[index]];
    const content = characters.slice(start, start + length).join("");
    start += length;
    node.className = Number.isNaN(advantage) ? "token masked" : advantage > 0 ? "token positive" : advantage < 0 ? "token negative" : "token";
    node.style.setProperty("--strength", `${Math.round(10 + (32 * Math.abs(advantage || 0)) / largest)}%`);
    content.split("\n").forEach((line, order) => {
      if (order) node.append(Object.assign(document.createElement("i"), { className: "nl" }), "\n");
      node.append(line);
    });
    return node;
  });
  const reading = document.createElement("p");
  Object.assign(reading, { className: "token-reading", textContent: LEGEND });
  reading.setAttribute("role", "status");
  text.before(reading);
  text.setAttribute("role", "application");
  text.setAttribute("aria-label", `${lengths.length} tokens. The arrow keys read them.`);
  text.replaceChildren(...nodes);
}

function readToken(fold, node) {
  const { advantages, logprobs } = tokensOf(fold);
  const nodes = [...fold.querySelectorAll(".token")];
  const index = nodes.indexOf(node);
  const [advantage, logprob] = [advantages[index], logprobs[index]];
  const text = node.textContent.replaceAll("\n", "\\n").replaceAll("\t", "\\t"); // the page names other hidden characters
  const parts = [`"${text}"`, `token ${index + 1} of ${nodes.length}`];
  if (Number.isNaN(advantage)) parts.push("masked, not trained");
  else {
    parts.push(`advantage ${advantage > 0 ? "+" : ""}${formatted(advantage)}`);
    if (Number.isFinite(logprob)) parts.push(`log-prob ${formatted(logprob)} (${Math.round(100 * Math.exp(logprob))} %)`);
  }
  fold.querySelector(".token.read")?.classList.remove("read");
  node.classList.add("read");
  fold.querySelector(".token-reading").textContent = parts.join(" · ");
}

document.addEventListener("toggle", ({ target }) => {
  if (target.matches(".tokens") && target.open && !target.querySelector(".token")) splitTokens(target);
}, true);

for (const type of ["pointerover", "pointerdown"]) {
  document.addEventListener(type, ({ target }) => {
    const node = target.closest(".token");
    if (node) readToken(node.closest(".tokens"), node);
  });
}

document.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (!event.target.matches(".token-text") || moves[event.key] === undefined) return;
  const nodes = [...event.target.querySelectorAll(".token")];
  const at = nodes.findIndex((node) => node.matches(".read"));
  const next = nodes[Math.min(nodes.length - 1, Math.max(0, at + moves[event.key]))];
  event.preventDefault();
  readToken(event.target.closest(".tokens"), next);
  next.scrollIntoView({ block: "nearest" });
});
