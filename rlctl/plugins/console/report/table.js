"use strict";
// Table of runs with the filters of `rlctl runs`, and the table of sweeps.
const STATES = ["starting", "running", "finished", "failed", "stopped", "lost", "broken"];
// Title, key for sorting, cell and class of each column. A column without any cell is left out.
const COLUMNS = [
  ["run", "name", row => el("a", { href: `/?run=${encodeURIComponent(row.key)}` }, row.key)],
  ["state", "state", row => el("span", { class: `badge ${row.state}` }, row.state)],
  ["cause", "failure", row => causeOf({ ...row, failure: row.failure || { message: row.problem } }), "long rings"],
  ["curve", "", row => row.curve.length > 1 && el("span", { title: row.curve_of }, outline([{ x: row.curve.map((_, at) => at), y: row.curve, colour: "currentColor" }])), "spark"],
  ["reward", "critic/score/mean", row => row.curve_of === "critic/score/mean" && inNumber("", row.now)],
  ["loss", "train/loss", row => row.curve_of === "train/loss" && inNumber("", row.now)],
  ["validation", "last", row => row.metric && `${inNumber(row.metric, row.first)} → ${inNumber(row.metric, row.last)}`],
  ["best", "best", row => row.metric && inNumber(row.metric, row.best)],
  ["step", "step", row => row.step !== null && (row.total_steps ? `${row.step}/${row.total_steps}` : String(row.step))],
  ["algorithm", "algorithm.adv_estimator", row => row.algorithm],
  ["model", "actor_rollout_ref.model.path", row => row.model && el("span", { title: row.model }, row.model.split("/").slice(-2).join("/")), "long"],
  ["took", "took", row => row.took !== null && inTime(row.took)],
  ["created", "created", row => row.created.replace("T", " ").slice(0, 16)],
  ["sweep", "sweep", row => row.sweep && el("a", { href: sweepAddress(row) }, row.sweep)],
  ["tags", "tags", row => row.tags.length && el("span", {}, ...row.tags.map(tag => el("span", { class: "tag" }, tag)))],
  ["note", "note", row => row.note, "long"],
];
// On a phone: the name with state and cause, and the first and the last value.
const PHONE = matchMedia("(max-width: 560px)");
const SMALL_COLUMNS = [
  ["run", "name", row => el("div", {}, el("a", { href: `/?run=${encodeURIComponent(row.key)}` }, row.key), el("span", { class: `badge ${row.state}` }, row.state), causeNode(row))],
  ["first → last", "last", row => row.metric ? `${inNumber(row.metric, row.first)} → ${inNumber(row.metric, row.last)}`
    : row.curve.length && `${inNumber("", row.curve[0])} → ${inNumber("", row.now)}`],
  ...COLUMNS.filter(([title]) => !["run", "state", "cause", "validation"].includes(title)),
];
const causeNode = row => { const cause = causeOf({ ...row, failure: row.failure || { message: row.problem } }); return cause ? el("p", { class: "rings", title: cause }, cause) : null; };
const GROUPS = { project: row => row.project, sweep: row => row.sweep && el("a", { href: sweepAddress(row) }, row.sweep) };
const sweepAddress = row => `/?sweep=${encodeURIComponent(`${row.project}/${row.sweep}`)}`;
const TYPING_MS = 250;
const listed = { rows: [], matching: 0, total: 0, chosen: new Set(), reading: 0 };

const inNumber = (metric, value) => value === null ? "-" : /\/acc\/mean@\d+$/.test(metric) ? `${(100 * value).toFixed(1)} %` : Number(value.toPrecision(3)).toString();


function filters() {
  // The name is a condition of its own; backslashes and quotes have no place in names.
  const name = $("filter-name").value.trim().replaceAll(/["\\]/g, ""), where = $("filter-where").value.trim();
  const conditions = [...(name ? [`like(name, "*${name}*")`] : []), ...(where ? [name ? `(${where})` : where] : [])];
  return { where: conditions.join(" and "), state: $("filter-state").value, sort: QUERY.get("sort") || "", cols: $("filter-cols").value.trim(), group: $("filter-group").value };
}

async function readRuns(offset) {
  const number = ++listed.reading, page = await api("runs", { ...filters(), offset });
  if (number !== listed.reading) return;  // a newer request is on its way
  listed.rows = [...listed.rows.slice(0, offset), ...page.runs];
  listed.matching = page.matching;
  Object.assign(listed, { total: page.total, version: page.version });
  drawRuns(offset);
}

function drawRuns(from) {
  const extra = $("filter-cols").value.split(",").map(text => text.trim()).filter(Boolean), sort = QUERY.get("sort") || "", body = $("runs").querySelector("tbody");
  const others = extra.map(name => [name, name, row => row[name] === null || row[name] === undefined ? null : typeof row[name] === "string" ? row[name] : JSON.stringify(row[name]), "long"]);
  const columns = [...(PHONE.matches ? SMALL_COLUMNS : COLUMNS).filter(([, , cell]) => listed.rows.some(row => cell(row))), ...others], names = columns.map(([title]) => title).join();
  const titles = columns.map(([title, key]) => {
    const down = sort === `-${key}`, button = el("button", { type: "button", class: "sorter" }, title);
    button.addEventListener("click", () => applyFilters(sort === key ? `-${key}` : down ? "" : key));
    return el("th", { scope: "col", "aria-sort": sort === key ? "ascending" : down ? "descending" : "none" }, key ? button : title);
  });
  $("runs").querySelector("thead").replaceChildren(el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "compare and pin")), ...titles));
  const start = names === listed.columns ? from : 0, group = QUERY.get("group");
  const rows = listed.rows.slice(start).flatMap((row, at) => {
    const starts = group && (start + at === 0 || listed.rows[start + at - 1][group] !== row[group]);
    const head = starts ? [el("tr", { class: "group" }, el("th", { scope: "rowgroup", colspan: columns.length + 1 }, GROUPS[group](row) || `no ${group}`))] : [];
    return [...head, rowOf(row, columns)];
  });
  listed.columns = names;
  start ? body.append(...rows) : body.replaceChildren(...rows);
  const known = listed.total === 0 ? "no runs yet: rlctl train ppo makes one" : `${listed.matching.toLocaleString("en")} of ${listed.total.toLocaleString("en")} runs`;
  $("runs-count").textContent = known + (listed.rows.length < listed.matching ? `, the first ${listed.rows.length.toLocaleString("en")} shown` : "");
  $("runs-more").hidden = listed.rows.length >= listed.matching;
  performance.mark("listed");
  markPins();
  if (!from) overlaySoon();
}

function rowOf(row, columns) {
  const box = el("input", { type: "checkbox", "aria-label": `compare ${row.key}` });
  box.checked = listed.chosen.has(row.key);
  box.addEventListener("change", () => {
    listed.chosen[box.checked ? "add" : "delete"](row.key);
    $("compare").disabled = !listed.chosen.size;
    $("compare").textContent = listed.chosen.size > 1 ? `compare ${listed.chosen.size}` : listed.chosen.size ? "open" : "compare";
  });
  const cells = columns.map(([, , cell, kind], at) => {
    const content = cell(row) || "";
    return el(at ? "td" : "th", { ...(at ? {} : { scope: "row" }), ...(kind ? { class: kind } : {}), ...(kind && typeof content === "string" ? { title: content } : {}) }, content);
  });
  return el("tr", {}, el("td", {}, el("div", { class: "choice" }, box, pinButton(row))), ...cells);
}

const FILTERS = ["name", "state", "where", "cols", "group"];

function applyFilters(sort) {
  for (const name of FILTERS) { const value = $(`filter-${name}`).value; value ? QUERY.set(name, value) : QUERY.delete(name); }
  sort ? QUERY.set("sort", sort) : QUERY.delete("sort");
  history.replaceState(null, "", `/?${QUERY}`);
  say("");
  return attempt(() => readRuns(0));
}

async function showList() {
  $("title").textContent = "Runs";
  $("runs").hidden = false;
  $("filter-state").append(...STATES.map(state => el("option", { value: state }, state)));
  let typing = null;
  for (const name of FILTERS) {
    const field = $(`filter-${name}`), apply = () => applyFilters(QUERY.get("sort") || "");
    field.value = QUERY.get(name) || "";
    field.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(apply, field.type === "search" ? TYPING_MS : 0); });
  }
  PHONE.addEventListener("change", () => { listed.columns = null; drawRuns(0); });
  $("filter").addEventListener("submit", event => event.preventDefault());
  $("compare").addEventListener("click", () => { location.href = `/?${new URLSearchParams([...listed.chosen].map(key => ["run", key]))}`; });
  const more = () => attempt(() => readRuns(listed.rows.length));
  $("runs-more").addEventListener("click", more);
  new IntersectionObserver(entries => { if (entries[0].isIntersecting && listed.rows.length) more(); }, { rootMargin: "400px" }).observe($("runs-more"));
  // After scrolling the list keeps its place.
  await readRuns(0);
  listenTo(() => `/api/stream?version=${listed.version}`, () => { if (scrollY < 400) attempt(() => readRuns(0)); });
}

async function showSweeps() {
  $("title").textContent = "Sweeps";
  const sweeps = await api("sweeps");
  $("sweeps").hidden = false;
  $("sweeps").querySelector("p").textContent = sweeps.length ? "" : "no sweeps yet: rlctl sweep makes one";
  fillTable("sweeps", ["sweep", "state", "trials", "metric", "best", "created"], sweeps.map(each => [
    el("a", { href: `/?sweep=${encodeURIComponent(each.key)}` }, each.key), el("span", { class: `badge ${each.state}` }, each.state),
    Object.entries(each.trials).map(([state, count]) => `${count} ${state}`).join(", "), each.metric || "-",
    each.best === null ? "-" : `${Number(each.best.toPrecision(4))} (trial ${each.best_trial})`, each.created.replace("T", " ").slice(0, 16)]));
}
