"use strict";
// Timeline of runs that train beside generation: one bar for the trainer and one for the engines.
const TIMELINE_STEPS = 30;
const POOLS = [  // metric with the share of idle time, pool, and work
  ["async/trainer_idle", "trainer", "learn", "wait", "#2a9d6f"],
  ["async/engines_idle", "engines", "generate", "idle", "#3b7dd8"],
];
const IDLE = "#b9bdc6";

function valuesByPlace(run, name) {
  const curve = run.metrics[name] || { at: [], y: [] };
  return new Map(curve.at.map((place, index) => [place, curve.y[index]]));
}

function stepsOf(run) {
  // Return the last steps with shares of both pools: number, start and length in seconds, shares.
  const [lengths, tests, saves] = ["step", "testing", "save_checkpoint"].map(phase => valuesByPlace(run, `timing_s/${phase}`));
  const shares = POOLS.map(([metric]) => valuesByPlace(run, metric));
  const places = [...lengths.keys()].filter(place => [lengths, ...shares].every(each => Number.isFinite(each.get(place))));
  const steps = places.slice(-TIMELINE_STEPS).map(place => {
    const length = lengths.get(place), later = (tests.get(place) || 0) + (saves.get(place) || 0);
    return { number: run.x.step[place], start: 3600 * run.x.hours[place] - later - length, length, idle: shares.map(each => each.get(place)) };
  });
  const first = steps.length ? steps[0].start : 0;
  return steps.map(step => ({ ...step, start: step.start - first }));
}

function addTimeline(grid, run, index) {
  const steps = stepsOf(run);
  if (!steps.length) return;
  const total = steps.reduce((sum, step) => sum + step.length, 0);
  const percent = POOLS.map((_, pool) => Math.round(100 * steps.reduce((sum, step) => sum + step.length * step.idle[pool], 0) / total));
  const range = steps.length > 1 ? `steps ${steps[0].number} to ${steps[steps.length - 1].number}` : `step ${steps[0].number}`;
  const said = `${range}: the trainer waits ${percent[0]} % of the time, the engines ${percent[1]} %`;
  const subtitle = el("p", {}, `seconds, ${said}`);
  for (const [word, fill] of [...POOLS.map(([, , work, , fill]) => [work, fill]), ["wait", IDLE]]) {
    subtitle.append(" ", el("span", { class: "word" }, el("span", { class: "swatch", style: `background:${fill}` }), word));
  }
  const title = DATA.runs.length > 1 ? `Both pools, ${run.label}` : "Both pools";
  addPlot(grid, title, subtitle, () => {
    const made = { ...layout({}, "seconds"), hovermode: "closest", shapes: [] };
    made.margin = { ...made.margin, l: 60 };
    made.xaxis = { ...made.xaxis, range: undefined, dtick: undefined, hoverformat: ".4~g" };
    made.yaxis = { ...made.yaxis, autorange: "reversed", type: "category", categoryarray: POOLS.map(([, pool]) => pool) };
    const drawn = view.hidden.has(index) ? [] : POOLS.flatMap(([, pool, work, rest, fill], place) => [
      bar(pool, work, fill, steps, step => [step.start, step.length * (1 - step.idle[place])]),
      bar(pool, rest, IDLE, steps, step => [step.start + step.length * (1 - step.idle[place]), step.length * step.idle[place]]),
    ]);
    return [drawn, made];
  }, true, `timeline of the trainer and the rollout engines, ${run.label}, ${said}`);
}

function bar(pool, word, fill, steps, extentOf) {
  const spans = steps.map(extentOf);
  return { type: "bar", orientation: "h", name: word, y: spans.map(() => pool), base: spans.map(([start]) => start), x: spans.map(([, length]) => length),
           marker: { color: fill, line: { width: 1, color: ink("--sheet") } },
           text: steps.map(step => `step ${step.number}`), textposition: "none", hovertemplate: `%{text}: ${word} %{x:.3~g} s<extra></extra>` };
}
