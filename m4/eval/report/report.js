// Sorts and filters the page's tables, and shows a language's numbers where the pointer is. Without
// it the page has the same content. It reads the document alone, and sends and stores nothing.
"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Tables: a click on a head sorts by its column, a second one the other way; what is missing is last.
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const text = (cell.dataset.value ?? cell.textContent).trim();
    const number = Number(text.replaceAll(",", "").replace("−", "-").replace("%", ""));
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  for (const table of all("table.sortable")) {
    const heads = all("th[data-column]", table);
    for (const head of heads) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const other = first === "descending" ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        for (const each of heads) each.setAttribute("aria-sort", each === head ? order : "none");
        const sign = order === "ascending" ? 1 : -1;
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [valueOf(row, Number(head.dataset.column)), row]);
        rows.sort(([a], [b]) =>
          a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b));
        body.append(...rows.map(([, row]) => row));
      });
    }
  }

  // The filter: whatever is of one language is shown or not; in the plot it is pale.
  const facts = all("#facts tr[data-language]");
  const form = document.querySelector("form.filter");
  if (form) {
    const fields = form.elements;
    const apply = () => {
      const words = fields.words.value.trim().toLowerCase();
      const fits = ({ dataset }) =>
        dataset.words.includes(words) &&
        (!fields.level.value || dataset.level === fields.level.value) &&
        (!fields.family.value || dataset.family === fields.family.value);
      const kept = new Set(facts.filter(fits).map((row) => row.dataset.language));
      for (const one of all("[data-language]")) {
        const out = !kept.has(one.dataset.language);
        if (one instanceof SVGElement) one.classList.toggle("out", out);
        else one.hidden = out;
      }
      const some = kept.size < facts.length;
      form.querySelector("output").textContent =
        some ? `${kept.size} of ${facts.length} languages` : "";
    };
    form.hidden = false;
    form.addEventListener("input", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const chip of all(".chip")) {
      const name = chip.textContent;
      if (![...fields.family.options].some((option) => option.text === name)) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...chip.childNodes);
      chip.append(button);
      button.addEventListener("click", () => {
        fields.family.value = fields.family.value === name ? "" : name;
        apply();
      });
    }
    apply();
  }

  // The plot: a text that follows the pointer.
  const box = document.createElement("div");
  box.id = "here";
  box.hidden = true;
  box.dir = "auto";
  document.body.append(box);
  let last = null;
  const about = new Map(facts.map((row) => [row.dataset.language, row.dataset.about]));
  const areas = (chart, language) =>
    all("g[data-language]", chart).filter((area) => area.dataset.language === language);
  const leave = () => {
    for (const area of all("svg.chart .here")) area.classList.remove("here");
    last = null;
    box.hidden = true;
  };
  for (const chart of all("svg.chart")) {
    const show = (event) => {
      const language = event.target.closest("g[data-language]")?.dataset.language;
      if (!language) return leave();
      if (language !== last) {
        leave();
        for (const area of areas(chart, language)) area.classList.add("here");
        box.textContent = about.get(language);
        box.hidden = false;
        last = language;
      }
      const edge = document.documentElement.clientWidth;
      const left = event.clientX + 14 + box.offsetWidth > edge
        ? event.clientX - 14 - box.offsetWidth : event.clientX + 14;
      box.style.left = `${window.scrollX + Math.max(4, left)}px`;
      box.style.top = `${window.scrollY + event.clientY + 14}px`;
    };
    chart.addEventListener("pointermove", show);
    chart.addEventListener("pointerdown", show);
    // A finger that is lifted leaves the text there, until the next touch.
    chart.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
  }
  document.addEventListener("pointerdown", (event) => event.target.closest("svg.chart") || leave());
})();
