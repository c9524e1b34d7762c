// Keep a page of `grpo dashboard` current: ask whether there is a newer page, and load it.
(() => {
  const POLL_MS = 2000, LATE_MS = 10000;
  const note = document.createElement("p");
  note.setAttribute("role", "status");
  note.hidden = true;
  document.body.append(note);
  const version = document.currentScript.dataset.version;

  // A selection, an open tooltip or a word in a search box would be lost.
  function isBusy() {
    return String(getSelection()) || document.querySelector(".tip:not([hidden])") || document.querySelector(".search input")?.value;
  }

  async function poll() {
    if (document.hidden || isBusy()) return POLL_MS;
    try {
      const answer = await fetch(`?since=${version}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      note.hidden = true;
      if (answer.status === 200 && !isBusy()) {
        document.dispatchEvent(new Event("report:reload"));
        location.reload();
      }
      return POLL_MS;
    } catch {
      note.textContent = "The dashboard does not answer. This page shows its last state.";
      note.hidden = false;
      return LATE_MS;
    }
  }

  async function run() {
    setTimeout(run, await poll());
  }
  setTimeout(run, POLL_MS);
})();
