// Sort a table by a column: click its title, once more for the other direction.

// The value of a cell to sort by: its `data-sort`, the number that its text begins with, or its text.
function sortValue(cell) {
  const text = (cell?.dataset.sort ?? cell?.textContent ?? "").trim().replaceAll("\u2212", "-").replaceAll(",", "");
  const match = text.match(/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?([kM](?![a-z]))?/i);
  if (!match) return text === "" || text === "\u2013" ? null : text.toLowerCase();
  return parseFloat(match[0]) * ({ k: 1e3, M: 1e6 }[match[3]] || 1);
}

// Numbers come before texts, and empty cells last.
function compareCells(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
}

const sorted = [];
for (const [index, table] of [...document.querySelectorAll("table")].entries()) {
  const [heads, body] = [[...table.querySelectorAll("thead th")], table.tBodies[0]];
  if (!body || body.rows.length < 2 || table.matches(".heat-map")) continue;
  const sort = (column, direction) => {
    const rows = [...body.rows].map((row) => ({ row, value: sortValue(row.cells[column]) }));
    rows.sort((a, b) => (a.value === null || b.value === null ? 1 : direction) * compareCells(a.value, b.value));
    body.append(...rows.map(({ row }) => row));
    heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    sorted[index] = [column, direction];
  };
  heads.forEach((head, column) => {
    if (head.textContent.trim() === "") return;
    const toggle = button(head.textContent, "", () => sort(column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1));
    toggle.title = `Sort by ${head.textContent}`;
    head.replaceChildren(toggle);
  });
  table.sortBy = sort;
}

memory.add("tables", () => sorted, (state) => {
  const tables = document.querySelectorAll("table");
  state.forEach((order, index) => order && tables[index]?.sortBy?.(...order));
});
