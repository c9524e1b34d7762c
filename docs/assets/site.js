// Small helpers of the site. Nothing is loaded from elsewhere, and all of it works where a page is opened from disk.

// Formulas: arithmatex leaves TeX in elements of its own, KaTeX (assets/katex) sets them.
function setFormulas() {
  for (const node of document.querySelectorAll(".arithmatex")) {
    const tex = node.textContent.trim().replace(/^\\[[(]|\\[\])]$/g, "");
    katex.render(tex, node, { displayMode: node.tagName === "DIV", throwOnError: false });
  }
}

// Tables: on a phone a row becomes a block, and each of its cells says which column it is of.
function labelCells() {
  for (const table of document.querySelectorAll(".md-typeset table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (heads[column] && cell.textContent.trim()) cell.dataset.column = heads[column];
      });
    }
  }
}

// Configuration: the box leaves the keys, and the rows of the tables, that hold all words typed.
function searchKeys() {
  const box = document.querySelector(".key-search input");
  if (!box) return;
  const said = document.querySelector(".key-search output");
  const rows = [...document.querySelectorAll(".keys > div, .md-typeset tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const sections = [...document.querySelectorAll(".md-content h2, .md-content h3")];
  const show = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, at) => { row.hidden = !words.every((word) => texts[at].includes(word)); });
    const left = rows.filter((row) => !row.hidden);
    said.textContent = words.length ? `${left.length} of ${rows.length}` : "";
    for (const section of sections) {
      let node = section.nextElementSibling, hides = words.length > 0;
      for (; node && !(node.tagName <= section.tagName && /^H\d$/.test(node.tagName)); node = node.nextElementSibling) {
        if ([...node.querySelectorAll(".keys > div, tbody tr")].some((row) => !row.hidden)) hides = false;
        if (node.matches(".keys") && [...node.children].some((row) => !row.hidden)) hides = false;
      }
      section.hidden = hides;
    }
    for (const table of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table")) {
      table.hidden = ![...table.querySelectorAll("tbody tr")].some((row) => !row.hidden);
    }
  };
  box.hidden = false;
  box.addEventListener("input", show);
  const asked = new URLSearchParams(location.search).get("key");
  if (asked) { box.value = asked; show(); }
}

addEventListener("DOMContentLoaded", () => { setFormulas(); labelCells(); searchKeys(); });
