// The page of an evaluation: runs, their plots, prompts, and answers. evaluation/summary_page.py says what they have.

/** Order of two values, upwards (1) or downwards (-1); what is missing comes last. */
function compare(first, second, direction) {
  if (first === null || second === null) return Number(first === null) - Number(second === null);
  if (typeof first === "number" && typeof second === "number") return direction * (first - second);
  return direction * String(first).localeCompare(String(second), undefined, { numeric: true });
}

/** Fill a table with rows of cells, each {value, text, link}. A heading sorts, the second time downwards. */
function drawTable(table, headings, rows, sorted = -1, direction = 1) {
  const order = [...rows];
  if (sorted >= 0) order.sort((a, b) => compare(a[sorted].value, b[sorted].value, direction));
  const buttons = headings.map((name, index) => {
    const here = index === sorted;
    const onclick = () => {
      drawTable(table, headings, rows, index, here ? -direction : 1);
      table.querySelectorAll("th button")[index].focus();
    };
    const [order, arrow] = !here ? [] : direction > 0 ? ["ascending", " ▲"] : ["descending", " ▼"];
    return element("th", { "aria-sort": order }, element("button", { onclick }, name + (arrow ?? "")));
  });
  const lines = order.map((cells) => {
    const shown = cells.map((cell) => element("td", {}, cell.link ? link(cell.link, cell.text) : cell.text));
    return element("tr", {}, ...shown);
  });
  table.replaceChildren(element("thead", {}, element("tr", {}, ...buttons)), element("tbody", {}, ...lines));
}

function showRun({ label, settings, plots, prompts }) {
  byId("run-title").textContent = label;
  byId("settings").textContent = settings.join(", ");
  byId("plots").hidden = plots === null;
  if (plots) byId("plots").src = plots;
  const rows = prompts.map(({ cells }) => cells);
  drawTable(byId("prompts"), DATA.promptHeadings, rows);
}

function showAnswer({ title, question, outcome, text, acceptedRuns }) {
  byId("answer-title").textContent = title;
  byId("question").textContent = question;
  byId("outcome").textContent = outcome;
  byId("text").textContent = text;
  const most = Math.max(1, ...acceptedRuns);
  const rows = acceptedRuns.map((length) => ["", length / most, acceptedRuns.length < 40 ? String(length) : ""]);
  const drawing = rows.length ? bars(rows, `Accepted runs: ${acceptedRuns.join(", ")}`) : "No draft was verified.";
  byId("accepted-runs").replaceChildren(drawing);
}

/** The address says what is shown: #run-2, #run-2-prompt-5. */
function follow() {
  const [, number, prompt] = location.hash.match(/^#run-(\d+)(?:-prompt-(\d+))?$/) ?? [];
  const run = DATA.runs[number];
  const answer = run?.prompts[prompt];
  showRun(run ?? DATA.runs[0]);
  byId("answer").hidden = !answer;
  if (answer) showAnswer(answer);
  if (!run) return;
  const target = byId(answer ? "answer" : "run");
  target.focus({ preventScroll: true });
  target.scrollIntoView();
}

function start() {
  byId("title").textContent = DATA.title;
  const rows = DATA.runs.map(({ cells }) => cells);
  drawTable(byId("runs"), DATA.runHeadings, rows);
  window.addEventListener("hashchange", follow);
  follow();
}

start();
