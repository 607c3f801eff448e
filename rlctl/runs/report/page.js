const DATA = JSON.parse(document.getElementById("content").textContent);
const $ = id => document.getElementById(id);
const view = { axis: "step", smoothing: 0, hidden: new Set() };
const AXES = { step: "step", hours: "hours of training", tokens: "tokens" };
const PAGE = 20;
const plots = [];  // { element, draw }
let linking = false;

// Text of models and users is only inserted as text nodes.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null));
  return made;
}
// Further runs get hues a golden angle apart.
const colour = run => RUN_COLOURS[run] || `hsl(${Math.round(run * 137.5) % 360} 55% 50%)`;
const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = () => DATA.runs.map((run, index) => [run, index]).filter(([, index]) => !view.hidden.has(index));

function smooth(values, weight) {
  // Bias-corrected exponential moving average.
  let mean = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function points(run, curve) {
  const x = run.x[view.axis];
  return { x: curve.at.map(place => x[place]), y: curve.y };
}

function linesOf(chart, run) {
  if (!chart.pattern) {
    return chart.lines.map(([names, word, dash]) => [names.find(name => name in run.metrics), word, dash]).filter(([name]) => name);
  }
  const names = Object.keys(run.metrics).filter(name => chart.pattern.test(name));
  return names.map((name, index) => [name, names.length > 1 ? name.replace(chart.strip, "") : null, ["solid", "dot", "dash"][index % 3]]);
}

function traces(chart) {
  return shown().flatMap(([run, index]) => linesOf(chart, run).flatMap(([name, word, dash]) => {
    const raw = points(run, run.metrics[name]), hover = (word ? `${word} ` : "") + run.label;
    const base = { type: "scatter", x: raw.x, line: { color: colour(index), width: 2, dash: dash || "solid" }, name: hover,
                   mode: chart.points ? "lines+markers" : raw.x.length > 1 ? "lines" : "markers", marker: { color: colour(index), size: 6 } };
    if (!view.smoothing || chart.points) return [{ ...base, y: raw.y }];
    return [{ ...base, y: raw.y, opacity: 0.22, hoverinfo: "skip" }, { ...base, y: smooth(raw.y, view.smoothing) }];
  }));
}

function alarmBands(chart) {
  // Each alarm is a band from its start to its end, in the chart of its metric.
  return shown().flatMap(([run]) => run.alarms.filter(alarm => (chart.alarms || []).includes(alarm.name)).map(alarm => {
    const x = run.x[view.axis], at = step => x[Math.max(0, run.x.step.findIndex(each => each >= step))];
    const end = alarm.over === null ? x[x.length - 1] : at(alarm.over);
    return { type: "rect", xref: "x", yref: "paper", x0: at(alarm.step), x1: end, y0: 0, y1: 1, layer: "below",
             fillcolor: ink("--bad"), opacity: 0.12, line: { width: 1, color: ink("--bad") } };
  }));
}

function extent() {
  // All charts share one x range.
  const ends = shown().flatMap(([run]) => run.x[view.axis].length ? [run.x[view.axis][0], run.x[view.axis][run.x[view.axis].length - 1]] : []);
  if (!ends.length) return undefined;
  const [first, last] = [Math.min(...ends), Math.max(...ends)], room = (last - first || 1) * 0.015;
  return [first - room, last + room];
}

function layout(chart, title) {
  const axis = { gridcolor: ink("--grid"), linecolor: ink("--line"), zerolinecolor: ink("--line") };
  return {
    margin: { l: 46, r: 10, t: 8, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: "system-ui, sans-serif", size: 11, color: ink("--soft") }, hovermode: "x unified", barmode: "stack", bargap: 0,
    hoverlabel: { bgcolor: ink("--sheet"), bordercolor: ink("--line"), font: { color: ink("--ink") } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, range: extent(), title: { text: title, standoff: 4 }, zeroline: false, showgrid: false, hoverformat: view.axis === "hours" ? ".2f" : ",",
      ...(view.axis === "step" && extent()?.[1] <= 10 ? { dtick: 1 } : {}) },
    yaxis: { ...axis, tickformat: chart.format || "", type: chart.log ? "log" : "linear",
             hoverformat: chart.format ? ".1%" : ".4~g", exponentformat: "e", rangemode: chart.zero ? "tozero" : "normal" },
    shapes: alarmBands(chart),
  };
}

function fitted(chart, drawn, made) {
  // Clip outliers below `floor`, and give a constant curve a range.
  const values = drawn.flatMap(trace => trace.y);
  if (chart.floor !== undefined && values.some(value => value < chart.floor)) made.yaxis.range = [chart.floor, 1.05];
  if (values.length && values.every(value => value === values[0])) {
    const room = Math.abs(values[0]) * 0.1 || (made.yaxis.tickformat ? 0.1 : 1);
    made.yaxis.range = [chart.zero ? 0 : values[0] - room, values[0] + room];
  }
  if (chart.log && (values.some(value => value <= 0) || Math.max(...values) < 30 * Math.min(...values))) made.yaxis.type = "linear";
  if (made.yaxis.type === "log") made.yaxis.dtick = 1;
  return made;
}

function addPlot(grid, title, subtitle, draw, alone = false, label = `chart of ${title}`) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": label });
  grid.append(el("div", { class: "chart" }, el("h3", {}, title), subtitle, plot));
  plots.push({ element: plot, alone, draw: () => {
    const [drawn, made] = draw();
    return Plotly.react(plot, drawn, made, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  } });
}

function subtitleOf(chart) {
  const text = el("p", {}, chart.unit ? el("span", { class: "unit" }, chart.unit) : null), words = new Map();
  for (const run of DATA.runs) for (const [, word, dash] of linesOf(chart, run)) if (word) words.set(word, dash);
  if (words.size > 1) for (const [word, dash] of words) text.append(el("span", { class: "word" }, el("span", { class: `key ${dash}` }), word));
  return text;
}

function buildCharts() {
  for (const [name, charts] of SECTIONS) {
    const grid = el("div", { class: "grid" });
    for (const chart of charts) {
      if (!DATA.runs.some(run => linesOf(chart, run).length)) continue;
      if (chart.points && chart.pattern && DATA.runs.every(run => linesOf(chart, run).every(([name]) => /\/acc\//.test(name)))) {
        Object.assign(chart, { unit: "share of correct responses", format: PERCENT });
      }
      addPlot(grid, chart.title, subtitleOf(chart), () => {
        const drawn = traces(chart);
        return [drawn, fitted(chart, drawn, layout(chart, AXES[view.axis]))];
      });
    }
    if (name === "Speed and memory") {
      DATA.runs.forEach((run, index) => addPhases(grid, run, index));
      DATA.runs.forEach((run, index) => addTimeline(grid, run, index));
    }
    if (grid.children.length) $("charts").append(el("section", {}, el("h2", {}, name), grid));
  }
  const names = [...new Set(DATA.runs.flatMap(run => Object.keys(run.metrics)))].sort();
  if (names.length) addChooser(names);
}

function addPhases(grid, run, index) {
  const beside = "async/engines_idle" in run.metrics ? BESIDE_A_STEP : [];
  const present = PHASES.filter(([phase]) => `timing_s/${phase}` in run.metrics && !beside.includes(phase));
  if (!present.length) return;
  const subtitle = el("p", {}, "seconds of a step");
  for (const [, word, fill] of present) {
    subtitle.append(" ", el("span", { class: "word" }, el("span", { class: "swatch", style: `background:${fill}` }), word));
  }
  addPlot(grid, DATA.runs.length > 1 ? `Time by phase, ${run.label}` : "Time by phase", subtitle, () => {
    const drawn = view.hidden.has(index) ? [] : present.map(([phase, word, fill]) => (
      { type: "bar", ...points(run, run.metrics[`timing_s/${phase}`]), name: word, marker: { color: fill, line: { width: 0 } } }));
    return [drawn, layout({ zero: true }, AXES[view.axis])];
  });
}

function addChooser(names) {
  const select = el("select", { "aria-label": "metric" }, ...names.map(name => el("option", { value: name }, name)));
  select.value = names.includes("critic/rewards/mean") ? "critic/rewards/mean" : names[0];
  const grid = el("div", { class: "grid" });
  addPlot(grid, "Any metric", el("p", {}, select), () => {
    const chart = { lines: [[[select.value]]] };
    return [traces(chart), layout(chart, AXES[view.axis])];
  });
  const chooser = plots[plots.length - 1];
  select.addEventListener("change", chooser.draw);
  $("charts").append(el("section", {}, el("h2", {}, "All metrics"), grid));
}

function redraw() {
  for (const plot of plots) plot.draw();
}

function link() {
  // Zooming one time chart zooms all of them.
  const linked = plots.filter(plot => !plot.alone);
  for (const { element } of linked) element.on("plotly_relayout", change => {
    if (linking) return;
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]], whole = change["xaxis.autorange"];
    if (range[0] === undefined && !whole) return;
    linking = true;
    const others = linked.filter(plot => plot.element !== element);
    Promise.all(others.map(plot => Plotly.relayout(plot.element, { "xaxis.range": whole ? extent() : range })))
      .finally(() => { linking = false; });
  });
}

function buildHead() {
  $("over").textContent = `rlctl report · ${DATA.project} · ${DATA.made.replace("T", " ").replace("+00:00", " UTC")}`;
  DATA.runs.forEach((run, index) => {
    const chip = el("button", { class: "chip", type: "button", "aria-pressed": "true", style: `--run:${colour(index)}`, title: "Show or hide" },
                    el("span", {}, run.label));
    chip.addEventListener("click", () => {
      if (!view.hidden.delete(index)) view.hidden.add(index);
      chip.setAttribute("aria-pressed", String(!view.hidden.has(index)));
      $("cards").children[index].classList.toggle("off", view.hidden.has(index));
      redraw();
    });
    $("chips").append(chip);
    const { summary } = run, ringing = run.alarms.length;
    const card = el("article", { class: "card", style: `--run:${colour(index)}` },
      el("h3", {}, el("span", {}, run.label), el("span", { class: `badge ${run.state}` }, run.state)));
    if (summary.kind) {
      card.append(el("p", { class: "big" }, el("small", {}, `${summary.first} → `), summary.last), el("p", { class: "note" }, `${summary.kind}, ${summary.best}`));
    }
    const steps = `${summary.steps} steps · ${summary.time}` + (summary.tokens !== "0" ? ` · ${summary.tokens} tokens` : "");
    card.append(el("p", { class: "note" }, steps));
    if (ringing) card.append(el("p", { class: "note rings" }, `${ringing} alarm${ringing > 1 ? "s" : ""}`));
    $("cards").append(card);
  });
  $("chips").hidden = DATA.runs.length < 2;
}

function who(index) {
  return el("span", { class: "run", style: `--run:${colour(index)}` }, DATA.runs[index].label);
}

function buildAlarms() {
  const all = DATA.runs.flatMap((run, index) => run.alarms.map(alarm => [alarm, index])).sort(([a], [b]) => a.step - b.step);
  $("alarms").hidden = !all.length;
  const [head, body] = [$("alarms").querySelector("thead"), $("alarms").querySelector("tbody")];
  head.append(el("tr", {}, ...["step", "until", ...(DATA.runs.length > 1 ? ["run"] : []), "alarm", "suggestion"].map(text => el("th", {}, text))));
  for (const [alarm, index] of all) {
    body.append(el("tr", {}, el("td", {}, String(alarm.step)),
      alarm.over === null ? el("td", { class: "rings" }, "the end") : el("td", {}, String(alarm.over)),
      DATA.runs.length > 1 ? el("td", {}, who(index)) : null, el("td", {}, alarm.message), el("td", { class: "same" }, alarm.hint)));
  }
}

function marked(text, sought) {
  // Return the text as nodes, with matches of `sought` highlighted.
  const parts = [], lower = text.toLowerCase();
  let at = 0;
  for (let hit = sought ? lower.indexOf(sought) : -1; hit >= 0; hit = lower.indexOf(sought, at)) {
    parts.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + sought.length)));
    at = hit + sought.length;
  }
  return [...parts, text.slice(at)];
}

function sampleNode(sample, step, sought, asked) {
  // After another response to the same prompt (`asked`), show only the response.
  const parts = Object.entries(sample.components).map(([name, value]) => `${name} ${value}`).join("  ");
  const said = [`score ${sample.score}`, parts, `${sample.length} tokens`, `ended by ${sample.finish}`, sample.source, `step ${step}`,
                `prompt ${sample.index + 1}`];
  const head = el("div", { class: "head" }, el("b", {}, sample.right ? "right" : "wrong"),
                  ...said.filter(text => text).map(text => el("span", {}, text)));
  const node = el("article", { class: `sample ${sample.right ? "right" : "wrong"}` }, head);
  const texts = asked ? [] : [["prompt", sample.prompt], ["truth", sample.truth]];
  if (!sample.episode) texts.push(["response", sample.response]);
  for (const [name, text] of texts) node.append(el("h4", {}, name), el("pre", {}, ...marked(text, sought)));
  if (sample.episode) node.append(...episodeNodes(sample.episode, sought));
  return node;
}

function episodeNodes(episode, sought) {
  const turns = episode.turns.map(turn => el("div", { class: turn.trained ? "turn trained" : "turn" },
    el("h4", {}, turn.who, el("span", {}, turn.facts)), el("pre", {}, ...marked(turn.text, sought))));
  const error = episode.error ? el("pre", { class: "rings" }, ...marked(episode.error, sought)) : "";
  return [...turns, el("h4", {}, "outcome", el("span", {}, episode.ending)), error];
}

function textsOf({ prompt, truth, response, episode }) {
  const turns = episode ? [...episode.turns.map(turn => turn.text), episode.error || ""] : [];
  return [prompt, response, truth, ...turns];
}

function buildSamples() {
  const runs = DATA.runs.map((run, index) => [run, index]).filter(([run]) => run.samples.length);
  if (!runs.length) return;
  $("samples").hidden = false;
  $("sample-run").append(...runs.map(([run, index]) => el("option", { value: index }, run.label)));
  $("sample-run").parentElement.hidden = runs.length < 2;
  let limit = PAGE;
  const steps = () => {
    const { samples } = DATA.runs[$("sample-run").value];
    $("sample-step").replaceChildren(...samples.map(each => el("option", { value: each.step }, String(each.step))),
                                     el("option", { value: "all" }, "all, prompt by prompt"));
    $("sample-step").value = samples[samples.length - 1].step;
  };
  const list = () => {
    const { samples } = DATA.runs[$("sample-run").value], chosen = $("sample-step").value, verdict = $("sample-verdict").value;
    const sought = $("sample-text").value.trim().toLowerCase();
    const validations = samples.filter(each => chosen === "all" || String(each.step) === chosen);
    const every = validations.flatMap(each => each.shown.map(sample => [sample, each.step]));
    if (chosen === "all") every.sort(([a, s], [b, t]) => a.index - b.index || s - t);
    const found = every.filter(([sample]) => (!verdict || sample.right === (verdict === "right")) &&
      (!sought || textsOf(sample).some(text => text.toLowerCase().includes(sought))));
    const total = validations.reduce((sum, each) => sum + each.total, 0);
    $("sample-count").textContent = `${found.length} of ${every.length} responses` +
      (total > every.length ? `; the run has ${total.toLocaleString("en")}: rlctl show ${DATA.runs[$("sample-run").value].label} --samples` : "");
    $("sample-list").replaceChildren(...found.slice(0, limit).map(([sample, step], at) =>
      sampleNode(sample, step, sought, at > 0 && found[at - 1][0].index === sample.index)));
    $("sample-more").hidden = found.length <= limit;
  };
  const reset = () => { limit = PAGE; list(); };
  $("sample-run").addEventListener("change", () => { steps(); reset(); });
  for (const id of ["sample-step", "sample-verdict"]) $(id).addEventListener("change", reset);
  $("sample-text").addEventListener("input", reset);
  $("sample-more").addEventListener("click", () => { limit += PAGE; list(); });
  steps();
  list();
}

function buildSettings() {
  if (!DATA.settings.length) return;
  const several = DATA.runs.length > 1, [head, body] = [$("settings").querySelector("thead"), $("settings").querySelector("tbody")];
  const box = $("differing").querySelector("input");
  $("settings").hidden = false;
  $("differing").hidden = !several;
  head.append(el("tr", {}, el("th", {}, "key"), ...DATA.runs.map((_, index) => el("th", {}, who(index))), el("th", {}, "base")));
  const list = () => body.replaceChildren(...DATA.settings
    .filter(row => !several || !box.checked || new Set(row.values.map(each => each.value)).size > 1)
    .map(row => el("tr", {}, el("td", { class: "key-name" }, row.key),
      ...row.values.map(each => el("td", each.where ? {} : { class: "same" }, each.value, el("small", {}, each.where))),
      el("td", { class: "same" }, row.base))));
  box.addEventListener("change", list);
  list();
}

function buildFacts() {
  DATA.runs.forEach((run, index) => {
    const list = el("dl", {});
    for (const [name, value] of Object.entries(run.facts)) list.append(el("dt", {}, name), el("dd", {}, value));
    $("facts").append(el("details", DATA.runs.length === 1 ? { open: "" } : {},
      el("summary", {}, el("span", { class: "who", style: `--run:${colour(index)}` }, run.label)), list));
  });
  const thinned = DATA.runs.filter(run => run.thinned).map(run => `${run.label}: of many steps, the least and the greatest value is drawn`);
  $("foot").textContent = ["One file, no network. Click a run to hide it; drag in a chart to zoom all, double-click to reset.", ...thinned,
                           `Made by rlctl ${DATA.version}.`].join(" ");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redraw();
}

buildHead();
buildAlarms();
buildSearch();
buildCharts();
buildSamples();
buildSettings();
buildFacts();
const long = Math.max(...DATA.runs.map(run => run.x.step.length)) > 100;
$("smoothing").value = view.smoothing = long ? 0.6 : 0;
$("axis").addEventListener("change", event => { view.axis = event.target.value; redraw(); });
$("smoothing").addEventListener("input", event => { view.smoothing = Number(event.target.value); redraw(); });
const dark = matchMedia("(prefers-color-scheme: dark)");
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
setTheme(dark.matches ? "dark" : "light");
link();
