"use strict";
// Head, tables and start of the page.
let cardButtons = null;  // set by the board: returns the buttons of a run

function buildHead() {
  buildChips();
  $("cards").replaceChildren();
  DATA.runs.forEach((run, index) => {
    $("cards").append(el("article", { class: "card", style: `--run:${colour(index)}` }));
    fillCard(run, index);
  });
}

function buildChips() {
  $("chips").replaceChildren(...DATA.runs.map((run, index) => {
    const chip = el("button", { class: "chip", type: "button", "aria-pressed": String(!view.hidden.has(index)), style: `--run:${colour(index)}`, title: "Show or hide" },
                    el("span", {}, run.label));
    chip.addEventListener("click", () => {
      if (!view.hidden.delete(index)) view.hidden.add(index);
      chip.setAttribute("aria-pressed", String(!view.hidden.has(index)));
      $("cards").children[index]?.classList.toggle("off", view.hidden.has(index));
      redraw();
    });
    return chip;
  }));
  $("chips").hidden = DATA.runs.length < 2;
}

function buildSeeds() {
  $("seeds-label").hidden = !DATA.seeds.length;
  view.seeds = DATA.seeds.length ? view.seeds : "";
  $("seeds").value = view.seeds;
  noteSeeds();
}

function noteSeeds() {
  const groups = DATA.seeds.map(group => `${group.label}, ${group.runs.length} seeds`).join("; ");
  $("seeds-note").hidden = !view.seeds;
  $("seeds-note").textContent = `Mean and 95 % interval of the mean (Student's t) over runs that differ only in their seeds: ${groups}. Each point has its number n of runs.`;
}

function inTime(seconds) {
  if (seconds === null) return "-";
  const whole = Math.round(seconds), two = number => String(number).padStart(2, "0");
  if (whole < 60) return `${seconds.toFixed(1)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h ${two(Math.floor(whole % 3600 / 60))}m`;
}

// Error that ended a run; other states than these need no explanation.
const causeOf = run => run.failure?.message || ({ failed: `exit code ${run.exit_code}`, lost: "the process is gone and has recorded no end" }[run.state] ?? "");

function figuresOf(run) {
  // Return name and value of the figures of a card; the pace is that of the last 20 rows.
  const { summary } = run, { step, hours } = run.x, last = step.length - 1, from = Math.max(0, last - 20), total = run.total_steps;
  const pace = last > 0 && step[last] > step[from] ? 3600 * (hours[last] - hours[from]) / (step[last] - step[from]) : null;
  const left = ["running", "starting"].includes(run.state) && pace !== null && total ? pace * (total - step[last]) : null;
  const alarms = run.alarms.length && el("a", { class: "rings", href: "#alarms" }, `${run.alarms.length}, ${run.alarms.filter(alarm => alarm.over === null).length} active`);
  const sweep = run.sweep && run.key && el("a", { href: `/?sweep=${encodeURIComponent(`${run.key.split("/")[0]}/${run.sweep}`)}` }, run.sweep);
  return [["steps", summary.steps], ["ends in", left !== null && inTime(left)], ["step time", pace !== null && inTime(pace)], ["took", summary.time],
          ["tokens", summary.tokens !== "0" && summary.tokens], ["model", run.model], ["algorithm", run.algorithm], ["sweep", readSamples ? sweep : run.sweep],
          ["alarms", alarms || "none"]].filter(([, value]) => value);
}

function fillCard(run, index) {
  const { summary } = run, card = $("cards").children[index], cause = causeOf(run);
  const parts = [el("h3", {}, el("span", {}, run.label), el("span", { class: `badge ${run.state}` }, run.state))];
  if (cause) parts.push(el("p", { class: "cause", title: cause }, cause), el("p", {}, run.failure?.hint || ""));
  if (cause && run.failure?.code) parts.push(el("p", { class: "note" }, "see: ", el("code", {}, `rlctl explain ${run.failure.code}`)));
  if (summary.kind) {
    parts.push(el("p", { class: "big" }, el("small", {}, `${summary.first} → `), summary.last), el("p", { class: "note" }, `${summary.kind}, ${summary.best}`));
  }
  if (run.total_steps) parts.push(el("progress", { max: run.total_steps, value: run.x.step[run.x.step.length - 1] ?? 0, "aria-label": `steps of ${run.label}` }));
  parts.push(el("dl", { class: "figures" }, ...figuresOf(run).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  if (run.tags.length) parts.push(el("p", { class: "note" }, ...run.tags.map(tag => el("span", { class: "tag" }, tag))));
  if (run.note) parts.push(el("p", { class: "note" }, run.note));
  if (cardButtons) parts.push(cardButtons(run));
  card.replaceChildren(...parts);
}

function who(index) {
  return el("span", { class: "run", style: `--run:${colour(index)}` }, DATA.runs[index].label);
}

function buildAlarms() {
  const all = DATA.runs.flatMap((run, index) => run.alarms.map(alarm => [alarm, index])).sort(([a], [b]) => a.step - b.step);
  $("alarms").hidden = !all.length;
  const [head, body] = [$("alarms").querySelector("thead"), $("alarms").querySelector("tbody")];
  body.replaceChildren();
  head.replaceChildren(el("tr", {}, ...["step", "until", ...(DATA.runs.length > 1 ? ["run"] : []), "alarm", "suggestion"].map(text => el("th", {}, text))));
  for (const [alarm, index] of all) {
    body.append(el("tr", {}, el("td", {}, String(alarm.step)),
      alarm.over === null ? el("td", { class: "rings" }, "the end") : el("td", {}, String(alarm.over)),
      DATA.runs.length > 1 ? el("td", {}, who(index)) : null, el("td", {}, alarm.message), el("td", { class: "same" }, alarm.hint)));
  }
}

const SIZES = ["bytes", "kB", "MB", "GB", "TB"];

function inBytes(number) {
  const power = Math.min(SIZES.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, number)) / 3)));
  return `${(number / 1000 ** power).toPrecision(3)} ${SIZES[power]}`;
}

function buildEvents() {
  const several = DATA.runs.length > 1;
  const all = DATA.runs.flatMap((run, index) => run.events.filter(event => event.kind !== "checkpoint").map(event => [event, index]));
  $("events").hidden = !all.length;
  fillTable("events", ["step", ...(several ? ["run"] : []), "event", "time"], all.map(([event, index]) =>
    [String(event.step), ...(several ? [who(index)] : []), event.kind.replaceAll("_", " "), event.time.replace("T", " ").slice(0, 19)]));
  const kept = DATA.runs.flatMap((run, index) => run.checkpoints.map(each => [each, index]));
  $("checkpoints").hidden = !kept.length;
  fillTable("checkpoints", ["step", ...(several ? ["run"] : []), "size", "folder"], kept.map(([each, index]) =>
    [String(each.step), ...(several ? [who(index)] : []), inBytes(each.bytes), each.path]));
}

function fillTable(id, titles, rows) {
  const [head, body] = [$(id).querySelector("thead"), $(id).querySelector("tbody")];
  head.replaceChildren(el("tr", {}, ...titles.map(text => el("th", { scope: "col" }, text))));
  body.replaceChildren(...rows.map(cells => el("tr", {}, ...cells.map(cell => el("td", {}, cell)))));
}

function buildSettings() {
  if (!DATA.settings.length) return;
  const several = DATA.runs.length > 1, [head, body] = [$("settings").querySelector("thead"), $("settings").querySelector("tbody")];
  const box = $("differing").querySelector("input");
  $("settings").hidden = false;
  $("differing").hidden = !several;
  head.replaceChildren(el("tr", {}, el("th", {}, "key"), ...DATA.runs.map((_, index) => el("th", {}, who(index))), el("th", {}, "base")));
  const list = () => body.replaceChildren(...DATA.settings
    .filter(row => !several || !box.checked || new Set(row.values.map(each => each.value)).size > 1)
    .map(row => el("tr", {}, el("td", { class: "key-name" }, row.key),
      ...row.values.map(each => el("td", each.where ? {} : { class: "same" }, each.value, el("small", {}, each.where))),
      el("td", { class: "same" }, row.base))));
  box.addEventListener("change", list);
  list();
}

function buildFacts() {
  $("facts").replaceChildren(el("h2", {}, "Provenance"));
  DATA.runs.forEach((run, index) => {
    const list = el("dl", {});
    for (const [name, value] of Object.entries(run.facts)) list.append(el("dt", {}, name), el("dd", {}, value));
    $("facts").append(el("details", DATA.runs.length === 1 ? { open: "" } : {},
      el("summary", {}, el("span", { class: "who", style: `--run:${colour(index)}` }, run.label)), list));
  });
  const thinned = DATA.runs.filter(run => run.thinned).map(run => `${run.label}: of many steps, the least and the greatest value is drawn`);
  $("foot").textContent = [readSamples ? "" : "One file, no network.", "Click a run to hide it; drag in a chart to zoom all, double-click to reset.", ...thinned,
                           `Made by rlctl ${DATA.version}.`].join(" ");
}

function foldable(section) {
  // Make a button of the title that folds the section; the board remembers it.
  const keeps = typeof BOARD === "object", title = section.querySelector("h2"), key = `fold:${section.id}`, button = el("button", { type: "button", class: "fold" }, title.textContent);
  const fold = folded => { section.classList.toggle("folded", folded); button.setAttribute("aria-expanded", String(!folded)); };
  section.fold = folded => { fold(folded); if (keeps) localStorage[folded ? "setItem" : "removeItem"](key, "1"); };
  button.addEventListener("click", () => section.fold(!section.classList.contains("folded")));
  title.replaceChildren(button);
  fold(Boolean(keeps && localStorage.getItem(key)));
}

function buildNav() {
  const parts = [...document.querySelectorAll("#view section")].filter(section => section.querySelector("h2") && !section.hidden);
  for (const section of parts) if (!section.querySelector("h2 button")) foldable(section);
  const links = [...$("toc").children].map(link => link.hash);
  if (links.join() === parts.map(section => `#${section.id}`).join()) return;
  $("toc").replaceChildren(...parts.map(section => {
    const link = el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent.replace("Settings that differ from the base", "Settings"));
    link.addEventListener("click", () => document.getElementById(section.id).fold(false));
    return link;
  }));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redraw();
}

function buildFigures() {
  plots.length = 0;
  $("search").replaceChildren();
  $("charts").replaceChildren();
  buildSearch();
  buildCharts();
  buildNav();
}

function showData(data) {
  DATA = data;
  document.title = DATA.title;
  $("title").textContent = DATA.title;
  $("view").hidden = false;
  view.seeds = DATA.seeds.some(group => group.runs.length > 2) ? "mean" : "";  // of two runs the interval is wide
  buildHead();
  buildSeeds();
  buildAlarms();
  buildEvents();
  buildFigures();
  buildSamples();
  buildSettings();
  buildFacts();
  document.body.classList.toggle("single", DATA.runs.length === 1);
  if (DATA.runs.length > 1 && !DATA.search) $("view").prepend($("charts"));  // a comparison begins with its curves
  if (DATA.runs.length && DATA.runs.every(run => !run.x.step.length)) $("cards").after($("logs"));  // what there is to read
  buildNav();
  const long = Math.max(0, ...DATA.runs.map(run => run.x.step.length)) > 100;
  $("smoothing").value = view.smoothing = long ? 0.6 : 0;
  redraw();
}

function showReport() {
  startControls();
  const data = JSON.parse($("content").textContent);
  $("over").textContent = `rlctl report · ${data.project} · ${data.made.replace("T", " ").replace("+00:00", " UTC")}`;
  showData(data);
}

function startControls() {
  $("axis").addEventListener("change", event => { view.axis = event.target.value; redraw(); });
  $("smoothing").addEventListener("input", event => { view.smoothing = Number(event.target.value); redraw(); });
  $("seeds").addEventListener("change", event => { view.seeds = event.target.value; noteSeeds(); redraw(); });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    sessionStorage.setItem("theme", document.documentElement.dataset.theme);
  });
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  setTheme(sessionStorage.getItem("theme") || (dark.matches ? "dark" : "light"));
}
