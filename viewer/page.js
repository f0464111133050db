// The page of recorded runs. viewer/page.py says what a run has.

const MARKS = {
  accepted: ["✓", "accepted"],
  corrected: ["✎", "corrected"],
  flushed: ["✕", "flushed"],
  first: ["▸", "first, by the prompt"],
  open: ["…", "not judged"],
};
const RATES = [0.5, 1, 2, 4, 8, 16, 32, 60]; // cycles a second
const OVERSCAN = 4; // columns drawn beyond the visible ones

const milliseconds = (seconds) => `${(seconds * 1e3).toPrecision(3)} ms`;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const term = (id, text) => link(`#term-${id}`, text);
/** A token's text with its blanks made visible. */
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

/** A button that plays. advance(seconds) says whether there is more; rewind() goes to the start if there is not. */
function player(button, rewind, advance) {
  let [playing, before] = [false, 0];
  const tick = (now) => {
    if (!playing) return;
    if (!advance((now - before) / 1e3)) return set(false);
    before = now;
    requestAnimationFrame(tick);
  };
  const set = (wanted) => {
    playing = wanted;
    button.textContent = playing ? "Pause" : "▶ Play";
    if (!playing) return;
    rewind();
    before = performance.now();
    requestAnimationFrame(tick);
  };
  const toggle = () => set(!playing);
  button.addEventListener("click", toggle);
  return { toggle, stop: () => set(false) };
}

// ---------------------------------------------------------------------------------------------------------------------
// The staircase: row 0 is the head, then come the stages, and the verdict
// ---------------------------------------------------------------------------------------------------------------------

const state = { run: null, cycle: 0, row: 0, rate: 2, owed: 0 }; // owed: cycles that playing has not shown yet
const columns = new Map(); // cycle -> its element, of those that are drawn

const lastCycle = () => state.run.cells.length - 1;
const verdictRow = () => state.run.stages.length + 1;
const rowName = (row) => (row === verdictRow() ? "verdict" : state.run.parts[row].name);
const columnWidth = () => byId("canvas").clientWidth / state.run.cells.length;

/** Numbers of the tokens of a cell. */
function tokensAt(cycle, row) {
  if (row === 0) return state.run.drafts[cycle];
  return row === verdictRow() ? state.run.verdicts[cycle] : state.run.cells[cycle][row - 1];
}

function describe(cycle, row) {
  const { text, position, fate } = state.run.tokens;
  const shown = tokensAt(cycle, row).map(
    (number) => `"${text[number]}", position ${position[number]}, ${MARKS[fate[number]][1]}`,
  );
  return `Cycle ${cycle}, ${rowName(row)}: ${shown.join("; ") || "idle"}`;
}

function tokenElement(number, cycle) {
  const { text, fate, died } = state.run.tokens;
  return element(
    "span",
    { class: `token ${fate[number]}${died[number] === cycle ? " dies" : ""}`, "data-token": number },
    element("span", { class: "word" }, visible(text[number])),
    element("span", { class: "mark" }, MARKS[fate[number]][0]),
  );
}

function cellElement(cycle, row) {
  const tokens = tokensAt(cycle, row);
  const attributes = {
    class: tokens.length ? "cell" : "cell idle",
    role: "button",
    "aria-label": describe(cycle, row),
    onclick: () => select(cycle, row, true),
    onfocus: () => showDetails(cycle, row),
    onmouseenter: () => showDetails(cycle, row),
    onmouseleave: () => showDetails(state.cycle, state.row),
  };
  return element("div", attributes, ...tokens.map((number) => tokenElement(number, cycle)));
}

function drawColumn(cycle) {
  const column = element("div", { class: "column", style: `--cycle: ${cycle}` });
  column.append(element("div", { class: "number" }, String(cycle)));
  for (let row = 0; row <= verdictRow(); row++) {
    column.append(element("div", { class: row === verdictRow() ? "row verdict" : "row" }, cellElement(cycle, row)));
  }
  columns.set(cycle, column);
  byId("canvas").append(column);
}

/** Draw the columns in sight, and only those: a run may have thousands. Mark the present cycle and selected cell. */
function drawColumns() {
  const { scrollLeft, clientWidth } = byId("scroller");
  const first = clamp(Math.floor(scrollLeft / columnWidth()) - OVERSCAN, 0, lastCycle());
  const last = clamp(Math.ceil((scrollLeft + clientWidth) / columnWidth()) + OVERSCAN, 0, lastCycle());
  for (const [cycle, column] of columns) {
    if (cycle >= first && cycle <= last) continue;
    column.remove();
    columns.delete(cycle);
  }
  for (let cycle = first; cycle <= last; cycle++) {
    if (!columns.has(cycle)) drawColumn(cycle);
  }
  for (const [cycle, column] of columns) {
    column.classList.toggle("now", cycle === state.cycle);
    column.classList.toggle("future", cycle > state.cycle);
    column.querySelectorAll(".cell").forEach((cell, row) => {
      const selected = cycle === state.cycle && row === state.row;
      cell.classList.toggle("selected", selected);
      cell.tabIndex = selected ? 0 : -1;
    });
  }
}

function drawLabels() {
  const labels = [element("div", { class: "number" }, "cycle")];
  for (let row = 0; row <= verdictRow(); row++) {
    const layers = state.run.layers[row - 1];
    const note = layers ? [element("span", {}, "layers "), layers] : [row ? "" : "drafts"];
    const kind = row === verdictRow() ? "row verdict" : "row";
    labels.push(element("div", { class: kind }, rowName(row), element("small", {}, ...note)));
  }
  byId("labels").replaceChildren(...labels);
  const stacked = Math.max(1, ...state.run.drafts.map((numbers) => numbers.length));
  const sizes = { cycles: state.run.cells.length, rows: verdictRow(), stacked };
  for (const [name, size] of Object.entries(sizes)) byId("staircase").style.setProperty(`--${name}`, size);
}

/** Go to a cycle. The staircase scrolls if it is out of sight; with `follow`, it runs along. */
function goTo(cycle, follow = false) {
  if (!state.run.cells.length) return;
  state.cycle = clamp(cycle, 0, lastCycle());
  const scroller = byId("scroller");
  const { scrollLeft, clientWidth } = scroller;
  const left = state.cycle * columnWidth();
  const hidden = left < scrollLeft || left + columnWidth() > scrollLeft + clientWidth;
  if (follow) scroller.scrollLeft = Math.max(scrollLeft, left - clientWidth * 0.7);
  else if (hidden) scroller.scrollLeft = left - clientWidth * 0.4;
  drawColumns();
  drawText();
  byId("where").textContent = `cycle ${state.cycle} of ${lastCycle()}`;
  showDetails(state.cycle, state.row);
}

/** Select a cell; with `focus`, or if a cell has it already, the keyboard's focus goes there. */
function select(cycle, row, focus = false) {
  playback.stop();
  const held = focus || document.activeElement?.classList.contains("cell");
  state.row = clamp(row, 0, verdictRow());
  goTo(cycle);
  if (held) document.querySelector(".cell.selected")?.focus({ preventScroll: true });
}

const playback = player(
  byId("play"),
  () => state.cycle >= lastCycle() && goTo(0),
  (seconds) => {
    state.owed += seconds * RATES[state.rate];
    if (state.owed >= 1) goTo(state.cycle + Math.floor(state.owed), true);
    state.owed %= 1;
    return state.cycle < lastCycle();
  },
);

function setRate(index) {
  state.rate = clamp(index, 0, RATES.length - 1);
  byId("rate").textContent = `${RATES[state.rate]} cycles/s`;
}

/** Make a text's pieces those of the first `count` tokens. */
function setPieces(box, { pieces, fates }, count) {
  while (box.childElementCount > count) box.lastElementChild.remove();
  for (let index = box.childElementCount; index < count; index++) {
    box.append(element("span", { class: `piece ${fates[index]}` }, pieces[index]));
  }
  box.scrollTop = box.scrollHeight;
}

/** Text and counts until the present cycle. */
function drawText() {
  const counts = Object.entries(state.run.totals).map(([fate, totals]) => [fate, totals[state.cycle]]);
  const { accepted, corrected } = Object.fromEntries(counts);
  setPieces(byId("text"), state.run.lanes[1], 1 + accepted + corrected);
  const shown = counts.map(([fate, number]) =>
    element("span", {}, `${MARKS[fate][0]} `, element("b", { "data-count": fate }, String(number)), ` ${fate}`),
  );
  byId("counts").replaceChildren(...shown, element("span", {}, "until this cycle"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Details of a cell
// ---------------------------------------------------------------------------------------------------------------------

/** Tokens and how likely the head found them, as bars: [text, probability, fate]. */
function chances(rows) {
  const lines = rows.map(([text, probability, fate]) => {
    const value = `${probability?.toFixed(3) ?? "–"} ${MARKS[fate]?.[0] ?? ""}`;
    return [visible(text), probability ?? 0, value, fate];
  });
  return meters(lines, "words");
}

/** Seconds of the parts of a cycle, as bars; one row's can be pointed out. */
function timesOf(secondsOf, here = -1) {
  const shown = state.run.parts.map((part, row) => [part, secondsOf(part), row]).filter(([, seconds]) => seconds);
  const longest = Math.max(...shown.map(([, seconds]) => seconds));
  return meters(
    shown.map(([{ name, kind }, seconds, row]) => {
      return [name, seconds / longest, milliseconds(seconds), row === here ? `${kind} here` : kind];
    }),
  );
}

function whyEmpty(cycle, row) {
  if (row === verdictRow()) return "No verdict: nothing that counts has left the last stage.";
  if (row === 0) return "No draft: the text ends before its position.";
  const ran = state.run.parts[row].seconds[cycle] > 0;
  return ran ? "Idle: it still ran what had been flushed, for nothing." : "Idle: no token here.";
}

/** What became of a token, and which one it continues. */
function outcomeLine(number) {
  const { text, parent, fate, outcome } = state.run.tokens;
  const word = element("span", { class: "word" }, visible(text[number]));
  const chip = element("span", { class: `token ${fate[number]}` }, word);
  const after = parent[number] < 0 ? "" : `, after "${visible(text[parent[number]])}"`;
  return element("p", {}, chip, ` ${MARKS[fate[number]][0]} ${outcome[number]}${after}`);
}

function showDetails(cycle, row) {
  const { text, probability, fate, origin } = state.run.tokens;
  const tokens = tokensAt(cycle, row);
  const { others, rows } = state.run.heads[cycle];
  const parts = [element("h3", {}, `Cycle ${cycle}, ${rowName(row)}`)];
  parts.push(element("p", {}, tokens.length ? origin[tokens[0]] : whyEmpty(cycle, row)), ...tokens.map(outcomeLine));
  const likely = tokens.map((number) => [text[number], probability[number], fate[number]]);
  if (row === 0 && tokens.length) {
    const title = term("candidate", "Candidates, and how likely the head found them");
    parts.push(element("h4", {}, title), chances([...likely, ...others]));
    const chips = rows.map(([span, type]) => element("span", {}, `${span}: g`, element("sub", {}, String(type))));
    if (chips.length) parts.push(element("h4", {}, term("row", "Rows that the head saw, and their types")));
    parts.push(element("div", { class: "chips" }, ...chips));
  } else if (tokens.some((number) => probability[number] !== null)) {
    parts.push(element("h4", {}, term("candidate", "How likely the head found it")), chances(likely));
  }
  parts.push(
    element("h4", {}, "Times of this cycle"),
    timesOf(({ seconds }) => seconds[cycle], row),
  );
  byId("details").replaceChildren(...parts);
}

// ---------------------------------------------------------------------------------------------------------------------
// The race
// ---------------------------------------------------------------------------------------------------------------------

const race = { time: 0, length: 0, lanes: [] };

function drawRace() {
  const standard = state.run.lanes[0].speed;
  race.lanes = state.run.lanes.map((lane, index) => {
    const ratio = index && standard && lane.speed ? `, ${(lane.speed / standard).toFixed(2)} × standard` : "";
    const speed = lane.speed ? `${lane.speed.toFixed(1)} tokens/s${ratio}` : "no decode step";
    const box = element("div", { class: index ? "written" : "written plain", tabindex: 0, "aria-label": lane.name });
    const progress = element("progress", { max: lane.pieces.length, "aria-label": `Tokens of ${lane.name}` });
    const heading = element("h3", {}, element("span", {}, lane.name), element("span", {}, speed));
    const [note, count] = [element("p", { class: "note" }, lane.note), element("span")];
    byId("lanes").append(element("div", { class: "lane" }, heading, note, progress, count, box));
    return { ...lane, box, progress, count, end: lane.times.at(-1) };
  });
  const ends = race.lanes.map(({ end }) => end);
  race.length = Math.max(...ends);
  setRaceTime(Math.min(...ends)); // the moment at which the fastest lane ends: who is ahead shows at once
}

function setRaceTime(time) {
  race.time = clamp(time, 0, race.length);
  byId("race-now").textContent = `${race.time.toFixed(2)} s`;
  byId("race-time").value = race.length ? (1000 * race.time) / race.length : 1000;
  for (const lane of race.lanes) {
    const shown = lane.times.filter((seconds) => seconds <= race.time).length;
    setPieces(lane.box, lane, shown);
    lane.progress.value = shown;
    const done = shown === lane.pieces.length ? `, done after ${lane.end.toFixed(2)} s` : "";
    lane.count.textContent = `${shown} of ${lane.pieces.length} tokens${done}`;
  }
}

const racing = player(
  byId("race-play"),
  () => race.time >= race.length && setRaceTime(0),
  (seconds) => {
    setRaceTime(race.time + seconds * Number(byId("race-rate").value));
    return race.time < race.length;
  },
);

// ---------------------------------------------------------------------------------------------------------------------
// The page
// ---------------------------------------------------------------------------------------------------------------------

function drawMetrics() {
  const tiles = state.run.metrics.map(([id, name, value, note]) => {
    const figure = element("dd", {}, `${value} `, element("small", {}, note));
    return element("div", {}, element("dt", {}, id ? term(id, name) : name), figure);
  });
  byId("metrics").replaceChildren(...tiles);
}

function drawCharts() {
  for (const [name, { rows, note }] of Object.entries(state.run.charts)) {
    byId(`${name}-bars`).replaceChildren(bars(rows, note));
    byId(`${name}-note`).textContent = note;
  }
  byId("mean-times").replaceChildren(timesOf(({ mean }) => mean));
}

function showRun(run) {
  playback.stop();
  racing.stop();
  Object.assign(state, { run, cycle: 0, row: 1 });
  for (const id of ["canvas", "text", "lanes"]) byId(id).replaceChildren();
  columns.clear();
  byId("scroller").scrollLeft = 0;
  byId("prompt").textContent = run.prompt;
  drawMetrics();
  drawLabels();
  drawRace();
  drawCharts();
  goTo(Math.floor(byId("scroller").clientWidth / columnWidth()) - 1); // as many cycles as fit: something to see
}

function showVerdict(cycle) {
  if (cycle !== undefined) select(cycle, verdictRow());
}

// What keys do. A button that does the same names its key.
const ACTIONS = {
  " ": () => playback.toggle(),
  ArrowRight: () => select(state.cycle + 1, state.row),
  ArrowLeft: () => select(state.cycle - 1, state.row),
  ArrowDown: () => select(state.cycle, state.row + 1),
  ArrowUp: () => select(state.cycle, state.row - 1),
  Home: () => select(0, state.row),
  End: () => select(lastCycle(), state.row),
  "+": () => setRate(state.rate + 1),
  "-": () => setRate(state.rate - 1),
  r: () => showVerdict(state.run.rejections.find((cycle) => cycle > state.cycle)),
  R: () => showVerdict(state.run.rejections.findLast((cycle) => cycle < state.cycle)),
};

function onKey(event) {
  const { target, key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || !(key in ACTIONS)) return;
  if (target.closest("select, input, a, #race") || (key === " " && target.closest("button"))) return;
  event.preventDefault();
  ACTIONS[key]();
}

function listen() {
  document.addEventListener("keydown", onKey);
  for (const button of document.querySelectorAll("button[data-key]")) {
    button.addEventListener("click", ACTIONS[button.dataset.key]);
  }
  byId("scroller").addEventListener("scroll", () => requestAnimationFrame(drawColumns), { passive: true });
  window.addEventListener("resize", () => requestAnimationFrame(drawColumns));
  byId("race-restart").addEventListener("click", () => setRaceTime(0));
  byId("race-time").addEventListener("input", (event) => {
    racing.stop();
    setRaceTime((Number(event.target.value) / 1000) * race.length);
  });
  byId("prompts").addEventListener("change", (event) => showRun(DATA.runs[event.target.selectedIndex]));
}

function start() {
  byId("title").textContent = DATA.title;
  byId("facts").append(...DATA.facts.map((fact) => element("li", {}, fact)));
  const options = DATA.runs.map(({ prompt }, index) => element("option", {}, `${index + 1}: ${prompt.slice(0, 80)}`));
  byId("prompts").append(...options);
  byId("choice").hidden = options.length < 2;
  const fates = Object.entries(MARKS).map(([fate, [mark, name]]) =>
    element("li", {}, element("span", { class: `token ${fate}` }, mark), term(fate, name)),
  );
  byId("legend").prepend(...fates);
  setRate(state.rate);
  listen();
  showRun(DATA.runs[0]);
}

start();
