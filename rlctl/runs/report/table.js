"use strict";
// Table of runs with the filters of `rlctl runs`, and the table of sweeps.
const STATES = ["starting", "running", "finished", "failed", "stopped", "lost", "broken"];
// Title, key for sorting, and cell of each column.
const COLUMNS = [
  ["run", "name", row => el("a", { href: `/?run=${encodeURIComponent(row.key)}` }, row.key)],
  ["state", "state", row => el("span", { class: `badge ${row.state}` }, row.state)],
  ["created", "created", row => row.created.replace("T", " ").slice(0, 16)],
  ["took", "took", row => inTime(row.took)],
  ["step", "step", row => row.step === null ? "-" : row.total_steps ? `${row.step}/${row.total_steps}` : String(row.step)],
  ["validation", "last", row => row.metric ? `${inNumber(row.metric, row.first)} → ${inNumber(row.metric, row.last)}` : "-"],
  ["best", "best", row => row.metric ? inNumber(row.metric, row.best) : "-"],
  ["tags", "tags", row => el("span", {}, ...row.tags.map(tag => el("span", { class: "tag" }, tag)))],
  ["note", "note", row => row.note || ""],
];
const listed = { rows: [], matching: 0, total: 0, chosen: new Set(), reading: 0 };

const inNumber = (metric, value) => value === null ? "-" : /\/acc\/mean@\d+$/.test(metric) ? `${(100 * value).toFixed(1)} %` : Number(value.toPrecision(3)).toString();

function inTime(seconds) {
  if (seconds === null) return "-";
  const whole = Math.round(seconds), two = number => String(number).padStart(2, "0");
  if (whole < 60) return `${seconds.toFixed(1)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h ${two(Math.floor(whole % 3600 / 60))}m`;
}

function filters() {
  // The name is a condition of its own; backslashes and quotes have no place in names.
  const name = $("filter-name").value.trim().replaceAll(/["\\]/g, ""), where = $("filter-where").value.trim();
  const conditions = [...(name ? [`like(name, "*${name}*")`] : []), ...(where ? [name ? `(${where})` : where] : [])];
  return { where: conditions.join(" and "), state: $("filter-state").value, sort: QUERY.get("sort") || "", cols: $("filter-cols").value.trim() };
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
  const extra = $("filter-cols").value.split(",").map(text => text.trim()).filter(Boolean);
  const sort = QUERY.get("sort") || "", body = $("runs").querySelector("tbody");
  const titles = [...COLUMNS, ...extra.map(name => [name, name])].map(([title, key]) => {
    const down = sort === `-${key}`, button = el("button", { type: "button", class: "sorter" }, title);
    button.addEventListener("click", () => applyFilters(sort === key ? `-${key}` : down ? "" : key));
    return el("th", { scope: "col", "aria-sort": sort === key ? "ascending" : down ? "descending" : "none" }, button);
  });
  $("runs").querySelector("thead").replaceChildren(el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "compare")), ...titles));
  const rows = listed.rows.slice(from).map(row => rowOf(row, extra));
  from ? body.append(...rows) : body.replaceChildren(...rows);
  const known = listed.total === 0 ? "no runs yet: `rlctl train ppo` makes one" : `${listed.matching.toLocaleString("en")} of ${listed.total.toLocaleString("en")} runs`;
  $("runs-count").textContent = known + (listed.rows.length < listed.matching ? `, the first ${listed.rows.length.toLocaleString("en")} shown` : "");
  $("runs-more").hidden = listed.rows.length >= listed.matching;
  performance.mark("listed");
}

function rowOf(row, extra) {
  const box = el("input", { type: "checkbox", "aria-label": `compare ${row.key}` });
  box.checked = listed.chosen.has(row.key);
  box.addEventListener("change", () => {
    listed.chosen[box.checked ? "add" : "delete"](row.key);
    $("compare").disabled = !listed.chosen.size;
    $("compare").textContent = listed.chosen.size > 1 ? `compare ${listed.chosen.size}` : listed.chosen.size ? "open" : "compare";
  });
  const cells = COLUMNS.map(([, , cell], at) => el(at ? "td" : "th", at ? {} : { scope: "row" }, cell(row)));
  const more = extra.map(name => el("td", {}, row[name] === null || row[name] === undefined ? "-" : typeof row[name] === "string" ? row[name] : JSON.stringify(row[name])));
  return el("tr", { ...(row.problem ? { title: row.problem } : {}) }, el("td", {}, box), ...cells, ...more);
}

function applyFilters(sort) {
  const given = { name: $("filter-name").value, state: $("filter-state").value, where: $("filter-where").value, cols: $("filter-cols").value, sort };
  for (const [name, value] of Object.entries(given)) value ? QUERY.set(name, value) : QUERY.delete(name);
  history.replaceState(null, "", `/?${QUERY}`);
  say("");
  return attempt(() => readRuns(0));
}

async function showList() {
  $("title").textContent = "Runs";
  $("runs").hidden = false;
  $("filter-state").append(...STATES.map(state => el("option", { value: state }, state)));
  for (const name of ["name", "state", "where", "cols"]) $(`filter-${name}`).value = QUERY.get(name) || "";
  const apply = () => applyFilters(QUERY.get("sort") || "");
  $("filter").addEventListener("submit", event => { event.preventDefault(); apply(); });
  $("filter-state").addEventListener("change", apply);
  $("filter-name").addEventListener("input", apply);
  $("compare").addEventListener("click", () => { location.href = `/?${new URLSearchParams([...listed.chosen].map(key => ["run", key]))}`; });
  const more = () => attempt(() => readRuns(listed.rows.length));
  $("runs-more").addEventListener("click", more);
  new IntersectionObserver(entries => { if (entries[0].isIntersecting && listed.rows.length) more(); }, { rootMargin: "400px" }).observe($("runs-more"));
  // After scrolling the list keeps its place.
  await readRuns(0);
  listenTo(() => `/api/stream?version=${listed.version}`, () => { if (scrollY < 400) attempt(() => readRuns(0)); });
  requestIdleCallback(() => fetch(plotlyAddress(), { priority: "low" }).catch(() => null));  // the next page needs it
  const sweeps = await api("sweeps");
  $("sweeps").hidden = !sweeps.length;
  fillTable("sweeps", ["sweep", "state", "trials", "metric", "best", "created"], sweeps.map(each => [
    el("a", { href: `/?sweep=${encodeURIComponent(each.key)}` }, each.key), el("span", { class: `badge ${each.state}` }, each.state),
    Object.entries(each.trials).map(([state, count]) => `${count} ${state}`).join(", "), each.metric || "-",
    each.best === null ? "-" : `${Number(each.best.toPrecision(4))} (trial ${each.best_trial})`, each.created.replace("T", " ").slice(0, 16)]));
}
