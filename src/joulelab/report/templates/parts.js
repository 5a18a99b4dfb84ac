// Parts of the page that open and close, and the list of a store's runs: filter and sort.
(() => {
  "use strict";
  const parts = Array.from(document.querySelectorAll("details.part"));
  parts.forEach((part) => part.addEventListener("toggle", () => {
    if (part.open) window.view.redraw(part);
  }));
  function openAt(id) {
    const part = id && document.getElementById(id);
    if (!part) return;
    if (part.tagName === "DETAILS") part.open = true;
    part.scrollIntoView();
  }
  openAt(window.view.state.at);
  window.addEventListener("hashchange", () => openAt(window.view.state.at));
  // Paper has no summary to click.
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    closed.forEach((one) => { one.open = true; });
  });
  window.addEventListener("afterprint", () => closed.forEach((one) => { one.open = false; }));

  const table = document.getElementById("list-table");
  if (!table) return;
  const rows = Array.from(table.tBodies[0].rows);
  const find = document.getElementById("list-find");
  function filter() {
    const words = find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    });
    document.getElementById("list-found").textContent = shown + " of " + rows.length + " runs";
  }
  find.addEventListener("input", () => { filter(); window.view.change({ find: find.value }); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) {
      event.preventDefault();
      find.focus();
    }
  });
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    heads.forEach((one) => one.setAttribute("aria-sort", one === head ? direction : "none"));
    const number = head.dataset.number === "true";
    const sign = direction === "descending" ? -1 : 1;
    const valueOf = (row) => {
      const text = row.cells[place].dataset.value || "";
      return number ? (text === "" ? null : Number(text)) : text;
    };
    rows.slice().sort((a, b) => {
      const [x, y] = [valueOf(a), valueOf(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (number ? x - y : x.localeCompare(y));
    }).forEach((row) => table.tBodies[0].append(row));
  }));
  find.value = window.view.state.find;
  filter();
})();
