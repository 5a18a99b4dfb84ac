// A running run: replaces the parts of the page that the server sends, and stops the run after a confirmation.
import { follow } from "/assets/events.js";

const live = document.getElementById("live");
const run = encodeURIComponent(live.dataset.run);
const connection = document.getElementById("connection");
const { since } = live.dataset;

function state(text) {
  connection.textContent = text;
  connection.dataset.state = text;
}

// Tables keep their sideways position and the focus while their content is replaced.
function replace(name, html) {
  const part = document.getElementById("part-" + name);
  if (!part) return;
  const regions = () => Array.from(part.querySelectorAll(".scroll"));
  const before = regions();
  const positions = before.map((region) => region.scrollLeft);
  const focused = before.indexOf(document.activeElement);
  part.innerHTML = html;
  regions().forEach((region, place) => {
    region.scrollLeft = positions[place] || 0;
    if (place === focused) region.focus({ preventScroll: true });
  });
}

function update({ parts, figures }) {
  Object.entries(parts).forEach(([name, html]) => replace(name, html));
  Object.entries(figures || {}).forEach(([name, figure]) => {
    const place = document.getElementById("live-" + name);
    place.hidden = false;
    place.querySelector("h3").textContent = figure.title;
    place.querySelector("figcaption").textContent = figure.caption;
    place.querySelector(".chart").setAttribute("aria-label", figure.description);
    window.view.update(name, figure);
  });
  live.dataset.updates = Number(live.dataset.updates || 0) + 1;
}

const close = follow(() => "/api/runs/" + run + "/events?since=" + since, {
  update,
  ended: () => { close(); window.location.reload(); },
}, state);

const dialog = document.getElementById("confirm");
document.getElementById("stop").addEventListener("click", () => dialog.showModal());
document.getElementById("confirm-cancel").addEventListener("click", () => dialog.close());
document.getElementById("confirm-stop").addEventListener("click", async () => {
  dialog.close();
  state("stopping");
  const answer = await fetch("/api/runs/" + run + "/stop", { method: "POST" });
  const found = await answer.json();
  state(answer.ok ? found.stopped : found.error + (found.hint ? " (" + found.hint + ")" : ""));
});
