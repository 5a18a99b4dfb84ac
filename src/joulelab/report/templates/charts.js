// Draws the figures from the specs in the page. Colors of text and lines come from the style sheet, sizes from here.
(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("chart-specs").textContent);
  const narrow = window.matchMedia("(max-width: 640px)");
  const views = new Map();

  function config() {
    const font = getComputedStyle(document.body).fontFamily;
    const legend = narrow.matches
      ? { orient: "bottom", direction: "vertical", columns: 2, labelLimit: 140, columnPadding: 12 }
      : { orient: "right", labelLimit: 220 };
    return {
      font,
      background: "transparent",
      view: { stroke: null },
      axis: {
        labelFontSize: 12, titleFontSize: 12.5, titleFontWeight: 500, titlePadding: 10, tickSize: 4,
        labelLimit: narrow.matches ? 110 : 200, labelLineHeight: 14, labelFlush: false,
      },
      axisX: { tickCount: narrow.matches ? 4 : 8, labelFlush: narrow.matches },
      legend: { labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, symbolSize: 110, ...legend },
    };
  }

  function params(state) {
    const hidden = window.view.hiddenMethods ? window.view.hiddenMethods() : [];
    return { scope: state.scope, students: state.n, pue: state.pue || 1, hidden };
  }

  // Sets the switchable axis in every layer; a logarithmic one has no zero.
  function withAxis(spec, axis, kind) {
    const changed = { ...spec };
    if (spec.layer) changed.layer = spec.layer.map((layer) => withAxis(layer, axis, kind));
    const encoded = spec.encoding && spec.encoding[axis];
    if (encoded && encoded.type === "quantitative") {
      const scale = { ...encoded.scale, type: kind };
      if (kind === "log") { delete scale.zero; scale.nice = false; scale.padding = 16; } else if (!("zero" in scale)) scale.zero = true;
      changed.encoding = { ...spec.encoding, [axis]: { ...encoded, scale } };
    }
    return changed;
  }

  // On a phone, long titles of the x axis take two lines and long labels of a legend one column.
  function folded(spec) {
    const changed = { ...spec };
    if (spec.layer) changed.layer = spec.layer.map(folded);
    const encoding = { ...spec.encoding };
    const { x } = encoding;
    if (x && typeof x.title === "string" && x.title.length > 30) {
      const cut = x.title.lastIndexOf(" ", x.title.length / 2 + 6);
      if (cut > 0) encoding.x = { ...x, title: [x.title.slice(0, cut), x.title.slice(cut + 1)] };
    }
    for (const channel of ["color", "fill", "stroke", "shape"]) {
      const coded = encoding[channel];
      const labels = coded && coded.legend !== null && coded.scale ? coded.scale.domain : [];
      if (Array.isArray(labels) && labels.some((label) => String(label).length > 15)) {
        encoding[channel] = { ...coded, legend: { ...coded.legend, columns: 1, labelLimit: 220 } };
      }
    }
    if (spec.encoding) changed.encoding = encoding;
    return changed;
  }

  function hiddenWidth() {
    const visible = places.find((place) => place.clientWidth);
    const box = document.querySelector("main").clientWidth - (narrow.matches ? 20 : 36);
    return visible && narrow.matches ? visible.clientWidth : box;
  }

  function prepared(name, place) {
    const { spec, log_axis: axis } = specs[name];
    const kind = window.view.state.log[place.dataset.name];
    const switched = axis && kind ? withAxis(spec, axis, kind) : spec;
    const chosen = narrow.matches ? folded(switched) : switched;
    const now = params(window.view.state);
    const moved = (chosen.params || []).map((one) => (one.name in now ? { ...one, value: now[one.name] } : one));
    const shared = window.view.report.datasets;
    // In a closed part the box has no width yet.
    const width = place.clientWidth ? {} : { width: hiddenWidth() };
    return { ...chosen, ...width, datasets: { ...shared, ...chosen.datasets }, ...(moved.length ? { params: moved } : {}) };
  }

  async function draw(place) {
    try {
      const found = await vegaEmbed(place, prepared(place.dataset.chart, place), {
        mode: "vega-lite", renderer: "svg", actions: false, config: config(),
      });
      views.set(place, found.view);
      place.dataset.width = place.clientWidth;
    } catch (error) {
      place.textContent = "This figure could not be drawn: " + error.message;
      console.error(error);
    }
  }

  const places = Array.from(document.querySelectorAll(".chart"));
  // the live pages have places for charts whose data comes later
  const known = () => places.filter((place) => specs[place.dataset.chart]);
  const drawAll = () => Promise.all(known().map(draw));
  drawAll();
  narrow.addEventListener("change", drawAll);
  // A part that opens draws the charts whose box has another width than they were drawn for.
  window.view.redraw = (part) => known()
    .filter((place) => part.contains(place) && Number(place.dataset.width) !== place.clientWidth)
    .forEach(draw);

  // Replaces a figure while its run goes on. Only data changes from one moment to the next: it is exchanged in the drawn
  // chart, which is drawn again only if something else in the spec is different.
  const form = ({ spec }) => JSON.stringify({ ...spec, datasets: Object.keys(spec.datasets || {}), description: "" });
  window.view.update = async (name, figure) => {
    const place = places.find((one) => one.dataset.chart === name);
    if (!place) return;
    const same = specs[name] && form(specs[name]) === form(figure);
    specs[name] = figure;
    const view = views.get(place);
    if (!same || !view) { await draw(place); return; }
    Object.entries(figure.spec.datasets || {}).forEach(([data, rows]) => view.data(data, rows));
    await view.runAsync();
  };

  async function move(state) {
    const now = params(state);
    for (const [place, view] of views) {
      const known = (specs[place.dataset.chart].spec.params || []).map((one) => one.name);
      if (!known.includes("scope")) continue;
      Object.entries(now).forEach(([name, value]) => view.signal(name, value));
      await view.runAsync();
    }
    document.documentElement.dataset.moved = JSON.stringify(now);
  }

  const power = document.getElementById("power");
  const choice = document.getElementById("power-run");
  function showPower(state) {
    if (!choice || !state.power) return;
    const option = Array.from(choice.options).find((one) => one.dataset.run === state.power);
    if (!option || power.dataset.chart === option.value) return;
    choice.value = option.value;
    power.dataset.chart = option.value;
    document.getElementById("power-caption").textContent = option.dataset.caption;
    draw(power);
  }
  if (choice) {
    choice.addEventListener("change", () => window.view.change({ power: choice.selectedOptions[0].dataset.run }));
    showPower(window.view.state);
  }

  const switches = Array.from(document.querySelectorAll("[data-axis-of]"));
  function showSwitches(state) {
    switches.forEach((button) => {
      const kind = state.log[button.dataset.axisOf] || button.dataset.first;
      button.setAttribute("aria-pressed", String(kind === "log"));
    });
  }
  switches.forEach((button) => {
    button.addEventListener("click", () => {
      const name = button.dataset.axisOf;
      const now = window.view.state.log[name] || button.dataset.first;
      window.view.change({ log: { ...window.view.state.log, [name]: now === "log" ? "linear" : "log" } });
    });
  });
  showSwitches(window.view.state);

  window.view.onChange((state, parts) => {
    showSwitches(state);
    if (parts.includes("log")) places.filter((place) => specs[place.dataset.chart].log_axis).forEach(draw);
    else if (["scope", "n", "pue", "hide", "find"].some((part) => parts.includes(part))) move(state);
    showPower(state);
  });

  // Saves a figure as a file.
  document.querySelectorAll("[data-save]").forEach((button) => {
    button.addEventListener("click", async () => {
      const place = document.getElementById(button.dataset.of);
      const view = views.get(place);
      if (!view) return;
      const name = (place.dataset.name || place.dataset.chart) + "." + button.dataset.save;
      if (button.dataset.save === "svg") window.view.save(name, await view.toSVG(), "image/svg+xml");
      else window.view.saveAddress(name, await view.toImageURL("png", 2));
    });
  });
})();
