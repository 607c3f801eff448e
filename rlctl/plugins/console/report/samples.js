"use strict";
// Validation responses: of the report, which has some of them, or read from the board.
const FIRST_PAGE = 5, PAGE = 20;
// Starts of the turns in prompts of common chat templates, and what closes them.
const TURN = /<\|(system|developer|user|assistant|tool)\|>|<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>|<start_of_turn>(\w+)\n/g;
const CLOSING = /(<\|end\|>|<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|begin_of_text\|>|<bos>|<s>)\s*$/;

function turnsOf(prompt) {
  // Return the turns of a rendered prompt that are not empty; text outside of turns is the "prompt".
  const marks = [...prompt.matchAll(TURN)], starts = [{ 0: "", 1: "prompt", index: 0 }, ...marks];
  return starts.map((mark, at) => {
    const text = prompt.slice(mark.index + mark[0].length, marks[at] ? marks[at].index : undefined);
    return { who: [1, 2, 3, 4].map(group => mark[group]).find(Boolean), text: text.replace(CLOSING, "").trim() };
  }).filter(turn => turn.text);
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

function imagesNode(sample, thumbnails) {
  const all = sample.num_images, images = sample.images.map((digest, at) => {
    const name = `image ${at + 1} of prompt ${sample.index + 1}`;
    return thumbnails[digest] ? el("img", { src: thumbnails[digest], alt: name, title: `SHA-256 ${digest}`, loading: "lazy" })
      : el("span", {}, `${name}, without a thumbnail`);
  });
  const more = all > images.length ? el("span", {}, `${images.length} of ${all}`) : null;
  return el("div", { class: "part images" }, el("h3", {}, all === 1 ? "image" : "images", more), ...images);
}

function promptNodes(sample, sought, thumbnails) {
  const texts = [...turnsOf(sample.prompt).map(turn => [turn.who, turn.text]), ["truth", sample.truth]];
  const nodes = texts.map(([name, text]) => partNode(name, text, sought));
  if (sample.images.length) nodes.splice(-1, 0, imagesNode(sample, thumbnails));
  return nodes;
}

const partNode = (name, text, sought) => el("div", { class: `part ${name}` }, el("h3", {}, name), el("pre", {}, ...marked(text, sought)));

function sampleNode(sample, step, sought, asked, thumbnails) {
  // After another response to the same prompt (`asked`), show only the response.
  const parts = Object.entries(sample.components).map(([name, value]) => `${name} ${value}`).join("  ");
  const said = [`score ${sample.score}`, parts, `${sample.length} tokens`, `ended by ${sample.finish}`, sample.source, `step ${step}`,
                `prompt ${sample.index + 1}`];
  const head = el("div", { class: "head" }, el("b", {}, sample.verdict),
                  ...said.filter(text => text).map(text => el("span", {}, text)));
  const node = el("article", { class: `sample ${sample.right ? "right" : "wrong"}` }, head);
  if (!asked) node.append(...promptNodes(sample, sought, thumbnails));
  if (sample.episode) node.append(...episodeNodes(sample.episode, sought));
  else node.append(partNode("response", sample.response, sought));
  return node;
}

function pairNode(sample, [step, besideStep], sought, thumbnails, [run, other]) {
  // The prompt once, and below it the responses of two runs or steps.
  const half = (each, at, index) => {
    const made = each ? sampleNode(each, at, sought, true, thumbnails) : el("article", { class: "sample" }, el("p", { class: "note" }, "no response to this prompt"));
    made.prepend(el("h3", {}, who(index)));
    return made;
  };
  return el("article", { class: "sample both" }, ...promptNodes(sample, sought, thumbnails),
            el("div", { class: "pair" }, half(sample, step, run), half(sample.beside, besideStep, other)));
}

const promptKey = ({ prompt, images }) => JSON.stringify([prompt, images]);

function pairUp(samples, others) {
  // Of several responses to one prompt the first belongs to the first, and so on.
  const waiting = new Map();
  for (const other of others) waiting.set(promptKey(other), [...(waiting.get(promptKey(other)) || []), other]);
  return samples.map(sample => ({ ...sample, beside: waiting.get(promptKey(sample))?.shift() ?? null }));
}

function hasVerdict(sample, verdict) {
  if (verdict === "differ") return Boolean(sample.beside) && sample.beside.right !== sample.right;
  return !verdict || sample.right === (verdict === "right");
}

function episodeNodes(episode, sought) {
  const turns = episode.turns.map(turn => el("div", { class: turn.trained ? "turn trained" : "turn" },
    el("h3", {}, turn.who, el("span", {}, turn.facts)), el("pre", {}, ...marked(turn.text, sought))));
  const error = episode.error ? el("pre", { class: "rings" }, ...marked(episode.error, sought)) : "";
  return [...turns, el("h3", {}, "outcome", el("span", {}, episode.ending)), error];
}

function textsOf({ prompt, truth, response, episode }) {
  const turns = episode ? [...episode.turns.map(turn => turn.text), episode.error || ""] : [];
  return [prompt, response, truth, ...turns];
}

// Set by the board: returns { samples, matching, step } of the responses from `offset` on.
let readSamples = null;

function addSampleSteps(run, steps) {
  // Offer the validations that a running run has added; the shown one stays.
  const added = steps.filter(step => !run.steps.includes(step));
  run.steps = steps;
  if (!added.length) return;
  if ($("samples").hidden) buildSamples();
  else if (DATA.runs[$("sample-run").value] === run) $("sample-step").append(...added.map(step => el("option", { value: step }, String(step))));
}

function buildSamples() {
  const stepsOf = run => readSamples ? run.steps : run.samples.map(each => each.step);
  const runs = DATA.runs.map((run, index) => [run, index]).filter(([run]) => stepsOf(run).length);
  $("samples").hidden = !runs.length;
  if (!runs.length) return;
  $("sample-run").replaceChildren(...runs.map(([run, index]) => el("option", { value: index }, run.label)));
  $("sample-run").parentElement.hidden = runs.length < 2;
  let limit = FIRST_PAGE, latest = 0;
  const chosenRun = () => DATA.runs[$("sample-run").value];
  const steps = () => {
    const known = stepsOf(chosenRun());
    $("sample-step").replaceChildren(...known.map(step => el("option", { value: step }, String(step))),
                                     ...(readSamples ? [] : [el("option", { value: "all" }, "all, prompt by prompt")]));
    $("sample-step").value = known[known.length - 1];
  };
  const beside = () => $("beside-run").value === "" ? null : Number($("beside-run").value);
  const offerBeside = () => {
    // Offer the responses of other runs, and of other steps of this one.
    const other = beside(), chosen = $("beside-step").value;
    $("beside-step").replaceChildren(el("option", { value: "" }, "the same"), ...(other === null ? [] : stepsOf(DATA.runs[other])).map(step => el("option", { value: step }, String(step))));
    $("beside-step").value = chosen;
    if ($("beside-step").selectedIndex < 0) $("beside-step").value = "";
    $("beside-step").parentElement.hidden = other === null;
    $("sample-verdict").querySelector("[value=differ]").hidden = other === null;
    if (other === null && $("sample-verdict").value === "differ") $("sample-verdict").value = "";
  };
  $("beside-run").replaceChildren(el("option", { value: "" }, "no other response"), ...runs.map(([run, index]) => el("option", { value: index }, run.label)));
  $("beside-run").parentElement.hidden = runs.length < 2 && stepsOf(runs[0][0]).length < 2;
  const draw = (found, sought, more, text) => {
    const other = beside(), pair = [Number($("sample-run").value), other];
    $("sample-count").textContent = text;
    $("sample-list").replaceChildren(...found.map(([sample, step, besideStep], at) => other !== null
      ? pairNode(sample, [step, besideStep], sought, chosenRun().thumbnails, pair)
      : sampleNode(sample, step, sought, !readSamples && at > 0 && found[at - 1][0].index === sample.index, chosenRun().thumbnails)));
    $("sample-more").hidden = !more;
  };
  const listEmbedded = (chosen, verdict, sought) => {
    const { samples, label } = chosenRun();
    const validations = samples.filter(each => chosen === "all" || String(each.step) === chosen);
    const others = beside() === null ? [] : DATA.runs[beside()].samples, at = $("beside-step").value;
    const every = validations.flatMap(each => {
      const other = others.find(one => String(one.step) === (at || String(each.step))) || others[others.length - 1];
      return pairUp(each.shown, other ? other.shown : []).map(sample => [sample, each.step, other?.step]);
    });
    if (chosen === "all") every.sort(([a, s], [b, t]) => a.index - b.index || s - t);
    const found = every.filter(([sample]) => hasVerdict(sample, verdict) &&
      (!sought || [sample, sample.beside].filter(Boolean).flatMap(textsOf).some(text => text.toLowerCase().includes(sought))));
    const total = validations.reduce((sum, each) => sum + each.total, 0);
    draw(found.slice(0, limit), sought, found.length > limit, `${found.length} of ${every.length} responses` +
      (total > every.length ? `; the run has ${total.toLocaleString("en")}: rlctl show ${label} --samples` : ""));
  };
  const listRead = async (chosen, verdict, sought) => {
    const number = ++latest, found = [];
    let matching = 1;
    while (found.length < Math.min(limit, matching)) {
      const part = await readSamples(chosenRun(), { step: chosen, verdict, text: sought, offset: found.length,
                                      beside: DATA.runs[beside() ?? -1]?.key ?? null, beside_step: beside() === null ? null : $("beside-step").value });
      if (number !== latest) return;  // the choice has changed
      matching = part.matching;
      if (!part.samples.length) break;
      found.push(...part.samples.map(sample => [sample, part.step, part.beside_step]));
      const { key, thumbnails } = chosenRun();
      for (const digest of part.thumbnails) thumbnails[digest] = `/api/images?${new URLSearchParams({ run: key, digest })}`;
    }
    draw(found.slice(0, limit), sought, matching > limit, `${matching} response${matching === 1 ? "" : "s"}`);
  };
  const list = () => (readSamples ? listRead : listEmbedded)($("sample-step").value, $("sample-verdict").value, $("sample-text").value.trim().toLowerCase());
  const reset = () => { limit = FIRST_PAGE; list(); };
  $("sample-run").onchange = () => { steps(); reset(); };
  $("beside-run").onchange = () => { offerBeside(); reset(); };
  $("beside-step").onchange = reset;
  for (const id of ["sample-step", "sample-verdict"]) $(id).onchange = reset;
  $("sample-text").oninput = reset;
  $("sample-more").onclick = () => { limit += PAGE; list(); };
  steps();
  offerBeside();
  list();
}
