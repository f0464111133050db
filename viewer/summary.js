// The page of an evaluation: runs, their plots, prompts, and answers.

const decimal = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const times = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(2)} ×`);
const RUN_COLUMNS = [
  ["run", ({ label }) => label, (run, index) => link(`#run-${index}`, run.label)],
  ["prompts", ({ samples }) => samples],
  ["alpha", ({ alpha }) => alpha, ({ alpha }) => decimal(alpha)],
  ["L_acc", ({ acceptLength }) => acceptLength, ({ acceptLength }) => decimal(acceptLength)],
  ["theory", ({ theory }) => theory, ({ theory }) => times(theory)],
  ["ideal", ({ ideal }) => ideal, ({ ideal }) => times(ideal)],
  ["wall-clock", ({ wallClock }) => wallClock, ({ wallClock }) => times(wallClock)],
  ["equal", ({ equal }) => equal, ({ equal, compared }) => (compared ? `${equal} of ${compared}` : "–")],
  ["failed", ({ failed }) => failed],
];
const PROMPT_COLUMNS = [
  ["data set", ({ dataset }) => dataset],
  ["question", ({ id }) => id, ({ id, run, number }) => link(`#run-${run}-prompt-${number}`, String(id))],
  ["text", ({ question }) => question, ({ question }) => question.slice(0, 70)],
  ["tokens", ({ tokens }) => tokens],
  ["alpha", ({ alpha }) => alpha, ({ alpha }) => decimal(alpha)],
  ["L_acc", ({ acceptLength }) => acceptLength, ({ acceptLength }) => decimal(acceptLength)],
  ["ideal", ({ ideal }) => ideal, ({ ideal }) => times(ideal)],
  ["wall-clock", ({ wallClock }) => wallClock, ({ wallClock }) => times(wallClock)],
  ["longest run", ({ acceptedRuns }) => Math.max(0, ...acceptedRuns)],
];

const link = (href, text) => element("a", { href }, text);

/** Order of two values; what is missing comes last. */
function compare(first, second) {
  if (first === null || second === null) return Number(first === null) - Number(second === null);
  if (typeof first === "number" && typeof second === "number") return first - second;
  return String(first).localeCompare(String(second), undefined, { numeric: true });
}

/** Fill a table. Columns are [heading, value to sort by, content of a cell]; headings sort, the second time downwards. */
function drawTable(table, columns, rows, sorted = null, downwards = false) {
  const order = rows.map((row, index) => [row, index]);
  if (sorted !== null) {
    const valueOf = columns[sorted][1];
    order.sort(([a], [b]) => {
      const missing = valueOf(a) === null || valueOf(b) === null;
      return compare(valueOf(a), valueOf(b)) * (downwards && !missing ? -1 : 1);
    });
  }
  const headings = columns.map(([name], index) => {
    const direction = index === sorted ? (downwards ? "descending" : "ascending") : undefined;
    const arrow = { ascending: " ▲", descending: " ▼" }[direction] ?? "";
    const onclick = () => {
      drawTable(table, columns, rows, index, index === sorted && !downwards);
      table.querySelectorAll("th button")[index].focus();
    };
    return element("th", { "aria-sort": direction }, element("button", { onclick }, name + arrow));
  });
  const lines = order.map(([row, index]) =>
    element("tr", {}, ...columns.map(([, value, show = value]) => element("td", {}, show(row, index) ?? "–"))),
  );
  table.replaceChildren(element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...lines));
}

function showRun(number) {
  const run = DATA.runs[number];
  byId("run-title").textContent = run.label;
  byId("settings").textContent = run.settings.join(", ");
  byId("plots").hidden = run.plots === null;
  if (run.plots) byId("plots").src = run.plots;
  const prompts = run.prompts.map((prompt, index) => ({ ...prompt, run: number, number: index }));
  drawTable(byId("prompts"), PROMPT_COLUMNS, prompts);
}

function showAnswer(run, number) {
  const { dataset, id, question, text, error, tokens, stop, equal, acceptedRuns } = DATA.runs[run].prompts[number];
  byId("answer").hidden = false;
  byId("answer-title").textContent = `${dataset}, question ${id}`;
  byId("question").textContent = question;
  const same = { true: "; the same as the target alone", false: "; NOT the same as the target alone" }[equal] ?? "";
  byId("outcome").textContent = error ? `Failed: ${error}` : `${tokens} tokens (${stop})${same}`;
  byId("text").textContent = text;
  const top = Math.max(1, ...acceptedRuns);
  const rows = acceptedRuns.map((length) => ["", length, acceptedRuns.length < 40 ? String(length) : ""]);
  const drawing = rows.length ? bars(rows, top, `Accepted runs: ${acceptedRuns.join(", ")}`) : "No draft was verified.";
  byId("accepted-runs").replaceChildren(drawing);
}

/** The address says what is shown: #run-2, #run-2-prompt-5. */
function follow() {
  const [, run, prompt] = location.hash.match(/^#run-(\d+)(?:-prompt-(\d+))?$/) ?? [];
  const known = DATA.runs[run] ?? null;
  showRun(known ? Number(run) : 0);
  byId("answer").hidden = true;
  if (!known) return;
  if (known.prompts[prompt]) showAnswer(Number(run), Number(prompt));
  const target = byId(known.prompts[prompt] ? "answer" : "run");
  target.focus({ preventScroll: true });
  target.scrollIntoView();
}

function startSummary() {
  byId("title").textContent = DATA.title;
  drawTable(byId("runs"), RUN_COLUMNS, DATA.runs);
  window.addEventListener("hashchange", follow);
  follow();
}

startSummary();
