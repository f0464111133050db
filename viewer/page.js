// The page of recorded runs.

const milliseconds = (seconds) => `${(seconds * 1e3).toPrecision(3)} ms`;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const sum = (values) => values.reduce((total, value) => total + value, 0);
const term = (id, text) => element("a", { href: `#term-${id}` }, text);
const MARKS = {
  accepted: ["✓", "accepted"],
  corrected: ["✎", "corrected"],
  flushed: ["✕", "flushed"],
  first: ["▸", "first, by the prompt"],
  open: ["…", "not judged"],
};
const RATES = [0.5, 1, 2, 4, 8, 16, 32, 60]; // cycles a second
const OVERSCAN = 4; // columns drawn beyond the visible ones

/** A token's text with its blanks made visible. */
function visible(text) {
  return text === "" ? "∅" : text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// ---------------------------------------------------------------------------------------------------------------------
// The staircase
// ---------------------------------------------------------------------------------------------------------------------

const state = { run: null, cycle: 0, row: 0, playing: false, rate: 2 };
const columns = new Map(); // cycle -> its element, of those that are drawn
let selected = null; // the cell that the keyboard is at, if it is drawn
let totals = []; // by cycle: tokens emitted, accepted, corrected and flushed until then

const numStages = () => state.run.stages.length;
const lastCycle = () => state.run.cells.length - 1;
const verdictRow = () => numStages() + 1;

/** Numbers of the tokens of a cell: row 0 is the head, then come the stages, and the verdict. */
function tokensAt(cycle, row) {
  if (row === 0) return state.run.drafts[cycle];
  return row === verdictRow() ? state.run.verdicts[cycle] : state.run.cells[cycle][row - 1];
}

function layersOf(stage) {
  const first = sum(state.run.stages.slice(0, stage));
  return [first, first + state.run.stages[stage] - 1];
}

function rowName(row) {
  if (row === 0) return "head";
  return row === verdictRow() ? "verdict" : `stage ${row - 1}`;
}

/** What became of a token. */
function outcome(number) {
  const { died, emitted, fate } = state.run.tokens;
  return {
    accepted: `accepted in cycle ${emitted[number]}`,
    corrected: `the target's own, since cycle ${emitted[number]}`,
    flushed: `flushed in cycle ${died[number]}`,
    first: "the prompt's first new token",
    open: "not judged before the end",
  }[fate[number]];
}

/** Where a token came from: the same for all tokens of a cell. */
function origin(number) {
  const { position, drafted, fill, entered } = state.run.tokens;
  const draft =
    drafted[number] < 0 ? "" : `, drafted in cycle ${drafted[number]} (tokens in flight then: ${fill[number]})`;
  const entry = entered[number] < 0 ? ", never in a stage" : `, entered in cycle ${entered[number]}`;
  return `Position ${position[number]}${draft}${entry}.`;
}

function describe(cycle, row) {
  const { text, position, fate } = state.run.tokens;
  const shown = tokensAt(cycle, row).map(
    (number) => `"${text[number]}", position ${position[number]}, ${MARKS[fate[number]][1]}`,
  );
  return `Cycle ${cycle}, ${rowName(row)}: ${shown.length ? shown.join("; ") : "idle"}`;
}

function tokenElement(number, cycle) {
  const { text, fate, died } = state.run.tokens;
  const dies = died[number] === cycle ? " dies" : "";
  return element(
    "span",
    { class: `token ${fate[number]}${dies}`, "data-token": number },
    element("span", { class: "word" }, visible(text[number])),
    element("span", { class: "mark" }, MARKS[fate[number]][0]),
  );
}

function cellElement(cycle, row) {
  const tokens = tokensAt(cycle, row);
  const cell = element(
    "div",
    {
      class: tokens.length ? "cell" : "cell idle",
      role: "button",
      tabindex: -1,
      "aria-label": describe(cycle, row),
      "data-row": row,
      onclick: () => select(cycle, row, true),
      onfocus: () => showDetails(cycle, row),
      onmouseenter: () => showDetails(cycle, row),
      onmouseleave: () => showDetails(state.cycle, state.row),
    },
    ...tokens.map((number) => tokenElement(number, cycle)),
  );
  const kind = row === verdictRow() ? "row verdict after" : row === 1 ? "row after" : "row";
  return element("div", { class: kind }, cell);
}

function drawColumn(cycle) {
  const rows = Array.from({ length: verdictRow() + 1 }, (_, row) => cellElement(cycle, row));
  const column = element("div", { class: "column" }, element("div", { class: "number" }, String(cycle)), ...rows);
  column.style.left = `calc(${cycle} * var(--column))`;
  columns.set(cycle, column);
  byId("canvas").append(column);
}

const columnWidth = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--column"));

/** Draw the columns in sight, and only those: a run may have thousands. */
function drawColumns() {
  const scroller = byId("scroller");
  const width = columnWidth();
  const first = clamp(Math.floor(scroller.scrollLeft / width) - OVERSCAN, 0, lastCycle());
  const last = clamp(Math.ceil((scroller.scrollLeft + scroller.clientWidth) / width) + OVERSCAN, 0, lastCycle());
  for (const [cycle, column] of columns) {
    if (cycle < first || cycle > last) {
      column.remove();
      columns.delete(cycle);
    }
  }
  for (let cycle = first; cycle <= last; cycle++) {
    if (!columns.has(cycle)) drawColumn(cycle);
  }
  for (const [cycle, column] of columns) {
    column.classList.toggle("now", cycle === state.cycle);
    column.classList.toggle("future", cycle > state.cycle);
  }
  markSelected();
}

function markSelected() {
  selected?.classList.remove("selected");
  if (selected) selected.tabIndex = -1;
  selected = columns.get(state.cycle)?.querySelector(`[data-row="${state.row}"]`) ?? null;
  selected?.classList.add("selected");
  if (selected) selected.tabIndex = 0;
}

function drawLabels() {
  const labels = byId("labels");
  labels.replaceChildren(element("div", { class: "number" }, "cycle"));
  for (let row = 0; row <= verdictRow(); row++) {
    const isStage = row > 0 && row < verdictRow();
    const note = isStage ? [element("span", {}, "layers "), layersOf(row - 1).join("–")] : [row ? "" : "drafts"];
    const kind = row === verdictRow() ? "row verdict" : "row";
    labels.append(element("div", { class: kind }, rowName(row), element("small", {}, ...note)));
  }
  const stacked = Math.max(1, ...state.run.drafts.map((numbers) => numbers.length));
  byId("staircase").style.setProperty("--row", `calc(${stacked} * var(--line-height) + 10px)`);
  const canvas = byId("canvas");
  canvas.style.width = `calc(${lastCycle() + 1} * var(--column))`;
  canvas.style.height = `calc(22px + ${numStages() + 1} * var(--row) + var(--line-height) + 8px)`;
}

/** Go to a cycle; the staircase follows. */
function goTo(cycle, { follow = false } = {}) {
  state.cycle = clamp(cycle, 0, Math.max(0, lastCycle()));
  const scroller = byId("scroller");
  const width = columnWidth();
  const left = state.cycle * width;
  const hidden = left < scroller.scrollLeft || left + width > scroller.scrollLeft + scroller.clientWidth;
  if (follow) scroller.scrollLeft = Math.max(scroller.scrollLeft, left - scroller.clientWidth * 0.7);
  else if (hidden) scroller.scrollLeft = left - scroller.clientWidth * 0.4;
  drawColumns();
  drawText();
  byId("where").textContent = `cycle ${state.cycle} of ${lastCycle()}`;
  showDetails(state.cycle, state.row);
}

/** Select a cell; with `focus`, or if a cell has it already, the keyboard's focus goes there. */
function select(cycle, row, focus = false) {
  const held = focus || document.activeElement?.classList.contains("cell");
  state.row = clamp(row, 0, verdictRow());
  goTo(cycle);
  if (held) selected?.focus({ preventScroll: true });
}

function setPlaying(playing) {
  state.playing = playing && lastCycle() > 0;
  byId("play").textContent = state.playing ? "Pause" : "▶ Play";
  if (!state.playing) return;
  if (state.cycle >= lastCycle()) {
    byId("scroller").scrollLeft = 0;
    goTo(0);
  }
  let before = performance.now();
  let owed = 0; // cycles
  const tick = (now) => {
    if (!state.playing) return;
    owed += ((now - before) / 1e3) * RATES[state.rate];
    before = now;
    if (owed >= 1) {
      goTo(state.cycle + Math.floor(owed), { follow: true });
      owed %= 1;
    }
    if (state.cycle >= lastCycle()) setPlaying(false);
    else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

function setRate(index) {
  state.rate = clamp(index, 0, RATES.length - 1);
  byId("rate").textContent = `${RATES[state.rate]} cycles/s`;
}

/** The next cycle whose verdict is the target's own token and that drops what was in flight. */
function nextRejection(direction = 1) {
  const dropping = new Set(state.run.tokens.died);
  const isRejection = (cycle) =>
    dropping.has(cycle) && state.run.verdicts[cycle].some((number) => state.run.tokens.fate[number] === "corrected");
  for (let cycle = state.cycle + direction; cycle >= 0 && cycle <= lastCycle(); cycle += direction) {
    if (isRejection(cycle)) return select(cycle, verdictRow());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Text so far, counts, details
// ---------------------------------------------------------------------------------------------------------------------

/** Make a text's pieces those of the first `count` tokens. */
function setPieces(box, pieces, fates, count) {
  while (box.childElementCount > count) box.lastElementChild.remove();
  for (let index = box.childElementCount; index < count; index++) {
    box.append(element("span", { class: `piece ${fates[index]}` }, pieces[index]));
  }
  box.scrollTop = box.scrollHeight;
}

/** Running totals of a run, a line a cycle. */
function totalsOf({ tokens, verdicts }) {
  const lines = verdicts.map(() => ({ emitted: 0, accepted: 0, corrected: 0, flushed: 0 }));
  tokens.fate.forEach((fate, number) => {
    if (tokens.emitted[number] >= 0) {
      lines[tokens.emitted[number]].emitted++;
      lines[tokens.emitted[number]][fate]++;
    } else if (fate === "flushed") lines[tokens.died[number]].flushed++;
  });
  for (let cycle = 1; cycle < lines.length; cycle++) {
    for (const name of Object.keys(lines[cycle])) lines[cycle][name] += lines[cycle - 1][name];
  }
  return lines;
}

function drawText() {
  const { pieces, fates } = state.run.lanes[1];
  const total = totals[state.cycle];
  setPieces(byId("text"), pieces, fates, 1 + total.emitted);
  const counts = ["accepted", "corrected", "flushed"].map((fate) => [fate, total[fate]]);
  byId("counts").replaceChildren(
    ...counts.map(([fate, number]) =>
      element("span", {}, `${MARKS[fate][0]} `, element("b", { "data-count": fate }, String(number)), ` ${fate}`),
    ),
    element("span", {}, "until this cycle"),
  );
}

/** Candidates with their probabilities, as bars: [text, probability, fate]. */
function chances(rows) {
  const lines = rows.flatMap(([text, probability, fate]) => [
    element("span", { class: "word" }, visible(text)),
    element("span", { class: `chance ${fate}` }, element("span", { style: `width: ${100 * (probability ?? 0)}%` })),
    element("span", {}, `${probability === null ? "–" : probability.toFixed(3)} ${MARKS[fate]?.[0] ?? ""}`),
  ]);
  return element("div", { class: "chances" }, ...lines);
}

/** What the head found likely in a cycle: its drafts, and in a chain what else it thought of. */
function candidatesOf(cycle) {
  const { text, probability, fate } = state.run.tokens;
  const rows = state.run.drafts[cycle].map((number) => [text[number], probability[number], fate[number]]);
  const others = state.run.heads[cycle].best ?? [];
  const drafted = new Set(rows.map(([word]) => word));
  return [...rows, ...others.filter(([word]) => !drafted.has(word)).map(([word, chance]) => [word, chance, ""])];
}

/** Rows that the head saw, as chips: neighbours of one type together. */
function rowChips({ cached, deepest, fed }) {
  const runs = [];
  for (const [position, type] of [...fed].sort((a, b) => a[0] - b[0])) {
    const run = runs.at(-1);
    if (run && run.type === type && position - run.last <= 1) {
      run.last = position;
      run.count++;
    } else runs.push({ first: position, last: position, type, count: 1 });
  }
  const span = ({ first, last }) => (first === last ? `position ${first}` : `positions ${first}–${last}`);
  const several = ({ first, last, count }) => (count > last - first + 1 ? ` (${count} rows)` : "");
  const chips = runs.map((run) =>
    element("span", {}, `${span(run)}${several(run)}: g`, element("sub", {}, `${run.type}`)),
  );
  if (cached) {
    const text = `${span({ first: 0, last: cached - 1 })}, cached: g`;
    chips.unshift(element("span", {}, text, element("sub", {}, `${deepest}`)));
  }
  return element("div", { class: "chips" }, ...chips);
}

function timesOf(cycle, row) {
  const { draft, stages, verify, wait, cycle: whole, ideal } = state.run.seconds;
  const parts = [
    ["head", draft[cycle], 0],
    ...stages.map((times, stage) => [rowName(stage + 1), times[cycle], stage + 1]),
  ];
  parts.push(["verification", verify[cycle], verdictRow()]);
  if (wait[cycle]) parts.push(["waiting for stages", wait[cycle], -1]);
  const shown = [...parts.filter(([, seconds]) => seconds), ["whole cycle, as measured", whole[cycle], -1]];
  shown.push(["ideal: a device a stage", ideal[cycle], -1]);
  const lines = shown.flatMap(([name, seconds, at]) => {
    const kind = { class: at === row ? "here" : "" };
    return [element("span", kind, name), element("span", kind, milliseconds(seconds))];
  });
  return element("div", { class: "times" }, ...lines);
}

function whyEmpty(cycle, row) {
  if (row === verdictRow()) return "No verdict: nothing that counts has left the last stage.";
  if (row === 0) return "No draft: the text ends before its position.";
  const ran = state.run.seconds.stages[row - 1][cycle] > 0;
  return ran ? "Idle: it still ran what had been flushed, for nothing." : "Idle: no token here.";
}

function showDetails(cycle, row) {
  const { text, parent, probability, fate } = state.run.tokens;
  const tokens = tokensAt(cycle, row);
  const parts = [element("h3", {}, `Cycle ${cycle}, ${rowName(row)}`)];
  if (!tokens.length) {
    parts.push(element("p", {}, whyEmpty(cycle, row)));
  }
  if (tokens.length) parts.push(element("p", {}, origin(tokens[0])));
  for (const number of tokens) {
    const before = parent[number] < 0 ? "" : `, after "${visible(text[parent[number]])}"`;
    const words = element("span", { class: "word" }, visible(text[number]));
    const chip = element("span", { class: `token ${fate[number]}` }, words);
    parts.push(element("p", {}, chip, ` ${MARKS[fate[number]][0]} ${outcome(number)}${before}`));
  }
  if (row === 0 && tokens.length) {
    parts.push(element("h4", {}, term("candidate", "Candidates, and how likely the head found them")));
    parts.push(chances(candidatesOf(cycle)));
    const { rows } = state.run.heads[cycle];
    if (rows) parts.push(element("h4", {}, term("row", "Rows that the head saw, and their types")), rowChips(rows));
  } else if (tokens.some((number) => probability[number] !== null)) {
    parts.push(element("h4", {}, term("candidate", "How likely the head found it")));
    parts.push(chances(tokens.map((number) => [text[number], probability[number], fate[number]])));
  }
  parts.push(element("h4", {}, "Times of this cycle"), timesOf(cycle, row));
  byId("details").replaceChildren(...parts);
}

// ---------------------------------------------------------------------------------------------------------------------
// The race
// ---------------------------------------------------------------------------------------------------------------------

const race = { time: 0, length: 0, playing: false, lanes: [] };

function drawRace() {
  race.length = Math.max(...state.run.lanes.map(({ times }) => times.at(-1)));
  const standard = state.run.lanes[0].speed;
  race.lanes = state.run.lanes.map((lane, index) => {
    const ratio = index && standard && lane.speed ? `, ${(lane.speed / standard).toFixed(2)} × standard` : "";
    const speed = lane.speed ? `${lane.speed.toFixed(1)} tokens/s${ratio}` : "no decode step";
    const box = element("div", { class: index ? "written" : "written plain", tabindex: 0, "aria-label": lane.name });
    const progress = element("progress", { max: lane.pieces.length, "aria-label": `Tokens of ${lane.name}` });
    const heading = element("h3", {}, element("span", {}, lane.name), element("span", {}, speed));
    const count = element("span");
    byId("lanes").append(
      element("div", { class: "lane" }, heading, element("p", { class: "note" }, lane.note), progress, count, box),
    );
    return { ...lane, box, progress, count };
  });
  // At first the moment at which the fastest lane ends: who is ahead shows at once.
  setRaceTime(Math.min(...race.lanes.map(({ times }) => times.at(-1))));
}

function setRaceTime(time) {
  race.time = clamp(time, 0, race.length);
  byId("race-now").textContent = `${race.time.toFixed(2)} s`;
  byId("race-time").value = race.length ? (1000 * race.time) / race.length : 1000;
  for (const { pieces, times, fates, box, progress, count } of race.lanes) {
    const shown = times.filter((seconds) => seconds <= race.time).length;
    setPieces(box, pieces, fates, shown);
    progress.value = shown;
    const end = shown === pieces.length ? `, done after ${times.at(-1).toFixed(2)} s` : "";
    count.textContent = `${shown} of ${pieces.length} tokens${end}`;
  }
}

function setRacing(playing) {
  race.playing = playing;
  byId("race-play").textContent = playing ? "Pause" : "▶ Play";
  if (!playing) return;
  if (race.time >= race.length) setRaceTime(0);
  let before = performance.now();
  const tick = (now) => {
    if (!race.playing) return;
    setRaceTime(race.time + ((now - before) / 1e3) * Number(byId("race-rate").value));
    before = now;
    if (race.time >= race.length) setRacing(false);
    else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

// ---------------------------------------------------------------------------------------------------------------------
// Charts
// ---------------------------------------------------------------------------------------------------------------------

function chart(title, drawing, note) {
  return element("div", { class: "chart" }, element("h3", {}, title), drawing, element("p", {}, note));
}

function fillChart() {
  const { verified, accepted } = state.run.fills;
  const rows = verified.map((tries, index) => {
    const share = tries ? accepted[index] / tries : 0;
    return [String(index + 1), share, tries ? share.toFixed(2) : "–"];
  });
  const pairs = verified.map((tries, index) => `${index + 1}: ${accepted[index]}/${tries}`).join(", ");
  const title = element("span", {}, "Acceptance by ", term("fill", "tokens in flight"));
  return chart(
    title,
    bars(rows, 1, `Acceptance by tokens in flight. ${pairs}`),
    `Accepted / verified drafts: ${pairs}.`,
  );
}

function runChart() {
  const lengths = state.run.acceptedRuns;
  const counts = Array.from({ length: Math.max(0, ...lengths) + 1 }, (_, length) =>
    sum(lengths.map((value) => Number(value === length))),
  );
  const every = Math.ceil(counts.length / 20);
  const rows = counts.map((count, length) => [length % every ? "" : String(length), count, count ? String(count) : ""]);
  const title = element("span", {}, term("run", "Accepted runs"), ": drafts in a row before a rejection");
  const note = `${lengths.length} runs, the longest ${Math.max(0, ...lengths)}.`;
  return chart(title, bars(rows, Math.max(1, ...counts), `Lengths of accepted runs. ${note}`), note);
}

/** Where a cycle's time went, part by part, and how long the whole was and would be with a device a stage. */
function timeChart() {
  const { draft, stages, verify, cycle, ideal } = state.run.seconds;
  const mean = (values) => (values.length ? sum(values) / values.length : 0);
  const parts = [["head", mean(draft), "var(--open)"]];
  stages.forEach((times, stage) => parts.push([`stage ${stage}`, mean(times), stage % 2 ? "#3d8fc4" : "var(--first)"]));
  parts.push(["verification", mean(verify), "var(--corrected)"]);
  const longest = Math.max(...parts.map(([, seconds]) => seconds), mean(cycle), mean(ideal), 1e-9);
  const rows = [
    ...parts,
    ["cycle, measured", mean(cycle), "var(--dim)"],
    ["cycle, ideal", mean(ideal), "var(--accepted)"],
  ];
  const label = rows.map(([name, seconds]) => `${name} ${milliseconds(seconds)}`).join(", ");
  const step = 21;
  const drawing = element("svg", { viewBox: `0 0 400 ${rows.length * step + 4}`, role: "img", "aria-label": label });
  rows.forEach(([name, seconds, fill], index) => {
    const y = index * step + 3;
    const wide = (seconds / longest) * 210;
    drawing.append(
      element("text", { x: 0, y: y + 13, class: "dim" }, name),
      element("rect", { x: 110, y, width: Math.max(1, wide), height: step - 5, rx: 2, fill }),
      element("text", { x: 116 + wide, y: y + 13 }, milliseconds(seconds)),
    );
  });
  const title = element("span", {}, "Where a ", term("cycle", "cycle"), "'s time went");
  return chart(
    title,
    drawing,
    element(
      "span",
      {},
      "Means over all cycles, in which an idle stage takes no time. ",
      term("ideal", "Ideal"),
      " is computed.",
    ),
  );
}

// ---------------------------------------------------------------------------------------------------------------------
// The page
// ---------------------------------------------------------------------------------------------------------------------

function drawMetrics() {
  const { tokens, cycles, accepted, verified, alpha, acceptLength, theory, equal } = state.run.metrics;
  const number = (value) => (value === null ? "–" : value.toFixed(2));
  const tiles = [
    [term("alpha", "alpha"), number(alpha), `${accepted} of ${verified} drafts`],
    [term("accept-length", "L_acc"), number(acceptLength), `at most ${numStages()}`],
    [term("accept-length", "theoretical speed-up"), theory === null ? "–" : `${theory.toFixed(2)} ×`, ""],
    [term("cycle", "cycles"), String(cycles), ""],
    ["tokens", String(tokens), equal ? "the same as standard's" : "others than standard's"],
  ];
  byId("metrics").replaceChildren(
    ...tiles.map(([name, value, note]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, note))),
    ),
  );
}

function showRun(run) {
  setPlaying(false);
  setRacing(false);
  Object.assign(state, { run, cycle: 0, row: Math.min(1, run.stages.length) });
  for (const id of ["canvas", "text", "lanes"]) byId(id).replaceChildren();
  columns.clear();
  totals = totalsOf(run);
  byId("scroller").scrollLeft = 0;
  byId("prompt").textContent = run.prompt;
  drawMetrics();
  drawLabels();
  drawRace();
  byId("charts").replaceChildren(fillChart(), runChart(), timeChart());
  // At first, as many cycles as fit: there is something to see.
  const inSight = Math.floor(byId("scroller").clientWidth / columnWidth()) - 1;
  if (run.cells.length) goTo(Math.max(0, inSight));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { target } = event;
  if (target.closest("select, input, a, #race") || (event.key === " " && target.closest("button"))) return;
  const actions = {
    " ": () => setPlaying(!state.playing),
    ArrowRight: () => select(state.cycle + 1, state.row),
    ArrowLeft: () => select(state.cycle - 1, state.row),
    ArrowDown: () => select(state.cycle, state.row + 1),
    ArrowUp: () => select(state.cycle, state.row - 1),
    Home: () => select(0, state.row),
    End: () => select(lastCycle(), state.row),
    "+": () => setRate(state.rate + 1),
    "-": () => setRate(state.rate - 1),
    r: () => nextRejection(),
    R: () => nextRejection(-1),
  };
  if (!(event.key in actions) || !state.run.cells.length) return;
  event.preventDefault();
  if (event.key !== " " && event.key !== "+" && event.key !== "-") setPlaying(false);
  actions[event.key]();
}

function listen() {
  const pressed = {
    home: () => select(0, state.row),
    back: () => select(state.cycle - 1, state.row),
    step: () => select(state.cycle + 1, state.row),
    end: () => select(lastCycle(), state.row),
    rejection: () => nextRejection(),
  };
  for (const [id, action] of Object.entries(pressed)) {
    byId(id).addEventListener("click", () => {
      setPlaying(false);
      if (state.run.cells.length) action();
    });
  }
  byId("play").addEventListener("click", () => setPlaying(!state.playing));
  byId("slower").addEventListener("click", () => setRate(state.rate - 1));
  byId("faster").addEventListener("click", () => setRate(state.rate + 1));
  byId("scroller").addEventListener("scroll", () => requestAnimationFrame(drawColumns), { passive: true });
  window.addEventListener("resize", () => requestAnimationFrame(drawColumns));
  document.addEventListener("keydown", onKey);
  byId("race-play").addEventListener("click", () => setRacing(!race.playing));
  byId("race-restart").addEventListener("click", () => setRaceTime(0));
  byId("race-time").addEventListener("input", (event) => {
    setRacing(false);
    setRaceTime((Number(event.target.value) / 1000) * race.length);
  });
  byId("prompts").addEventListener("change", (event) => showRun(DATA.runs[event.target.selectedIndex]));
}

function start() {
  byId("title").textContent = DATA.title;
  byId("facts").append(...DATA.facts.map((fact) => element("li", {}, fact)));
  byId("prompts").append(
    ...DATA.runs.map(({ prompt }, index) => element("option", {}, `${index + 1}: ${prompt.slice(0, 80)}`)),
  );
  byId("choice").hidden = DATA.runs.length < 2;
  const idle = element("li", {}, element("span", { class: "swatch" }, "▨ "), term("idle", "idle"));
  const fates = Object.entries(MARKS).map(([fate, [mark, name]]) =>
    element("li", {}, element("span", { class: `token ${fate}` }, mark), term(fate, name)),
  );
  byId("legend").append(...fates, idle);
  setRate(state.rate);
  listen();
  showRun(DATA.runs[0]);
}

start();
