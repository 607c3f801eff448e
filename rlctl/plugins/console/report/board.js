"use strict";
// Start of the board: reads which view the address asks for, and its data.
const BOARD = JSON.parse($("board").textContent);
const QUERY = new URLSearchParams(location.search);

async function api(path, params = {}, options = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) for (const each of [value].flat()) if (each !== null && each !== "") query.append(name, each);
  const response = await fetch(`/api/${path}?${query}`, options);
  const found = await response.json().catch(() => ({ error: `the board responded ${response.status}` }));
  if (!response.ok) throw new Error([found.error, found.where, found.hint].filter(Boolean).join("\n"));
  return found;
}

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("rings", bad);
}

const attempt = work => work().catch(error => say(error.message, true));

const plotlyAddress = () => document.querySelector("script[src$='/page.js']").src.replace("page.js", "plotly.js");

let loading = null;
function loadPlotly() {
  return loading ??= new Promise((resolve, reject) => {
    const script = el("script", { src: plotlyAddress() });
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("plotly did not load")));
    document.head.append(script);
  });
}

async function showView() {
  const sweep = QUERY.get("sweep"), keys = QUERY.getAll("run");
  const data = await api("view", sweep ? { sweep } : { run: keys });
  readSamples = (run, query) => api("samples", { run: run.key, ...query });
  cardButtons = buttonsOf;
  drawNearScreen();
  showData(data);
  startLive();
  // Plotly occupies the browser for a second: the page and outlines of its charts are shown before.
  await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)));
  performance.mark("outlined");
  await loadPlotly();
  redraw();
  performance.mark("drawn");
  if (data.state === "running") attempt(() => followSweep(sweep));
}

function startBoard() {
  startControls();
  $("over").replaceChildren("rlctl board", el("a", { href: "/" }, "Runs"), el("a", { href: "/?sweeps" }, "Sweeps"));
  const views = QUERY.has("run") || QUERY.has("sweep");
  document.body.classList.toggle("list", !views);
  attempt(views ? showView : QUERY.has("sweeps") ? showSweeps : showList);
}

addEventListener("DOMContentLoaded", startBoard);
