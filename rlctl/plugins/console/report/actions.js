"use strict";
// Buttons that change a run. Each asks before it acts.
const ACTIONS = {
  stop: { verb: "stop run", text: "The run finishes its step, saves and ends.", when: run => isActive(run) },
  resume: { verb: "resume run", text: "The run continues from its latest complete checkpoint, in a process of its own.", when: run => !isActive(run) && run.state !== "finished" },
  tag: { verb: "save tags", text: "Words to add as tags, with spaces between them; ^ before a word removes it.", label: "tags", input: () => "" },
  note: { verb: "save note", text: "An empty text removes the note.", label: "note", input: run => run.note },
  export: { verb: "export model", text: "The model of the latest checkpoint, as a folder in exports/ of the run's folder.", label: "folder", input: () => "model", when: run => run.checkpoints.length > 0 },
};
const POLL_JOB_MS = 1000;
const isActive = run => ["running", "starting"].includes(run.state);

function buttonsOf(run) {
  const buttons = BOARD.read_only ? [] : Object.entries(ACTIONS).filter(([, { when }]) => !when || when(run)).map(([name, action]) => {
    const button = el("button", { type: "button", "aria-label": `${name} ${run.label}` }, name);
    button.addEventListener("click", () => attempt(() => confirmed(run, name, action)));
    return button;
  });
  const save = el("a", { class: "button", href: `/api/report?run=${encodeURIComponent(run.key)}`, download: "report.html", "aria-label": `save the report of ${run.label}` }, "report");
  const tokens = el("a", { class: "button", href: `/tokens?run=${encodeURIComponent(run.key)}`, "aria-label": `tokens of ${run.label}` }, "tokens");
  return el("p", { class: "buttons" }, ...buttons, save, ...(run.tokens ? [tokens] : []));
}

async function confirmed(run, name, action) {
  const text = await ask(`${name} ${run.label}`, action, action.input ? action.input(run) : "");
  if (text === null) return;
  const done = await api("act", {}, {
    method: "POST", headers: { "Content-Type": "application/json", "X-CSRF-Token": BOARD.csrf }, body: JSON.stringify({ run: run.key, action: name, text }),
  });
  say(done.message);
  if (done.job) await followJob(done.job, done.message);
  await refresh(run);
}

function ask(title, { text, label, verb }, value) {
  const dialog = $("ask");
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-ok").textContent = verb;
  $("ask-label").hidden = !label;
  $("ask-label").querySelector("span").textContent = label || "";
  $("ask-input").value = value;
  dialog.returnValue = "";
  dialog.showModal();
  (label ? $("ask-input") : $("ask-ok")).focus();
  return new Promise(resolve => {
    $("ask-input").onkeydown = event => { if (event.key === "Enter") { event.preventDefault(); dialog.close("ok"); } };
    // The event of an earlier closing may arrive after the dialog has opened again.
    dialog.onclose = () => dialog.open || resolve(dialog.returnValue === "ok" ? $("ask-input").value : null);
  });
}

async function followJob(number, message) {
  // A resumed run is seen in its curves; the command itself may run for days.
  for (let state = await api(`jobs/${number}`); ; state = await api(`jobs/${number}`)) {
    if (state.exit_code !== null) {
      const last = state.lines.slice(-4).join("\n");
      return say(state.exit_code ? `${state.action} failed with exit code ${state.exit_code}:\n${last}` : `${state.action} is done: ${last}`, state.exit_code !== 0);
    }
    if (state.action === "resume" && DATA.runs.some(run => run.key === state.run && isActive(run))) return say(message);
    await new Promise(resolve => setTimeout(resolve, POLL_JOB_MS));
  }
}

async function refresh(run) {
  const { runs: [fresh] } = await api("view", { run: run.key });
  for (const name of ["state", "failure", "tags", "note", "summary", "checkpoints"]) run[name] = fresh[name];
  fillCard(run, DATA.runs.indexOf(run));
}
