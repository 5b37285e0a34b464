"use strict";
// Sorting: a heading becomes a button. First click: ascending, second: descending, third: as it was.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const original = [...body.rows];
  const mark = () => {
    let before = null;
    for (const row of body.rows) {
      const name = row.cells[0].textContent;
      row.classList.toggle("again", name === before);
      before = name;
    }
  };
  const key = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.v ?? cell.textContent.trim();
    return cell.classList.contains("n") && text !== "" ? Number(text) : text;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")] ?? "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      let rows = [...original];
      if (next !== "none") {
        head.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1;
        const empty = (value) => (value === "" ? 1 : 0); // empty cells stay at the end
        rows.sort((r, s) => {
          const a = key(r, column), b = key(s, column);
          return empty(a) - empty(b) || sign * compare(a, b);
        });
      }
      body.append(...rows);
      mark();
    });
  });
}
