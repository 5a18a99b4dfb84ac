// State of the page's controls, kept in the page's address so that a link shows the same view.
(() => {
  "use strict";
  const first = { scope: "policy", n: 1, pue: null, log: {}, sort: "", hide: [], find: "", power: "", at: "" };
  const report = JSON.parse(document.getElementById("report-data").textContent);
  first.pue = report.pue;
  const listeners = [];
  let state = read();

  function read() {
    const words = new URLSearchParams(window.location.hash.slice(1));
    const found = { ...first, log: {} };
    if (!window.location.hash.includes("=")) return { ...found, at: window.location.hash.slice(1) };
    const scopes = report.scopes.filter((one) => !one.why_not).map((one) => one.scope);
    if (scopes.includes(words.get("scope"))) found.scope = words.get("scope");
    if (report.pues.includes(Number(words.get("pue")))) found.pue = Number(words.get("pue"));
    if (found.scope === "pue" && found.pue === null) found.scope = first.scope;
    // older links may have a number between the choices: the largest choice that is not above it
    const counts = (report.views.students || [1]).filter((count) => count <= Number(words.get("n") || 1));
    found.n = counts.length ? counts[counts.length - 1] : 1;
    for (const pair of (words.get("log") || "").split(",").filter(Boolean)) {
      const [name, kind] = pair.split(":");
      if (kind === "log" || kind === "linear") found.log[name] = kind;
    }
    found.sort = words.get("sort") || "";
    found.hide = words.getAll("hide");
    found.find = words.get("find") || "";
    found.power = words.get("power") || "";
    found.at = words.get("at") || "";
    return found;
  }

  function write() {
    const words = new URLSearchParams();
    if (state.scope !== first.scope) words.set("scope", state.scope);
    if (state.n !== 1) words.set("n", state.n);
    if (state.pue !== null && state.pue !== report.pue) words.set("pue", state.pue);
    const axes = Object.entries(state.log).map(([name, kind]) => name + ":" + kind);
    if (axes.length) words.set("log", axes.join(","));
    if (state.sort) words.set("sort", state.sort);
    state.hide.forEach((method) => words.append("hide", method));
    if (state.find) words.set("find", state.find);
    if (state.power) words.set("power", state.power);
    if (state.at) words.set("at", state.at);
    const text = words.toString();
    window.history.replaceState(null, "", text ? "#" + text : window.location.pathname + window.location.search);
  }

  window.view = {
    report,
    get state() { return state; },
    change(part) {
      state = { ...state, ...part };
      write();
      listeners.forEach((notify) => notify(state, Object.keys(part)));
    },
    onChange(listener) { listeners.push(listener); },
  };
  // Enter in a search field must not load the page again.
  document.querySelectorAll("form.controls").forEach((form) => {
    form.addEventListener("submit", (event) => event.preventDefault());
  });
  window.addEventListener("hashchange", () => {
    state = read();
    listeners.forEach((notify) => notify(state, Object.keys(first)));
  });
})();
