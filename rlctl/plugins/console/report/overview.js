"use strict";
// Curves of the pinned or of the first runs of the list, above it.
const OVERLAID = 8, MOST_PINNED = 24, OVERLAY_MS = 2000;
const OVERLAY_CHARTS = ["Reward", "Validation", "Training loss"];
const overlay = { shape: null, waiting: null, number: 0 };

function pinnedRuns() {
  try { return JSON.parse(localStorage.getItem("pins") || "[]").filter(key => typeof key === "string").slice(0, MOST_PINNED); }
  catch { return []; }
}

function pinButton(row) {
  const button = el("button", { type: "button", class: "pin", "data-run": row.key, "aria-label": `pin ${row.key}`, title: "Pin: keep its curves above the list" });
  button.addEventListener("click", () => {
    const pins = pinnedRuns(), others = pins.filter(key => key !== row.key);
    localStorage.setItem("pins", JSON.stringify(others.length < pins.length ? others : [...pins, row.key]));
    attempt(showOverlay);
  });
  return button;
}

function markPins() {
  const pins = pinnedRuns();
  for (const button of document.querySelectorAll(".pin")) {
    const index = DATA.runs.findIndex(run => run.key === button.dataset.run);
    button.setAttribute("aria-pressed", String(pins.includes(button.dataset.run)));
    button.style.setProperty("--run", index < 0 ? "transparent" : colour(index));
  }
}

function overlaySoon() {
  // A running run changes the list twice a second.
  overlay.waiting ??= setTimeout(() => { overlay.waiting = null; attempt(showOverlay); }, overlay.number ? OVERLAY_MS : 0);
}

function nameOverlay(title) {
  const heading = $("overlay").querySelector("h2");
  if (heading.textContent === title && heading.firstElementChild) return;
  heading.textContent = title;
  foldable($("overlay"));
}

async function showOverlay() {
  const pins = pinnedRuns(), first = listed.rows.filter(row => row.curve.length).slice(0, OVERLAID).map(row => row.key);
  const keys = pins.length ? pins : first, number = ++overlay.number, hidden = DATA.runs.filter((_, index) => view.hidden.has(index)).map(run => run.key);
  const data = keys.length ? await api("curves", { run: keys }) : { runs: [], seeds: [], settings: [] };
  if (number !== overlay.number) return;  // the list or the pins have changed
  DATA = data;
  view.hidden = new Set(DATA.runs.flatMap((run, index) => hidden.includes(run.key) ? [index] : []));
  const charts = SECTIONS[0][1].filter(chart => OVERLAY_CHARTS.includes(chart.title) && DATA.runs.some(run => linesOf(chart, run).length));
  const shape = JSON.stringify([DATA.runs.map(run => [run.key, Object.keys(run.metrics)]), DATA.seeds.map(group => group.runs)]);
  $("overlay").hidden = !charts.length;
  document.body.classList.toggle("overlaid", charts.length > 0);
  nameOverlay(pins.length ? "Pinned runs" : QUERY.get("sort") ? "First runs of the list" : "Newest runs");
  if (shape !== overlay.shape) {
    overlay.shape = shape;
    $("smoothing").value = view.smoothing = Math.max(...DATA.runs.map(run => run.x.step.length)) > 100 ? 0.6 : 0;
    plots.length = 0;
    buildChips();
    buildSeeds();
    const grid = el("div", { class: "grid", tabindex: "0", role: "region", "aria-label": "Curves" });  // scrolls on a phone
    addCharts(grid, charts);
    $("overlay").querySelector(".grid").replaceWith(grid);
  }
  markPins();
  redraw();
  performance.mark("overlaid");
  if (!charts.length || window.Plotly) return;
  await new Promise(resolve => requestIdleCallback(resolve));
  await loadPlotly();
  redraw();
}
