"use strict";
// Sweep results: parallel coordinates of all trials, and the value over each setting.
function buildSearch() {
  const search = DATA.search;
  $("search").hidden = true;
  if (!search || !search.trials.length) return;
  const grid = el("div", { class: "grid" }), valued = search.trials.filter(trial => trial.value !== null);
  const scale = { color: valued.map(trial => trial.value), colorscale: "Viridis", reversescale: search.mode === "min" };
  const axes = search.axes.map(key => axisOf(key, valued.map(trial => trial.params[key])));
  const unit = `${search.metric}, ${search.mode === "min" ? "lower" : "higher"} is better; also the colour`;
  if (search.trials.length > 1) {
    addPlot(grid, "Trials", el("p", {}, el("span", { class: "unit" }, `${unit}; dotted: no final value`)), () => parallel(search), true,
            `parallel coordinates of ${search.trials.length} trials over ${search.axes.join(", ")} and the value; the table below has the same trials`);
    grid.lastChild.classList.add("broad");
    grid.append(trialTable(search, plots[plots.length - 1]));
  }
  axes.forEach((axis, index) => addPlot(grid, axis.label, el("p", {}, el("span", { class: "unit" }, search.axes[index])), () => {
    const made = { ...layout({}, axis.label), shapes: [], hovermode: "closest" };
    made.xaxis = { ...made.xaxis, range: undefined, dtick: undefined, type: axis.log ? "log" : axis.words ? "category" : "linear", hoverformat: ".4~g" };
    return [[{ type: "scatter", mode: "markers", x: axis.raw, y: valued.map(trial => trial.value), marker: { ...scale, size: 9, line: { width: 1, color: ink("--line") } },
               text: valued.map(trial => `trial ${trial.number}, ${trial.state}`), hovertemplate: "%{text}<br>%{x}<br>%{y:.4~g}<extra></extra>" }], made];
  }, true));
  const shares = Object.entries(search.importances).sort(([, a], [, b]) => b - a);
  if (shares.length) addPlot(grid, "Importance", el("p", {}, el("span", { class: "unit" }, "share of the variation in the best quarter of the trials (PED-ANOVA)")), () => {
    const made = { ...layout({}, ""), shapes: [], hovermode: "closest", margin: { l: 110, r: 10, t: 8, b: 36 } };
    made.xaxis = { ...made.xaxis, range: [0, 1], dtick: undefined, tickformat: ".0%", hoverformat: ".1%" };
    made.yaxis = { ...made.yaxis, tickformat: "", type: "category", autorange: "reversed" };
    return [[{ type: "bar", orientation: "h", x: shares.map(([, share]) => share), y: shares.map(([key]) => hoverText(key.split(".").pop())), marker: { color: RUN_COLOURS[0] } }], made];
  }, true, `importance of the settings: ${shares.map(([key, share]) => `${key.split(".").pop()} ${Math.round(share * 100)} %`).join(", ")}`);
  const note = Object.entries(search.importances).map(([key, share]) => `${key.split(".").pop()} ${Math.round(share * 100)} %`).join(", ");
  const states = new Map();
  for (const trial of search.trials) states.set(trial.state, (states.get(trial.state) || 0) + 1);
  const words = [...states].map(([state, count]) => `${count} ${state}`).join(", ");
  $("search").append(el("h2", {}, "Search"), el("p", { class: "note" }, `${search.trials.length} trials: ${words}.`,
    note ? ` Importance of the settings (PED-ANOVA): ${note}.` : ""), grid);
  $("search").hidden = false;
}

function trialTable(search, plot) {
  // The trials as text: a button of the keyboard's reach emphasises the trial's line.
  const button = trial => {
    const made = el("button", { type: "button", class: "sorter", "aria-pressed": String(view.trial === trial.number) }, `trial ${trial.number}`);
    made.addEventListener("click", () => {
      view.trial = view.trial === trial.number ? null : trial.number;
      for (const each of body.querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === made && view.trial !== null));
      plot.draw();
    });
    return made;
  };
  const rounded = value => value === null ? "-" : Number(value.toPrecision(4)).toString();
  const seeded = search.trials.some(trial => trial.low !== null);
  const interval = trial => trial.low === null ? "-" : `${rounded(trial.low)} to ${rounded(trial.high)}`;
  const figures = trial => [rounded(trial.value), ...(seeded ? [interval(trial), String(trial.n)] : [])];
  const lower = search.mode === "min" ? 1 : -1, unfinished = trial => Number(trial.state !== "finished" || trial.value === null);
  const ranked = [...search.trials].sort((a, b) => unfinished(a) - unfinished(b) || lower * ((a.value ?? 0) - (b.value ?? 0)) || a.number - b.number);
  const body = el("tbody", {}, ...ranked.map(trial => el("tr", {}, el("th", { scope: "row" }, button(trial)), el("td", {}, trial.state),
    ...search.axes.map(key => el("td", {}, trial.params[key] ?? "-")), ...figures(trial).map(text => el("td", {}, text)))));
  const titles = ["trial", "state", ...search.axes.map(key => key.split(".").pop()), ...(seeded ? ["mean", "95 % interval", "n"] : ["value"])];
  const head = el("thead", {}, el("tr", {}, ...titles.map(text => el("th", { scope: "col" }, text))));
  return el("details", { class: "broad" }, el("summary", {}, "Trials as a table; a trial's button emphasises its line"),
    el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table of trials" }, el("table", {}, head, body)));
}

function parallel(search) {
  // A line per trial over one vertical axis per setting, each scaled to 0 … 1, and the value last.
  const trials = search.trials, numbers = trials.map(trial => trial.value).filter(value => value !== null);
  const axes = [...search.axes.map(key => axisOf(key, trials.map(trial => trial.params[key] ?? ""))),
                { label: "value", values: trials.map(trial => trial.value), raw: trials.map(trial => trial.value), ticks: {} }];
  const spans = axes.map(axis => { const known = axis.values.filter(Number.isFinite); return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1]; });
  const place = (value, [low, high]) => value === null ? null : high > low ? (value - low) / (high - low) : 0.5;
  const [worst, best] = search.mode === "min" ? [Math.max(...numbers), Math.min(...numbers)] : [Math.min(...numbers), Math.max(...numbers)];
  const shade = value => value === null ? ink("--soft") : `hsl(${Math.round(260 - 200 * (best === worst ? 1 : (value - worst) / (best - worst)))} 65% 48%)`;
  const traces = trials.map((trial, at) => ({
    type: "scatter", mode: "lines+markers", x: axes.map((_, index) => index), y: axes.map((axis, index) => place(axis.values[at], spans[index])),
    opacity: [undefined, null, trial.number].includes(view.trial) ? 1 : 0.15,
    line: { color: shade(trial.value), width: view.trial === trial.number ? 5 : trial.state === "finished" ? 2 : 1, dash: trial.state === "finished" ? "solid" : "dot" }, marker: { size: 5 },
    text: axes.map(axis => `trial ${trial.number}, ${trial.state}<br>${hoverText(axis.label)}: ${hoverText(axis.raw[at])}`), hovertemplate: "%{text}<extra></extra>",
  }));
  const ends = axes.flatMap((axis, index) => tickTexts(axis, spans[index]).map(([y, text]) => ({ x: index, y, text, xanchor: "left", xshift: 4, showarrow: false, bgcolor: ink("--sheet") })));
  const made = { ...layout({}, ""), shapes: axes.map((_, index) => ({ type: "line", x0: index, x1: index, y0: 0, y1: 1, line: { width: 1, color: ink("--line") } })), hovermode: "closest" };
  made.annotations = ends;
  made.xaxis = { ...made.xaxis, range: [-0.15, axes.length - 0.6], dtick: undefined, tickvals: axes.map((_, index) => index), ticktext: axes.map(axis => hoverText(axis.label)) };
  made.yaxis = { ...made.yaxis, range: [-0.06, 1.06], showticklabels: false, showgrid: false };
  return [traces, made];
}

function tickTexts(axis, [low, high]) {
  if (axis.words) return axis.ticks.ticktext.map((text, at) => [high > low ? (at - low) / (high - low) : 0.5, hoverText(text)]);
  const shown = value => hoverText(Number((axis.log ? 10 ** value : value).toPrecision(3)));
  return high > low ? [[0, shown(low)], [1, shown(high)]] : [[0.5, shown(low)]];
}

// Plotly reads a few tags in texts; those of runs are shown as they are.
const hoverText = value => String(value ?? "-").replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function axisOf(key, given) {
  const numbers = given.map(Number), words = numbers.some(Number.isNaN), label = key.split(".").pop();
  if (words) {
    const names = [...new Set(given)];
    return { label, words, raw: given, values: given.map(value => names.indexOf(value)), ticks: { tickvals: names.map((_, index) => index), ticktext: names } };
  }
  const log = Math.min(...numbers) > 0 && Math.max(...numbers) >= 50 * Math.min(...numbers);
  if (!log) return { label, raw: numbers, values: numbers, ticks: {} };
  const exponents = [];
  for (let at = Math.floor(Math.log10(Math.min(...numbers))); at <= Math.ceil(Math.log10(Math.max(...numbers))); at++) exponents.push(at);
  return { label, log, raw: numbers, values: numbers.map(Math.log10), ticks: { tickvals: exponents, ticktext: exponents.map(at => `1e${at}`) } };
}
