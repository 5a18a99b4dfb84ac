// Copies and downloads tables as Markdown, LaTeX or CSV, as sorted, filtered and selected on the page.
(() => {
  "use strict";

  function cellsOf(table) {
    const lines = [...table.tHead.rows, ...table.tBodies[0].rows]
      .filter((row) => !row.hidden && !row.classList.contains("unchosen"));
    return lines.map((row) => Array.from(row.cells)
      .filter((cell) => !cell.classList.contains("choose"))
      .map((cell) => (cell.dataset.copy ? cell.querySelector(cell.dataset.copy).textContent : cell.textContent)
        .replace(/\s+/g, " ").trim()));
  }

  function markdown(lines) {
    const text = (cell) => cell.replace(/\|/g, "\\|").replace(/</g, "&lt;");
    const line = (cells) => "| " + cells.map(text).join(" | ") + " |";
    return [line(lines[0]), "|" + " --- |".repeat(lines[0].length), ...lines.slice(1).map(line)].join("\n") + "\n";
  }

  function latex(lines) {
    const named = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
      "±": "$\\pm$", "→": "$\\to$", "µ": "$\\mu$", "✓": "\\checkmark{}", "≥": "$\\geq$", "<": "$<$", ">": "$>$" };
    const text = (cell) => cell.replace(/[\\~^±→µ✓≥<>&%$#_{}]/g, (mark) => named[mark] || "\\" + mark);
    const line = (cells) => cells.map(text).join(" & ").replace(/^\[/, "{}[") + " \\\\";
    const columns = "l" + "r".repeat(lines[0].length - 1);
    return ["\\begin{tabular}{" + columns + "}", "\\toprule", line(lines[0]), "\\midrule",
      ...lines.slice(1).map(line), "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
  }

  function csv(lines) {
    const text = (cell) => (/[",\n]/.test(cell) ? '"' + cell.replace(/"/g, '""') + '"' : cell);
    return lines.map((cells) => cells.map(text).join(",")).join("\r\n") + "\r\n";
  }

  const forms = { markdown, latex, csv };
  window.view.tableText = (table, form) => forms[form](cellsOf(table));

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  }

  document.querySelectorAll("[data-copy-as]").forEach((button) => {
    button.addEventListener("click", async () => {
      const table = document.getElementById(button.dataset.table);
      await copy(window.view.tableText(table, button.dataset.copyAs));
      const word = button.textContent;
      button.textContent = "copied";
      setTimeout(() => { button.textContent = word; }, 1200);
    });
  });

  window.view.saveAddress = (name, address) => {
    const link = document.createElement("a");
    link.href = address;
    link.download = name;
    link.click();
  };
  window.view.save = (name, text, kind) => {
    const address = URL.createObjectURL(new Blob([text], { type: kind }));
    window.view.saveAddress(name, address);
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };

  document.querySelectorAll("[data-download]").forEach((button) => {
    button.addEventListener("click", () => {
      const { report } = window.view;
      const what = button.dataset.download;
      if (what === "json") window.view.save("comparison.json", JSON.stringify(report.data, null, 2), "application/json");
      else {
        const form = { csv: "csv", md: "markdown", tex: "latex" }[what];
        const tables = Array.from(document.querySelectorAll("#table table, #numbers table"));
        const texts = tables.map((table) => {
          const caption = table.caption.textContent;
          const head = { csv: "# " + caption + "\r\n", md: "**" + caption + "**\n\n", tex: "% " + caption + "\n" }[what];
          return head + window.view.tableText(table, form);
        });
        window.view.save("tables." + what, texts.join("\n"), "text/plain");
      }
    });
  });
})();
