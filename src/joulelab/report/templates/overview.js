// The first table: sort, filter and select methods. Energies, ratios, bars and the Pareto front of every state of the
// controls come with the page (report.views); nothing is computed here.
(() => {
  "use strict";
  const table = document.getElementById("overview");
  if (!table) return;
  const { report } = window.view;
  const { views } = report;
  const rows = Array.from(table.tBodies[0].rows);
  const colors = Object.fromEntries(report.stages);

  function viewOf(method, state) {
    if (state.scope !== "pue") return views.by_scope[state.scope][state.n][method];
    return { ...views.by_scope.policy[state.n][method], ...views.by_pue[state.pue][state.n][method] };
  }

  function drawBar(row, shown) {
    const bar = row.querySelector(".bar");
    if (!bar) return;
    bar.classList.toggle("bound", shown.bound);
    bar.replaceChildren(...views.parts[row.dataset.method].map(([stage, paid], place) => {
      const segment = document.createElement("span");
      segment.style.width = shown.bar[place] + "%";
      segment.style.background = colors[stage];
      segment.className = paid;
      segment.title = stage + (paid === "inherited" ? " (inherited)" : "") + ": " + shown.shares[place];
      return segment;
    }));
  }

  function fill(state) {
    rows.forEach((row) => {
      const shown = viewOf(row.dataset.method, state);
      const values = { energy: shown.energy_j, ratio: shown.ratio_value };
      row.querySelectorAll("[data-selected]").forEach((cell) => {
        const value = values[cell.dataset.selected];
        cell.textContent = shown[cell.dataset.selected];
        cell.closest("td").dataset.value = value === null ? "" : value;
      });
      drawBar(row, shown);
      row.querySelector(".front").hidden = !shown.front;
    });
  }

  function sort(state) {
    const [key, direction] = state.sort.split(":");
    const heads = Array.from(table.tHead.rows[0].cells);
    const place = heads.findIndex((head) => head.dataset.key === key);
    heads.forEach((head) => {
      if (head.dataset.key) head.setAttribute("aria-sort", head.dataset.key !== key ? "none" : direction);
    });
    const ordered = rows.slice();
    if (place >= 0) {
      const number = heads[place].dataset.number === "true";
      const valueOf = (row) => {
        const text = row.cells[place].dataset.value;
        return number ? (text === undefined || text === "" || Number.isNaN(Number(text)) ? null : Number(text)) : text;
      };
      const sign = direction === "descending" ? -1 : 1;
      ordered.sort((a, b) => {
        const [x, y] = [valueOf(a), valueOf(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (number ? x - y : x.localeCompare(y));
      });
    }
    ordered.forEach((row) => table.tBodies[0].append(row));
  }

  function filter(state) {
    const word = state.find.trim().toLowerCase();
    let shown = 0;
    rows.forEach((row) => {
      row.hidden = Boolean(word) && !row.textContent.toLowerCase().includes(word);
      row.classList.toggle("unchosen", state.hide.includes(row.dataset.method));
      row.querySelector("input").checked = !state.hide.includes(row.dataset.method);
      shown += row.hidden ? 0 : 1;
    });
    document.getElementById("found").textContent = shown + " of " + rows.length + " methods";
  }

  // Filtered methods are also hidden in the charts.
  window.view.hiddenMethods = () => {
    const out = rows.filter((row) => row.hidden).map((row) => row.dataset.method);
    return Array.from(new Set([...window.view.state.hide, ...out]));
  };

  table.tHead.querySelectorAll("button").forEach((button) => {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const up = head.getAttribute("aria-sort") === "ascending";
      window.view.change({ sort: head.dataset.key + ":" + (up ? "descending" : "ascending") });
    });
  });
  table.addEventListener("change", (event) => {
    const row = event.target.closest("tr");
    if (!row || event.target.type !== "checkbox") return;
    const others = window.view.state.hide.filter((method) => method !== row.dataset.method);
    window.view.change({ hide: event.target.checked ? others : [...others, row.dataset.method] });
  });

  const find = document.getElementById("find");
  find.addEventListener("input", () => window.view.change({ find: find.value }));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) {
      event.preventDefault();
      find.focus();
    }
  });

  const scope = document.getElementById("scope");
  const students = document.getElementById("students");
  const pue = document.getElementById("pue");
  scope.addEventListener("change", () => window.view.change({ scope: scope.value }));
  if (students) {
    students.addEventListener("input", () => window.view.change({ n: views.students[students.value] }));
  }
  pue.addEventListener("change", () => {
    if (pue.value) window.view.change({ pue: Number(pue.value), scope: "pue" });
    else window.view.change({ pue: null, scope: window.view.state.scope === "pue" ? "policy" : window.view.state.scope });
  });

  function show(state) {
    scope.querySelector("option[value=pue]").disabled = state.pue === null;
    scope.value = state.scope;
    if (document.activeElement !== find) find.value = state.find;
    pue.value = state.pue === null ? "" : String(state.pue);
    if (students) {
      students.value = views.students.indexOf(state.n);
      const text = state.n === 1 ? "1 student" : state.n + " students";
      document.getElementById("students-count").textContent = text;
      students.setAttribute("aria-valuetext", text);
      document.getElementById("teacher-sharing").textContent =
        state.n === 1 ? "teacher included" : "teacher shared by " + text;
    }
    fill(state);
    filter(state);
    sort(state);
  }
  window.view.onChange(show);
  show(window.view.state);
  window.view.viewOf = viewOf;
})();
