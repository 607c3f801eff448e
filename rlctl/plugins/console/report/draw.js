"use strict";
// Drawing of charts. `DATA` is the content of a report; the board adds rows to it while runs go on.
let DATA = { runs: [], seeds: [], settings: [] };
const $ = id => document.getElementById(id);
const view = { axis: "step", smoothing: 0, hidden: new Set(), seeds: "" };
const AXES = { step: "step", hours: "hours of training", tokens: "tokens" };
const plots = [];  // { element, alone, draw, ready, stale }
let linking = false;
let lazy = null;  // IntersectionObserver of the board, which draws only what is near the screen

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

function outline(lines) {
  // Curves without axes as a plain SVG: in lists, and in charts until plotly has loaded.
  const ends = axis => lines.flatMap(line => line[axis]).filter(Number.isFinite).reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const [x, y] = [ends("x"), ends("y")], place = (value, [low, high]) => (high > low ? 100 * (value - low) / (high - low) : 50).toFixed(2);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["viewBox", "-1 -4 102 108"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"], ["class", "outline"]]) svg.setAttribute(name, value);
  for (const line of lines) {
    const curve = document.createElementNS(svg.namespaceURI, "polyline");
    const known = line.x.map((at, index) => [at, line.y[index]]).filter(([at, value]) => Number.isFinite(at) && Number.isFinite(value));
    curve.setAttribute("points", known.map(([at, value]) => `${place(at, x)},${100 - place(value, y)}`).join(" "));
    curve.setAttribute("stroke", line.colour);
    svg.append(curve);
  }
  return svg;
}

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

function seedTraces(chart) {
  // Mean over the seeds of each group of which a run is shown, and its interval as a band.
  return DATA.seeds.filter(group => group.runs.some(run => !view.hidden.has(run))).flatMap(group => linesOf(chart, group).flatMap(([name, word, dash]) => {
    const band = group.metrics[name], tint = colour(group.runs[0]), number = numbersOf(band.n);
    const { x, y: mean } = points(group, band), soft = values => view.smoothing && !chart.points ? smooth(values, view.smoothing) : values;
    const [low, high] = [soft(band.low), soft(band.high)], said = `${word ? `${word} ` : ""}${group.label}, mean of ${number}`, format = chart.format ? ".1%" : ".4~g";
    const area = { type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], fill: "toself", fillcolor: tint, opacity: 0.2,
                   line: { width: 0, color: tint }, hoverinfo: "skip" };
    return [area, { type: "scatter", x, y: soft(mean), customdata: x.map((_, at) => [low[at], high[at], band.n[at]]), name: hoverText(said), meta: said,
                    hovertemplate: `%{y:${format}}, 95 % interval %{customdata[0]:${format}} to %{customdata[1]:${format}}, n = %{customdata[2]}`,
                    mode: chart.points ? "lines+markers" : x.length > 1 ? "lines" : "markers", marker: { color: tint, size: 6 }, line: { color: tint, width: 2.5, dash: dash || "solid" } }];
  }));
}

const numbersOf = counts => ((low, high) => `n = ${low === high ? low : `${low} to ${high}`} seeds`)(Math.min(...counts), Math.max(...counts));

function traces(chart) {
  const grouped = new Set(view.seeds ? DATA.seeds.flatMap(group => group.runs) : []);
  const alone = shown().filter(([, index]) => !grouped.has(index));
  return [...(grouped.size ? seedTraces(chart) : []), ...runTraces(chart, alone)];
}

function runTraces(chart, runs) {
  return runs.flatMap(([run, index]) => linesOf(chart, run).flatMap(([name, word, dash]) => {
    const raw = points(run, run.metrics[name]), said = (word ? `${word} ` : "") + run.label;
    const base = { type: "scatter", x: raw.x, line: { color: colour(index), width: 2, dash: dash || "solid" }, name: hoverText(said), meta: said,
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

const EVENT_STYLE = {  // dash and colour of events on the curves; checkpoints are ticks at the axis
  resume: ["dash", "--soft"], oom_retry: ["dot", "--bad"], skipped_update: ["dot", "--bad"], checkpoint_failed: ["dot", "--bad"], checkpoint: ["solid", "--soft"],
};

function eventLines() {
  return shown().flatMap(([run]) => (run.events || []).filter(event => event.kind in EVENT_STYLE).map(event => {
    const x = run.x[view.axis], place = run.x.step.findIndex(each => each >= event.step), [dash, name] = EVENT_STYLE[event.kind];
    const at = x[place < 0 ? x.length - 1 : place];
    return { type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: event.kind === "checkpoint" ? 0.05 : 1, layer: "below", line: { width: 1, dash, color: ink(name) } };
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
    shapes: [...alarmBands(chart), ...eventLines()],
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
  const words = el("p", { class: "unseen" });
  grid.append(el("div", { class: "chart" }, el("h3", {}, title), subtitle, plot, words));
  const made = { element: plot, alone, ready: !lazy, stale: false, draw: () => {
    made.stale = !made.ready;
    if (made.stale) return null;
    const [drawn, shape] = draw();
    words.textContent = alone ? "" : inWords(drawn);
    const first = !plot.data;
    if (!window.Plotly) return plot.replaceChildren(outline(drawn.filter(trace => trace.type === "scatter").map(({ x, y, line }) => ({ x, y, colour: line?.color || "currentColor" }))));
    if (first) plot.replaceChildren();
    return Plotly.react(plot, drawn, shape, { displayModeBar: false, responsive: true, doubleClick: "reset" }).then(() => { if (first) linkPlot(made); });
  } };
  plots.push(made);
  if (lazy) lazy.observe(plot);
}

function drawNearScreen() {
  // Draw a chart when it comes near the screen: a page has dozens of them.
  lazy = new IntersectionObserver(entries => {
    for (const entry of entries) {
      const plot = plots.find(each => each.element === entry.target);
      if (!plot) continue;
      plot.ready = entry.isIntersecting;
      if (plot.ready && (plot.stale || !plot.element.data)) plot.draw();
    }
  }, { rootMargin: "300px" });
}

function inWords(drawn) {
  // Describe the curves for screen readers.
  const number = value => Number(value.toPrecision(4)).toString();
  return drawn.filter(trace => trace.hoverinfo !== "skip").flatMap(trace => {
    const known = trace.y.map((value, at) => [trace.x[at], value]).filter(([, value]) => value !== null);
    if (!known.length) return [];
    const [[start, first], [end, last]] = [known[0], known[known.length - 1]];
    return [`${trace.meta ?? trace.name}: ${number(first)} at ${number(start)}, ${number(last)} at ${number(end)} ${AXES[view.axis]}.`];
  }).join(" ");
}

function subtitleOf(chart) {
  const text = el("p", {}, chart.unit ? el("span", { class: "unit" }, chart.unit) : null), words = new Map();
  for (const run of DATA.runs) for (const [, word, dash] of linesOf(chart, run)) if (word) words.set(word, dash);
  if (words.size > 1) for (const [word, dash] of words) text.append(el("span", { class: "word" }, el("span", { class: `key ${dash}` }), word));
  return text;
}

function addCharts(grid, charts) {
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
}

function buildCharts() {
  for (const [name, charts] of SECTIONS) {
    const grid = el("div", { class: "grid" });
    addCharts(grid, charts);
    if (name === "Speed and memory") {
      DATA.runs.forEach((run, index) => addPhases(grid, run, index));
      DATA.runs.forEach((run, index) => addTimeline(grid, run, index));
    }
    if (grid.children.length) $("charts").append(el("section", { id: name.split(" ")[0].toLowerCase() }, el("h2", {}, name), grid));
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
  $("charts").append(el("section", { id: "metrics" }, el("h2", {}, "All metrics"), grid));
}

function redraw() {
  for (const plot of plots) plot.draw();
}

function linkPlot(made) {
  // Zooming one time chart zooms all of them.
  if (made.alone) return;
  made.element.on("plotly_relayout", change => {
    if (linking) return;
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]], whole = change["xaxis.autorange"];
    if (range[0] === undefined && !whole) return;
    linking = true;
    const others = plots.filter(plot => !plot.alone && plot !== made && plot.element.data);
    Promise.all(others.map(plot => Plotly.relayout(plot.element, { "xaxis.range": whole ? extent() : range })))
      .finally(() => { linking = false; });
  });
}
