// The first table: choose, sort and filter methods; joules follow the scope and the number of students.
(() => {
  "use strict";
  const table = document.getElementById("overview");
  if (!table) return;
  const { report } = window.view;
  const rows = Array.from(table.tBodies[0].rows);
  const colours = Object.fromEntries(report.stages);
  const firstTexts = new Map(rows.flatMap((row) =>
    Array.from(row.querySelectorAll("[data-moves]")).map((cell) => [cell, cell.textContent])));

  function joules(part, state) {
    const value = state.scope === "pue" ? part.policy * state.pue : part[state.scope];
    return value === undefined ? NaN : value / (part.shared ? state.n : 1);
  }

  // Three significant digits with a prefix, as everywhere in the tables.
  function energyText(value) {
    if (!Number.isFinite(value)) return "missing";
    const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]];
    const [factor, prefix] = steps.find(([step]) => Math.abs(value) >= step * 0.9995) || [1, ""];
    const size = Math.abs(value / factor);
    const digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
    return (value / factor).toFixed(digits) + " " + prefix + "J";
  }

  // run -> joules, for one method
  function byRun(method, state) {
    const found = new Map();
    report.datasets.parts.filter((part) => part.method === method).forEach((part) => {
      found.set(part.run, (found.get(part.run) || 0) + joules(part, state));
    });
    return found;
  }

  function mean(values) { return values.reduce((sum, value) => sum + value, 0) / values.length; }

  function runsOf(method, state) {
    const facts = Object.fromEntries(report.datasets.runs.map((run) => [run.run, run]));
    return Array.from(byRun(method, state), ([run, value]) => ({ ...facts[run], joules: value }));
  }

  function ratioText(method, state) {
    if (method === report.baseline) return "1";
    if (report.no_ratio.includes(method)) return "-";
    const found = window.view.ratio(runsOf(method, state), runsOf(report.baseline, state));
    return window.view.ratioWords(found) + window.view.doubtWords(found, report.crowded.includes(method));
  }

  // How the joules shown were obtained: the other scopes hold measured joules alone.
  function how(cell, state) {
    const words = ["policy", "pue"].includes(state.scope) ? cell.dataset.how : "measured";
    return !words ? "" : words.startsWith("±") ? " " + words : ", " + words;
  }

  // Some of its work was not metered: it took these joules at least.
  const isBound = (row) => report.datasets.runs.some((run) => run.method === row.dataset.method && run.lower_bound);

  // No other method is better and cheaper at once, by the means, as joules are counted now.
  function markFront(totals) {
    if (!report.sign || report.no_front) return;
    const scores = new Map(rows.map((row) => [row, report.sign * mean(report.datasets.runs
      .filter((run) => run.method === row.dataset.method && "quality" in run).map((run) => run.quality))]));
    const known = rows.filter((row) => Number.isFinite(scores.get(row)) && Number.isFinite(totals.get(row))
      && !isBound(row));
    rows.forEach((row) => {
      const beaten = known.some((other) => other !== row && totals.get(other) <= totals.get(row)
        && scores.get(other) >= scores.get(row)
        && (totals.get(other) < totals.get(row) || scores.get(other) > scores.get(row)));
      row.querySelector(".front").hidden = beaten || !known.includes(row) || known.length < 2;
    });
  }

  function drawBar(row, state, longest) {
    const bar = row.querySelector(".bar");
    if (!bar) return;
    bar.classList.toggle("bound", isBound(row));
    const runs = byRun(row.dataset.method, state).size || 1;
    const stages = new Map();
    report.datasets.parts.filter((part) => part.method === row.dataset.method).forEach((part) => {
      const key = part.stage + "|" + part.paid;
      stages.set(key, (stages.get(key) || 0) + joules(part, state) / runs);
    });
    bar.replaceChildren(...Array.from(stages, ([key, value]) => {
      const [stage, paid] = key.split("|");
      const piece = document.createElement("span");
      piece.style.width = 100 * value / longest + "%";
      piece.style.background = colours[stage];
      piece.className = paid;
      piece.title = stage + (paid === "inherited" ? " (inherited)" : "") + ": " + energyText(value);
      return piece;
    }));
  }

  function fill(state) {
    const totals = new Map(rows.map((row) => [row, mean(Array.from(byRun(row.dataset.method, state).values()))]));
    const longest = Math.max(...Array.from(totals.values()).filter(Number.isFinite), 1e-12);
    rows.forEach((row) => {
      const total = totals.get(row);
      row.querySelectorAll("[data-moves]").forEach((cell) => {
        const energy = cell.dataset.moves === "energy";
        const bound = isBound(row) && Number.isFinite(total) ? "≥ " : "";
        const known = Number.isFinite(total) ? how(cell, state) : "";
        const text = energy ? bound + energyText(total) + known : ratioText(row.dataset.method, state);
        cell.textContent = window.view.isFirst() ? firstTexts.get(cell) : text;
        cell.closest("td").dataset.value = energy ? total : parseFloat(text);
      });
      drawBar(row, state, longest);
    });
    markFront(totals);
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

  // Methods that the filter leaves out are left out of the charts too.
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
  // 1 to 1000 in steps that grow; each is another number, so that every press of a key moves something
  const counts = Array.from(new Set(Array.from({ length: 61 }, (_, k) => Math.round(10 ** (k / 20)))));
  const placeOf = (n) => counts.findIndex((count) => count >= n);
  if (students) students.max = counts.length - 1;
  scope.addEventListener("change", () => window.view.change({ scope: scope.value }));
  if (students) students.addEventListener("input", () => window.view.change({ n: counts[students.value] }));
  pue.addEventListener("input", () => {
    const value = Number(pue.value);
    if (value >= 1 && value < 10) window.view.change({ pue: value, scope: "pue" });
  });

  function show(state) {
    const building = scope.querySelector("option[value=pue]");
    building.disabled = state.pue === null;
    scope.value = state.scope;
    if (document.activeElement !== find) find.value = state.find;
    if (document.activeElement !== pue) pue.value = state.pue === null ? "" : state.pue;
    if (students) {
      students.value = placeOf(state.n);
      const text = state.n === 1 ? "1 student" : state.n + " students";
      document.getElementById("students-count").textContent = text;
      students.setAttribute("aria-valuetext", text);
      document.getElementById("teacher-words").textContent =
        state.n === 1 ? "teacher included" : "teacher shared by " + text;
    }
    fill(state);
    filter(state);
    sort(state);
  }
  window.view.onChange(show);
  show(window.view.state);
  window.view.ratioText = ratioText;
})();
