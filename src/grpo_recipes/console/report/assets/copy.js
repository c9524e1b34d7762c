// Copy buttons for commands, prompts, completions, and values of the recipe.

function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied ? Promise.resolve() : Promise.reject(new Error("copy"));
}

for (const node of document.querySelectorAll("pre:not(.token-text), .trouble code, #files p code")) {
  const copy = button("Copy", "", () => {});
  copy.className = "copy";
  if (node.matches("pre")) {
    const box = document.createElement("div");
    box.className = "copied";
    node.before(box);
    box.append(node, copy);
  } else {
    node.after(copy);
  }
}

// One listener for all buttons, because reader.js shows copies of completions.
document.addEventListener("click", async (event) => {
  const copy = event.target.closest(".copy");
  if (!copy) return;
  const text = copy.previousElementSibling.textContent;
  copy.textContent = await copyText(text).then(() => "Copied", () => "Press Ctrl+C");
  if (copy.textContent !== "Copied") getSelection().selectAllChildren(copy.previousElementSibling);
  setTimeout(() => { copy.textContent = "Copy"; }, 2000);
});
