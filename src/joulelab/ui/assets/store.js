// The table of all runs or groups: only the rows in sight are in the page, so ten thousand runs scroll without delay.
// Texts and the values to sort by come from the server; nothing is computed here but counts of runs.
import { follow } from "/assets/events.js";

const ROW_PX = 36;
const MARGIN = 10;
const MOST_COMPARED = 200;
const byId = (id) => document.getElementById(id);
const scroll = byId("store-scroll");
const table = byId("store-table");
const body = table.tBodies[0];
const runHead = table.tHead.innerHTML;
const [find, status, tag, kind] = ["store-find", "status", "tag", "kind"].map(byId);

const runs = new Map();
const chosen = new Set();
let groups = [];
let version = 0;
let shown = [];
let focused = 0;
let sort = { place: -1, direction: "descending" };

const GROUP_TITLES = ["Group", "Own energy>", "Runs>", "Done>", "Status", "Time>", "Grade", "About", "Started"];
const groupHead = '<tr><th scope="col" class="choose"></th>' + GROUP_TITLES.map((title) =>
  '<th scope="col" class="' + (title.endsWith(">") ? "right" : "left") + '" data-number="' + title.endsWith(">") +
  '" aria-sort="none"><button type="button">' + title.replace(">", "") + "</button></th>").join("") + "</tr>";
const NO_FACTS = { energy: "-", energy_j: null, time: "-", time_s: null, grade: "-" };
const FACTS_EVERY_MS = 10000;
let facts = {};
let factsRead = -FACTS_EVERY_MS;
let factsDue = false;

// Sums over the runs of a group come from the server, and only while groups are shown.
function readFacts() {
  if (!isGroups() || factsDue) return;
  factsDue = true;
  setTimeout(async () => {
    factsDue = false;
    factsRead = performance.now();
    const answer = await fetch("/api/groups");
    if (answer.ok) facts = await answer.json();
    select();
  }, Math.max(0, factsRead + FACTS_EVERY_MS - performance.now()));
}

function groupRows() {
  const members = new Map();
  runs.forEach((row) => {
    if (!row.group) return;
    if (!members.has(row.group)) members.set(row.group, []);
    members.get(row.group).push(row);
  });
  return groups.map((group) => {
    const known = facts[group.id] || NO_FACTS;
    const own = known.runs ? known.runs.map((id) => runs.get(id)).filter(Boolean) : members.get(group.id) || [];
    const done = own.filter((row) => row.status === "done").length;
    const others = ["running", "failed", "truncated", "queued"].filter((name) => own.some((row) => row.status === name));
    const state = others.length ? others.join(", ") : done ? "done" : "no run yet";
    const started = group.created.slice(0, 16).replace("T", " ");
    return {
      id: group.id,
      group: null,
      status: others[0] || "done",
      tags: [...new Set(own.flatMap((row) => row.tags))],
      cells: [group.id, known.energy, String(own.length), String(done), state, known.time, known.grade, group.about || "-", started],
      values: [group.id, known.energy_j, own.length, done, state, known.time_s, known.grade, group.about, group.created],
    };
  });
}

const isGroups = () => kind.value === "groups";
const rows = () => (isGroups() ? groupRows() : [...runs.values()]);
const heads = () => Array.from(table.tHead.rows[0].cells).slice(1);

function compare(a, b) {
  const place = sort.place;
  const [x, y] = [a.values[place], b.values[place]];
  if (x === null || y === null || x === undefined || y === undefined) return (x === null || x === undefined) - (y === null || y === undefined);
  const order = typeof x === "number" && typeof y === "number" ? x - y : x < y ? -1 : x > y ? 1 : 0;
  return sort.direction === "descending" ? -order : order;
}

function select() {
  const words = find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const all = rows();
  shown = all.filter((row) => {
    if (status.value && row.status !== status.value) return false;
    if (tag.value && !row.tags.includes(tag.value)) return false;
    if (!words.length) return true;
    row.text = row.text || (row.cells.join(" ") + " " + (row.group || "")).toLowerCase();
    return words.every((word) => row.text.includes(word));
  });
  if (sort.place < 0) sort = { place: heads().length - (isGroups() ? 1 : 2), direction: "descending" };
  shown.sort(compare);
  heads().forEach((head, place) => head.setAttribute("aria-sort", place === sort.place ? sort.direction : "none"));
  focused = Math.max(0, Math.min(focused, shown.length - 1));
  byId("store-found").textContent = shown.length + " of " + all.length + (isGroups() ? " groups" : " runs");
  table.setAttribute("aria-rowcount", String(shown.length + 1));
  byId("store-empty").hidden = shown.length > 0;
  byId("store-empty").textContent = all.length ? "Nothing matches the filter."
    : isGroups() ? "No groups yet: an experiment with several runs makes one." : "No runs yet. `joulelab demo` makes some; they appear here by themselves.";
  draw();
}

function cell(tagName, text, className) {
  const made = document.createElement(tagName);
  made.className = className;
  made.textContent = text;
  made.title = text;
  return made;
}

function line(row, place) {
  const made = document.createElement("tr");
  made.dataset.id = row.id;
  made.setAttribute("aria-rowindex", String(place + 2));
  made.tabIndex = place === focused ? 0 : -1;
  made.className = chosen.has(row.id) ? "chosen" : "";
  const choose = document.createElement("td");
  choose.className = "choose";
  if (!isGroups()) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.tabIndex = -1;
    box.checked = chosen.has(row.id);
    box.setAttribute("aria-label", "Select " + row.id);
    choose.append(box);
  }
  const head = cell("th", "", "");
  head.scope = "row";
  head.title = row.id;
  const link = document.createElement("a");
  link.href = (isGroups() ? "/groups/" : "/runs/") + encodeURIComponent(row.id);
  link.textContent = row.cells[0];
  link.tabIndex = -1;
  head.append(link);
  made.append(choose, head);
  const titles = heads();
  row.cells.slice(1).forEach((text, rest) => {
    const right = titles[rest + 1].dataset.number === "true";
    const badge = titles[rest + 1].textContent === "Status";
    // energy has two lines at most, amount and method, as the height of rows is fixed; of a bound, the title has the rest
    const shownText = rest === 0 ? text.replace(/ \([^)]*\)/, "").replace(/(?<!,) /g, "\u00a0") : text;
    const made_cell = cell("td", badge ? "" : shownText, (right ? "right" : "left") + (text === "-" ? " none" : ""));
    if (shownText !== text) made_cell.title = text;
    if (badge) made_cell.append(cell("span", text, "status " + row.status));
    made.append(made_cell);
  });
  return made;
}

// An unchanged row stays the same element: an update between press and release of a mouse button loses no click.
function lineOnce(row, place) {
  const key = [place, place === focused, chosen.has(row.id)].join();
  if (row.key !== key) Object.assign(row, { key, line: line(row, place) });
  return row.line;
}

function spacer(count) {
  const made = document.createElement("tr");
  made.setAttribute("aria-hidden", "true");
  made.className = "spacer";
  const inside = document.createElement("td");
  inside.colSpan = heads().length + 1;
  inside.style.height = count * ROW_PX + "px";
  made.append(inside);
  return made;
}

function draw() {
  const first = Math.max(0, Math.floor(scroll.scrollTop / ROW_PX) - MARGIN);
  const last = Math.min(shown.length, first + Math.ceil(scroll.clientHeight / ROW_PX) + 2 * MARGIN);
  const hadFocus = body.contains(document.activeElement) && document.activeElement.tagName === "TR";
  const lines = shown.slice(first, last).map((row, rest) => lineOnce(row, first + rest));
  const next = [spacer(first), ...lines, spacer(shown.length - last)];
  if (body.dataset.first === String(first) && body.children.length === next.length) {
    next.forEach((made, place) => { if (body.children[place] !== made) body.children[place].replaceWith(made); });
  } else body.replaceChildren(...next);
  body.dataset.first = String(first);
  if (hadFocus && focused >= first && focused < last) lines[focused - first].focus({ preventScroll: true });
  byId("compare").disabled = chosen.size === 0 || chosen.size > MOST_COMPARED;
  byId("clear").disabled = chosen.size === 0;
  byId("chosen").textContent = chosen.size ? chosen.size + " selected" + (chosen.size > MOST_COMPARED ? "; at most " + MOST_COMPARED : "") : "";
}

let pending = false;
function drawSoon() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

function tags() {
  const known = [...new Set([...runs.values()].flatMap((row) => row.tags))].sort();
  if (known.join("\n") === [...tag.options].slice(1).map((one) => one.value).join("\n")) return;
  const selected = tag.value || new URLSearchParams(window.location.search).get("tag") || "";
  tag.replaceChildren(tag.options[0], ...known.map((name) => new Option(name, name)));
  tag.value = known.includes(selected) ? selected : "";
}

function take(changes) {
  version = changes.version;
  changes.rows.forEach((row) => runs.set(row.id, row));
  changes.gone.forEach((id) => { runs.delete(id); chosen.delete(id); });
  if (changes.groups) groups = changes.groups;
  tags();
  select();
  readFacts();
}

// The filter is kept in the address, so that Back and a copied link show the same rows.
function remember() {
  const words = new URLSearchParams();
  if (find.value) words.set("find", find.value);
  if (status.value) words.set("status", status.value);
  if (tag.value) words.set("tag", tag.value);
  if (isGroups()) words.set("show", "groups");
  const text = words.toString();
  window.history.replaceState(null, "", window.location.pathname + (text ? "?" + text : "") + window.location.hash);
}

function changeKind() {
  table.tHead.innerHTML = isGroups() ? groupHead : runHead;
  sort = { place: -1, direction: "descending" };
  focused = 0;
  scroll.scrollTop = 0;
}

[find, status, tag].forEach((control) => control.addEventListener("input", () => { remember(); scroll.scrollTop = 0; select(); }));
kind.addEventListener("input", () => { remember(); changeKind(); select(); readFacts(); });
scroll.addEventListener("scroll", drawSoon);
window.addEventListener("resize", drawSoon);
table.tHead.addEventListener("click", (event) => {
  const head = event.target.closest("th");
  if (!head || !event.target.closest("button")) return;
  const place = heads().indexOf(head);
  const direction = sort.place === place && sort.direction === "ascending" ? "descending" : "ascending";
  sort = { place, direction };
  select();
});

function toggle(id) {
  if (isGroups()) return;
  if (!chosen.delete(id)) chosen.add(id);
  draw();
}
body.addEventListener("change", (event) => toggle(event.target.closest("tr").dataset.id));
body.addEventListener("focusin", (event) => {
  const row = event.target.closest("tr");
  if (row && row.dataset.id) focused = Number(row.getAttribute("aria-rowindex")) - 2;
});

function moveTo(place) {
  if (!shown.length) return;
  focused = Math.max(0, Math.min(place, shown.length - 1));
  const top = focused * ROW_PX;
  const head = table.tHead.offsetHeight;
  if (top < scroll.scrollTop) scroll.scrollTop = top;
  else if (top + ROW_PX > scroll.scrollTop + scroll.clientHeight - head) scroll.scrollTop = top + ROW_PX - scroll.clientHeight + head;
  draw();
  const found = body.querySelector('tr[aria-rowindex="' + (focused + 2) + '"]');
  if (found) found.focus({ preventScroll: true });
}

scroll.addEventListener("keydown", (event) => {
  if (event.target.tagName === "BUTTON" || event.target.tagName === "INPUT") return;
  const page = Math.max(1, Math.floor(scroll.clientHeight / ROW_PX) - 2);
  const inside = event.target.closest("tbody tr");
  const steps = { ArrowDown: inside ? focused + 1 : focused, ArrowUp: focused - 1, Home: 0, End: shown.length - 1, PageDown: focused + page, PageUp: focused - page };
  if (event.key in steps) {
    event.preventDefault();
    moveTo(steps[event.key]);
  } else if (inside && event.key === "Enter") {
    inside.querySelector("a").click();
  } else if (inside && event.key === " ") {
    event.preventDefault();
    toggle(inside.dataset.id);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) {
    event.preventDefault();
    find.focus();
  }
});

byId("clear").addEventListener("click", () => { chosen.clear(); draw(); });
byId("compare").addEventListener("click", () => {
  const words = new URLSearchParams();
  chosen.forEach((id) => words.append("run", id));
  window.location.href = "/compare?" + words;
});

const trend = byId("trend");
trend.addEventListener("toggle", async () => {
  if (!trend.open || trend.dataset.read) return;
  trend.dataset.read = "yes";
  const figure = await (await fetch("/api/trend")).json();
  byId("trend-caption").textContent = figure ? figure.caption : "No kind of run was repeated, so there is no trend.";
  byId("figure-trend").hidden = !figure;
  if (figure) await window.view.update("trend", figure);
});

const asked = new URLSearchParams(window.location.search);
find.value = asked.get("find") || "";
status.value = asked.get("status") || "";
kind.value = asked.get("show") === "groups" ? "groups" : "runs";
if (isGroups()) changeKind();
const answer = await fetch("/api/runs");
if (answer.ok) {
  take(await answer.json());
  document.documentElement.dataset.ready = "yes";
  follow(() => "/api/runs/events?since=" + version, { changes: take }, (text) => {
    if (text !== "live") byId("store-found").textContent = text;
    else select();
  });
} else byId("store-found").textContent = "the list of runs could not be read";
