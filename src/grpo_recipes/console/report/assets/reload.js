// Reload the page of a running run, less often the older the page is. Charts, open folds and the chosen step are restored.
// A page of `grpo dashboard` has another script that reloads it, and sends "report:reload" before.
const folds = () => [...document.querySelectorAll("details:not(.step)")];
memory.add("folds", () => folds().map((fold) => fold.open), (state) => {
  folds().forEach((fold, index) => { fold.open = Boolean(state[index]); });
});
document.addEventListener("report:reload", () => memory.save());
memory.restore();

const live = document.querySelector(".live");
if (live) {
  const wait = () => Math.max(15, (Date.now() / 1000 - Number(live.dataset.written)) / 4);
  const reload = () => {
    const isBusy = document.querySelector(".tip:not([hidden])") || document.querySelector(".search input")?.value || String(getSelection());
    if (isBusy) return setTimeout(reload, 5000);
    memory.save();
    return location.reload();
  };
  setTimeout(reload, 1000 * wait());
}

// Open folded parts for printing, except tokens, which repeat a text.
addEventListener("beforeprint", () => {
  for (const fold of folds()) fold.open ||= !fold.matches(".tokens");
});
