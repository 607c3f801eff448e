"use strict";
// Changes of the runs on the page while they go on: new rows, states, alarms, processes and logs.
const MOST_POINTS = 6000;  // of a curve before it is thinned again
const REDRAW_MS = 400, SYSTEM_MS = 2000, LOGS_MS = 3000, RETRY_MS = 2000, SWEEP_MS = 5000;
const SEEDS_MS = 3000;
let redrawing = null, averaging = null;
const usedBefore = new Map();  // CPU seconds and time of the last reading by process

function startLive() {
  const address = () => {
    const params = new URLSearchParams();
    for (const run of DATA.runs) for (const [name, value] of [["run", run.key], ["epoch", run.live.epoch], ["rows", run.live.rows]]) params.append(name, value);
    return `/api/stream?${params}`;
  };
  if (DATA.runs.length) listenTo(address, update => attempt(() => take(update)));
  startLogs();
  const system = () => attempt(showSystem).finally(() => setTimeout(system, SYSTEM_MS));
  system();
}

function listenTo(address, take) {
  // A browser has six connections to a server: a page that is not seen keeps none.
  let stream = null;
  const change = () => {
    if (document.hidden === (stream === null)) return;
    if (document.hidden) { stream.close(); stream = null; return; }
    stream = new EventSource(address());
    stream.addEventListener("message", event => take(JSON.parse(event.data)));
    stream.addEventListener("error", () => {  // its address has the number of rows
      if (stream && stream.readyState !== EventSource.OPEN) { stream.close(); stream = null; setTimeout(change, RETRY_MS); }
    });
  };
  document.addEventListener("visibilitychange", change);
  change();
}

async function followSweep(sweep) {
  while (true) {
    await new Promise(resolve => setTimeout(resolve, SWEEP_MS));
    if (document.hidden) continue;
    const { state, search, num_runs } = await api("trials", { sweep });
    if (num_runs !== DATA.runs.length) return location.reload();  // another run has begun
    if (JSON.stringify(search) !== JSON.stringify(DATA.search)) { DATA.search = search; buildFigures(); }
    if (state !== "running") return say(`${DATA.title} is ${state}`);
  }
}

async function take(update) {
  if (update.error) return say(update.error, true);
  const index = DATA.runs.findIndex(run => run.key === update.key), run = DATA.runs[index];
  if (!run) return;
  if (update.state !== run.state) say(`${run.label} is ${update.state}`);
  for (const name of ["state", "failure", "exit_code", "total_steps", "summary", "tags", "note", "alarms", "events"]) run[name] = update[name];
  run.checkpoints = update.checkpoints || run.checkpoints;
  addSampleSteps(run, update.steps);
  if (update.new && !update.new.reset && update.new.first === run.live.rows) append(run, update.new);
  else if (update.new && (update.new.reset || update.new.first > run.live.rows)) return location.reload();
  if (run.x.step.length > MOST_POINTS) await thin(run);
  if (update.new && DATA.seeds.some(group => group.runs.includes(index))) averaging ??= setTimeout(() => attempt(average), SEEDS_MS);
  fillCard(run, index);
  buildAlarms();
  buildEvents();
  buildNav();
  redrawing ??= setTimeout(() => { redrawing = null; redraw(); }, REDRAW_MS);
}

async function average() {
  averaging = null;
  DATA.seeds = await api("seeds", { run: DATA.runs.map(run => run.key) });
  noteSeeds();
  redraw();
}

function append(run, { x, metrics, rows, epoch }) {
  const offset = run.x.step.length, fresh = Object.keys(metrics).some(name => !(name in run.metrics));
  for (const axis of Object.keys(x)) run.x[axis].push(...x[axis]);
  for (const [name, { at, y }] of Object.entries(metrics)) {
    const curve = run.metrics[name] ??= { at: [], y: [] };
    curve.at.push(...at.map(place => place + offset));
    curve.y.push(...y);
  }
  run.live = { rows, epoch };
  if (fresh) buildFigures();  // a chart for a metric that no run had
}

async function thin(run) {
  const { runs: [fresh] } = await api("view", { run: run.key });
  if (fresh.live.epoch !== run.live.epoch) return location.reload();
  Object.assign(run, { x: fresh.x, metrics: fresh.metrics, thinned: fresh.thinned, live: fresh.live });
}

async function showSystem() {
  const active = DATA.runs.filter(isActive);
  $("system").hidden = !active.length;
  buildNav();
  if (!active.length || document.hidden) return;
  const found = await Promise.all(active.map(run => api("system", { run: run.key }).then(use => [run, use])));
  const problems = found.filter(([, use]) => use.problem).map(([run, use]) => `${run.label}: ${use.problem}`);
  $("system").querySelector("p").textContent = problems.join("; ") || "CPU since the last reading (100 % is one core), resident memory";
  fillTable("system", ["run", "process", "pid", "CPU", "memory", "GPU memory", "threads"], found.flatMap(([run, use]) => use.processes.map(each => {
    const now = performance.now(), [seconds, then] = usedBefore.get(each.pid) || [0, now - 1000 * each.age_s];
    usedBefore.set(each.pid, [each.cpu_s, now]);
    const share = now > then ? 100000 * (each.cpu_s - seconds) / (now - then) : 0;
    return [run.label, each.name, String(each.pid), `${Math.round(share)} %`, inBytes(each.bytes), each.gpu_bytes === null ? "-" : inBytes(each.gpu_bytes), String(each.threads)];
  })));
}

function startLogs() {
  $("logs").hidden = !DATA.runs.length;
  $("log-run").replaceChildren(...DATA.runs.map((run, index) => el("option", { value: index }, run.label)));
  $("log-run").parentElement.hidden = DATA.runs.length < 2;
  const read = async () => {
    const run = DATA.runs[$("log-run").value];
    const found = await api("logs", { run: run.key, process: $("log-process").value });
    const names = found.processes, shown = [...$("log-process").options].map(option => option.value);
    if (names.join() !== shown.join()) $("log-process").replaceChildren(...names.map(name => el("option", { value: name }, name)));
    if (found.process) $("log-process").value = found.process;
    $("log-process").parentElement.hidden = names.length < 2;
    $("log-note").textContent = found.problem || (found.lines.length ? `the end of the log, ${found.lines.length} lines` : "the log is empty");
    const lines = $("log-lines"), text = found.lines.join("\n");
    lines.hidden = !text;
    if (text === lines.textContent) return;
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 20;
    lines.textContent = text;
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  };
  $("log-run").onchange = $("log-process").onchange = () => attempt(read);
  const again = () => {
    const due = DATA.runs.length && !document.hidden && isActive(DATA.runs[$("log-run").value]);
    (due ? attempt(read) : Promise.resolve()).finally(() => setTimeout(again, LOGS_MS));
  };
  if (DATA.runs.length) attempt(read).finally(again);
}
