// Sweep results: parallel coordinates of all trials, and the value over each setting.
function buildSearch() {
  const search = DATA.search;
  if (!search || !search.trials.length) return;
  const grid = el("div", { class: "grid" }), valued = search.trials.filter(trial => trial.value !== null);
  const scale = { color: valued.map(trial => trial.value), colorscale: "Viridis", reversescale: search.mode === "min" };
  const axes = search.axes.map(key => axisOf(key, valued.map(trial => trial.params[key])));
  const unit = `${search.metric}, ${search.mode === "min" ? "lower" : "higher"} is better; also the colour`;
  if (valued.length > 1) {
    addPlot(grid, "Trials", el("p", {}, el("span", { class: "unit" }, unit)), () => [[{
      type: "parcoords", line: scale, labelfont: { color: ink("--ink") }, tickfont: { color: ink("--soft") },
      dimensions: [...axes.map(axis => ({ label: axis.label, values: axis.values, ...axis.ticks })),
                   { label: "value", values: valued.map(trial => trial.value) }],
    }], { ...layout({}, ""), margin: { l: 60, r: 40, t: 50, b: 20 }, shapes: [] }], true);
    grid.lastChild.classList.add("broad");
  }
  axes.forEach((axis, index) => addPlot(grid, axis.label, el("p", {}, el("span", { class: "unit" }, search.axes[index])), () => {
    const made = { ...layout({}, axis.label), shapes: [], hovermode: "closest" };
    made.xaxis = { ...made.xaxis, range: undefined, dtick: undefined, type: axis.log ? "log" : axis.words ? "category" : "linear", hoverformat: ".4~g" };
    return [[{ type: "scatter", mode: "markers", x: axis.raw, y: valued.map(trial => trial.value), marker: { ...scale, size: 9, line: { width: 1, color: ink("--line") } },
               text: valued.map(trial => `trial ${trial.number}, ${trial.state}`), hovertemplate: "%{text}<br>%{x}<br>%{y:.4~g}<extra></extra>" }], made];
  }, true));
  const note = Object.entries(search.importances).map(([key, share]) => `${key.split(".").pop()} ${Math.round(share * 100)} %`).join(", ");
  const states = new Map();
  for (const trial of search.trials) states.set(trial.state, (states.get(trial.state) || 0) + 1);
  const words = [...states].map(([state, count]) => `${count} ${state}`).join(", ");
  $("search").append(el("h2", {}, "Search"), el("p", { class: "note" }, `${search.trials.length} trials: ${words}.`,
    note ? ` Importance of the settings (PED-ANOVA): ${note}.` : ""), grid);
  $("search").hidden = false;
}

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
