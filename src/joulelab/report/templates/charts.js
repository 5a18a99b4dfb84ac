// Draws the figures from the specs in the page. Colours of text and lines come from the style sheet, sizes from here.
(() => {
  "use strict";
  const specs = JSON.parse(document.getElementById("chart-specs").textContent);
  const narrow = window.matchMedia("(max-width: 640px)");

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
      axisX: { tickCount: narrow.matches ? 4 : 8 },
      legend: { labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, symbolSize: 110, ...legend },
    };
  }

  async function draw(place) {
    try {
      await vegaEmbed(place, specs[place.dataset.chart], {
        mode: "vega-lite", renderer: "svg", actions: false, config: config(),
      });
    } catch (error) {
      place.textContent = "This figure could not be drawn: " + error.message;
      console.error(error);
    }
  }

  const places = Array.from(document.querySelectorAll(".chart"));
  const drawAll = () => places.forEach(draw);
  drawAll();
  narrow.addEventListener("change", drawAll);

  const choice = document.getElementById("power-run");
  if (choice) {
    choice.addEventListener("change", () => {
      const power = document.getElementById("power");
      const chosen = choice.selectedOptions[0];
      power.dataset.chart = choice.value;
      document.getElementById("power-caption").textContent = chosen.dataset.caption;
      draw(power);
    });
  }
})();
