"""The page that shows a run: what is recorded, what is derived from it, and what a real browser draws.

The tests of the second part run in a headless Chromium, and are skipped where there is none.
"""

import hashlib
import json
import re
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections import Counter, deque

import pytest

import eval as evaluation
from decoding.tree import TokenTree
from evaluation.files import RunFiles, read_runs
from evaluation.metrics import summarise
from evaluation.summary_page import write_summary_page
from pipeline_inference import Decoder, LocalExecutor, build_parser, check_arguments, main
from pipeline_model import Target, save_head
from script_utils import write_json
from tests.test_metrics import COSTS, hand_made_rows
from tests.tiny import (
    ScriptedDrafter,
    hf_greedy,
    oracle,
    random_prompt,
    save_target,
    spd_decoder,
    tiny_head,
    tiny_target,
)
from viewer.page import Setting, as_json, page, run_of
from viewer.recording import Fate, Token, set_fates, staircase, tokens_of

SIZES = (1, 2, 1)
COUNT = 24
HOSTILE = "</script><script>document.title='HACKED'</script><img src=x onerror=\"document.title='HACKED'\">"
SETTING = Setting(HOSTILE, [HOSTILE, "n = 3"], "here", HOSTILE, num_spec_layers=1)


class Words:
    """A tokenizer whose tokens are dangerous."""

    all_special_ids = ()

    def decode(self, ids, **_):
        return "".join(f" {HOSTILE if token % 7 == 0 else f'w{token}'}" for token in ids)


class Watched(LocalExecutor):
    """Moves tokens through stages as a list: what each stage ran in each cycle, as (token, position)."""

    def start(self, *args):
        self.flights, self.ran = deque([[]] * len(self.stage_sizes), maxlen=len(self.stage_sizes)), []
        return super().start(*args)

    def begin_cycle(self, position, entering):
        self.flights.appendleft(list(entering))
        return super().begin_cycle(position, entering)

    def finish_cycle(self):
        self.ran.append([[(node.token, node.position) for node in flight] for flight in self.flights])
        return super().finish_cycle()

    def roll_back(self, dead):
        self.flights = deque(
            ([node for node in flight if node.id not in dead] for flight in self.flights), maxlen=len(self.stage_sizes)
        )
        super().roll_back(dead)


def generations(width=1, lag=0, watched=False, count=COUNT):
    """The target alone and a pipeline whose drafts are right and wrong, both recorded; and what was flushed."""
    target, prompt = tiny_target("llama"), random_prompt(5)
    sequence = prompt + hf_greedy(target.model, prompt, count + 8)
    drafter = ScriptedDrafter(oracle(sequence, rank=lambda position: [0, 0, 1, 9][position % 4], width=width))
    executor = (Watched if watched else LocalExecutor)(target, SIZES)
    settings = {"keep_trace": True, "keep_head": True}
    pipeline = Decoder(executor, drafter.with_prompt(prompt), draft_top_k=width, verify_lag=lag, **settings).start(
        prompt, count
    )
    pipeline.finish()
    alone = Decoder(LocalExecutor(target, (4,)), **settings).start(prompt, count)
    alone.finish()
    return {"standard": alone, "pipeline": pipeline}


def run(prompt="Hello", **settings):
    return shown(generations(**settings), prompt)


def shown(both, prompt="x"):
    return run_of(prompt, both["standard"].recording, both["pipeline"].recording, SETTING, Words())


# ---------------------------------------------------------------------------------------------------------------------
# Recording, and what follows from it
# ---------------------------------------------------------------------------------------------------------------------


def test_a_staircase_by_hand():
    """Guards against tokens that stay a cycle too long after a rejection, or stages that are mixed up.

    Two stages. The prompt gives a; b and c are drafted after it; the target wants x in the place of b.
    """
    a, b, c = Token(1, 5, None, entered=0), Token(2, 6, 0, drafted=0, entered=1), Token(3, 7, 1, drafted=1)
    x = Token(9, 6, 0, entered=2)
    tokens = [a, b, c, x]
    set_fates(tokens, [(0, -1), (3, 1)], [True, False])
    assert [token.fate for token in tokens] == [Fate.FIRST, Fate.FLUSHED, Fate.FLUSHED, Fate.CORRECTED]
    assert [token.died for token in tokens] == [None, 1, 1, None]
    assert staircase(tokens, 2, 4) == [[[0], []], [[1], [0]], [[3], []], [[], [3]]]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_cells_and_counts_are_those_of_the_run(width, lag, monkeypatch):
    """Guards against a page that shows other tokens in a stage than ran there, or other counts than were printed."""
    dropped = []
    commit = TokenTree.commit
    monkeypatch.setattr(TokenTree, "commit", lambda *args: dropped.append(commit(*args)) or dropped[-1])
    both = generations(width, lag, watched=True)
    pipeline, result = both["pipeline"], both["pipeline"].result
    assert result.tokens == both["standard"].result.tokens
    tokens = tokens_of(pipeline.recorder, result.accepted)
    cells = staircase(tokens, len(SIZES), result.cycles)
    shown = [[[(tokens[number].id, tokens[number].position) for number in cell] for cell in row] for row in cells]
    assert shown == pipeline._executor.ran
    counts = Counter(token.fate for token in tokens)
    assert counts[Fate.ACCEPTED] == result.n_accepted > 0
    assert counts[Fate.CORRECTED] == result.accepted.count(False) > 0
    assert counts[Fate.FLUSHED] == sum(map(len, dropped)) > 0
    assert counts[Fate.FIRST] == 1


def test_times_are_the_run_s_own():
    """Guards against a race in other times than the printed tokens/s and the ideal time of the evaluation."""
    both = generations()
    run, timings = shown(both), both["pipeline"].result.timings
    seconds = {part["name"]: part["seconds"] for part in run["parts"]}
    assert sum(seconds["whole cycle, as measured"]) == pytest.approx(timings.decode, abs=1e-4)
    assert sum(seconds["ideal: a device per stage"]) == pytest.approx(timings.ideal_decode, abs=1e-4)
    speeds = [lane["speed"] for lane in run["lanes"]]
    measured = [both[name].result.tokens_per_second for name in ("standard", "pipeline")]
    assert speeds == pytest.approx([*measured, (COUNT - 1) / timings.ideal_decode], rel=1e-3)
    for lane in run["lanes"]:
        assert lane["times"] == sorted(lane["times"])
        assert len(lane["times"]) == len(lane["pieces"]) == COUNT
        assert lane["times"][0] == 0
        assert lane["times"][-1] == pytest.approx((COUNT - 1) / lane["speed"], rel=1e-3)


@pytest.mark.parametrize("width", [1, 3])
def test_the_head_s_side_is_what_it_was(width):
    """Guards against probabilities of other tokens, and rows that the head did not see."""
    target, prompt = tiny_target("llama"), random_prompt(9)
    head = tiny_head(target, SIZES)
    plain = spd_decoder(target, head, draft_top_k=width).start(prompt, COUNT)
    kept = spd_decoder(target, head, draft_top_k=width, keep_trace=True, keep_head=True).start(prompt, COUNT)
    assert plain.finish().tokens == kept.finish().tokens
    assert plain.recorder is None
    tokens = tokens_of(kept.recorder, kept.result.accepted)
    for cycle, draft in enumerate(kept.recorder.drafts):
        drafted = [token for token in tokens if token.drafted == cycle]
        if not drafted:
            continue
        assert 0 < sum(token.probability for token in drafted) <= 1.0001 * len(drafted)
        positions = {position for position, _ in draft.rows.fed}
        newest = drafted[0].position - 1
        assert set(range(draft.rows.cached, newest + 1)) == positions
        assert all(kind == head.depth_types(SIZES)[0] for position, kind in draft.rows.fed if position == newest)
        if width == 1:
            ids, best = draft.best
            assert (drafted[0].id, drafted[0].probability) == (int(ids[0]), pytest.approx(float(best[0].exp())))


# ---------------------------------------------------------------------------------------------------------------------
# The page and its flag
# ---------------------------------------------------------------------------------------------------------------------


def test_no_text_ends_the_data():
    """Guards against a model's text that closes the element it stands in."""
    text = page(SETTING, [run(HOSTILE)])
    assert len(re.findall("<script", text)) == 2
    assert text.count("HACKED") == text.count("HACKED&") + text.count("\\u003c/script>\\u003cscript>document.title") * 2
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["runs"][0]["prompt"] == HOSTILE
    assert json.loads(as_json("<!--\u2028\ud800")) == "<!--\u2028\ud800"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target")
    save_head(tiny_head(Target.load(str(folder / "target")), (1, 3)), folder / "head.pt")
    return ["--base_model_path", str(folder / "target"), "--device", "cpu", "--spec_head_ckpt", str(folder / "head.pt")]


def test_the_command_line_writes_the_page_and_says_so(flags, tmp_path, capsys):
    """Guards against a page of one prompt alone, and a run that does not tell where its page is."""
    path = tmp_path / "demo.html"
    args = build_parser().parse_args([*flags, "--max_new_tokens", "9", "--html", str(path), "--prompt", "w5 w6", "w7"])
    assert main(args) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Page written to {path}: open it in a browser"
    [data] = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    shown = json.loads(data)
    assert [each["prompt"] for each in shown["runs"]] == ["w5 w6", "w7"]
    assert (shown["title"], shown["facts"][:3]) == ("target", ["head head.pt", "n = 2 stages", "W = 1"])


def test_the_flag_is_checked_before_anything_is_loaded(flags, tmp_path):
    """Guards against minutes of decoding whose page cannot be written, or has nothing to show."""
    for more, reason in ((flags, "--html '.*' cannot be written"), (flags[:4], "--html is about the pipeline")):
        with pytest.raises(ValueError, match=reason):
            check_arguments(build_parser().parse_args([*more, "--html", str(tmp_path / "missing" / "x.html")]))


# ---------------------------------------------------------------------------------------------------------------------
# In a browser
# ---------------------------------------------------------------------------------------------------------------------


# Presses keys as a user does, and reports what was drawn meanwhile.
DRIVER = """
const report = { errors: [], counts: {}, drawn: 0 };
window.addEventListener("error", (event) => report.errors.push(event.message));
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
Object.defineProperty(KeyboardEvent.prototype, "target", { get: () => document.body });
const at = (id) => document.getElementById(id).textContent;
const marked = () => document.querySelector(".column.now").querySelectorAll("[data-token]");
press("Home");
const seen = new Map();
for (let step = 0; step < STEPS; step++) {
  for (const token of marked()) seen.set(token.dataset.token, token.classList[1]);
  report.drawn = Math.max(report.drawn, document.querySelectorAll(".column").length);
  press("ArrowRight");
}
for (const fate of seen.values()) report.counts[fate] = (report.counts[fate] ?? 0) + 1;
report.shown = Object.fromEntries(
  [...document.querySelectorAll("[data-count]")].map((each) => [each.dataset.count, Number(each.textContent)]));
report.end = at("where");
report.text = at("text");
press("End");
report.last = at("where");
press("Home");
press("r");
report.rejection = [...marked()].filter((each) => each.classList.contains("dies")).length;
press("ArrowUp");
report.selected = document.querySelector(".cell.selected").getAttribute("aria-label");
report.details = at("details");
press("+");
report.rate = at("rate");
press(" ");
report.playing = at("play");
press(" ");
report.paused = at("play");
press("Home");
report.home = at("where");
report.overflow = document.documentElement.scrollWidth - window.innerWidth;
document.body.append(Object.assign(document.createElement("output"), { id: "report", textContent:
  "REPORT" + btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(report)))) + "END" }));
"""


def stepping(steps):
    return DRIVER.replace("STEPS", str(steps))


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in headless Chromium: its document when its scripts have run, and what it wrote to the console."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")

    def browse(text, width=1600, clock="--virtual-time-budget=2000"):
        folder = tmp_path_factory.mktemp("browser")
        (folder / "page.html").write_text(text)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
        options += [f"--user-data-dir={folder}/profile", f"--window-size={width},900", clock]
        done = subprocess.run(
            [program, *options, "--dump-dom", f"file://{folder}/page.html"], capture_output=True, text=True, timeout=120
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return browse


def driven(text, script):
    """The page with a driver at its end; the policy knows the driver, too."""
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert text.count("script-src ") == 1
    return text.replace("script-src ", f"script-src 'sha256-{digest}' ").replace(
        "</body>", f"<script>{script}</script>"
    )


def reported(document):
    [report] = re.findall(">REPORT([^<]*)END<", document)
    return json.loads(b64decode(report))


def test_dangerous_text_is_shown_and_never_runs(browse):
    """Guards against a model, a prompt or a file name that takes over the page of whoever looks at it."""
    document, console = browse(page(SETTING, [run(HOSTILE), run()]))
    assert console == []
    title = re.search("<title>(.*?)</title>", document, re.DOTALL)[1]
    assert title.startswith("&lt;/script&gt;")
    assert "<img" not in document
    assert document.count("&lt;img src=x") > 10


def test_a_run_without_a_cycle(browse):
    """Guards against an empty page for an answer that the prefill alone gave."""
    document, console = browse(page(SETTING, [run(count=1)]))
    assert console == []
    assert "1 of 1 tokens" in document


@pytest.mark.parametrize(("width", "lag", "screen"), [(1, 0, 1600), (3, 1, 400)])
def test_stepping_through_a_run_shows_its_counts(browse, width, lag, screen):
    """Guards against a page that draws other tokens than the run had, loses its keys, or is wider than the screen."""
    both = generations(width, lag)
    result, recorder = both["pipeline"].result, both["pipeline"].recorder
    document, console = browse(driven(page(SETTING, [shown(both)]), stepping(result.cycles)), screen)
    assert console == []
    report = reported(document)
    assert report["errors"] == []
    counts = Counter(token.fate for token in tokens_of(recorder, result.accepted))
    assert report["counts"] == {fate: count for fate, count in counts.items() if count}
    assert report["shown"] == {
        "accepted": result.n_accepted,
        "corrected": result.accepted.count(False),
        "flushed": counts[Fate.FLUSHED],
    }
    assert report["text"] == Words().decode(result.tokens)
    assert report["end"] == f"cycle {result.cycles - 1} of {result.cycles - 1}"
    assert report["rejection"] > 0
    assert report["selected"].startswith("Cycle ")
    assert "Times of this cycle" in report["details"]
    assert report["rate"] == "4 cycles/s"
    assert (report["playing"], report["paused"]) == ("Pause", "▶ Play")
    assert report["home"].startswith("cycle 0 of")
    assert report["overflow"] <= 0


def thousands_of_cycles():
    """A run of about 2,000 cycles: a short one, again and again."""
    long = run()
    times = 2000 // len(long["cells"]) + 1
    for lists in (long, long["totals"], *long["parts"]):
        for name in lists.keys() & {"cells", "drafts", "heads", "verdicts", "seconds", *Fate}:
            lists[name] = lists[name] * times
    assert len(long["cells"]) >= 2000
    return long


def test_thousands_of_cycles_draw_what_is_in_sight(browse):
    """Guards against a page of a long run that draws all of it."""
    long = thousands_of_cycles()
    last = len(long["cells"]) - 1
    document, console = browse(driven(page(SETTING, [long]), stepping(60)))
    report = reported(document)
    assert console == report["errors"] == []
    assert report["drawn"] < 40
    assert (report["end"], report["last"]) == (f"cycle 60 of {last}", f"cycle {last} of {last}")


# Scrolls by four columns a hundred times, and takes the time until they are laid out.
SCROLLER = """
const scroller = document.getElementById("scroller");
const taken = [];
for (let step = 0; step < 100; step++) {
  const before = performance.now();
  scroller.scrollLeft += 4 * columnWidth();
  drawColumns();
  document.getElementById("canvas").lastElementChild.getBoundingClientRect();
  taken.push(performance.now() - before);
}
document.body.append(Object.assign(document.createElement("output"), { textContent:
  "REPORT" + btoa(JSON.stringify({ median: taken.sort((a, b) => a - b)[50], left: scroller.scrollLeft })) + "END" }));
"""


@pytest.mark.alone
def test_thousands_of_cycles_scroll_smoothly(browse):
    """Guards against a page of a long run that takes longer for a scroll than a screen shows a picture, 1/60 s."""
    document, console = browse(driven(page(SETTING, [thousands_of_cycles()]), SCROLLER), clock="--timeout=60000")
    report = reported(document)
    assert console == []
    assert report["left"] > 30_000  # pixels: it did scroll
    assert 0 < report["median"] < 1000 / 60


# ---------------------------------------------------------------------------------------------------------------------
# The page of an evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluated(folder):
    """Two runs of an evaluation with hand-made rows, in an output folder; their names are dangerous."""
    settings = {"target": "t", "dtype": "float32", "device": "cpu", "placement": "one process", "max_new_tokens": 40}
    for name, worse in (("one", 0), ("two", 1)):
        files = RunFiles(folder, name)
        rows = hand_made_rows()[worse:]
        for row in rows:
            row["text"] = HOSTILE
            files.rows.append(row, {"settings": {}})
        write_json(files.summary, summarise(rows, settings | {"label": f"{name} {HOSTILE}"}, COSTS, 5))
    return read_runs(folder)


# Sorts the runs by alpha downwards, and opens an answer by its link.
SUMMARY_DRIVER = """
const order = () => [...document.querySelectorAll("#runs tbody tr")].map((row) => row.cells[0].textContent.slice(0, 3));
const report = { first: order() };
const alpha = () => document.querySelectorAll("#runs th button")[2];
alpha().click();
report.upwards = order();
alpha().click();
report.downwards = order();
report.sorted = alpha().parentElement.getAttribute("aria-sort");
location.hash = document.querySelector("#prompts tbody a").getAttribute("href").replace("run-0", "run-1");
window.addEventListener("hashchange", () => {
  report.title = document.getElementById("answer-title").textContent;
  report.text = document.getElementById("text").textContent;
  report.runs = document.querySelectorAll("#accepted-runs .block").length;
  report.prompts = document.querySelectorAll("#prompts tbody tr").length;
  document.body.append(Object.assign(document.createElement("output"), { textContent:
    "REPORT" + btoa(unescape(encodeURIComponent(JSON.stringify(report)))) + "END" }));
});
"""


def test_the_page_of_an_evaluation(browse, tmp_path, capsys):
    """Guards against runs and answers that are not in the page, cannot be sorted or opened, or run as code."""
    runs = evaluated(tmp_path / "out")
    write_summary_page(tmp_path / "page.html", HOSTILE, runs)
    assert capsys.readouterr().out.endswith(f"Page written to {tmp_path / 'page.html'}: open it in a browser\n")
    document, console = browse(driven((tmp_path / "page.html").read_text(), SUMMARY_DRIVER))
    assert console == []
    assert "<img src=x" not in document
    alphas = [summary["overall"]["alpha_pooled"] for _, summary in runs]
    assert alphas[0] != alphas[1]
    upwards = ["one", "two"] if alphas[0] < alphas[1] else ["two", "one"]
    assert reported(document) == {
        "first": ["one", "two"],
        "upwards": upwards,
        "downwards": upwards[::-1],
        "sorted": "descending",
        "title": "a, question 2",
        "text": HOSTILE,
        "runs": len(hand_made_rows()[1]["accepted_runs"]),
        "prompts": 3,
    }


def test_an_evaluation_writes_its_page(flags, tmp_path, capsys):
    """Guards against a page without the runs that were in the folder before, and one that is refused at the end."""
    arguments = [*flags[:2], *flags[4:], "--gpus", "cpu", "--max_new_tokens", "3", "--prompts_per_dataset", "2"]
    (tmp_path / "data" / "demo").mkdir(parents=True)
    questions = [json.dumps({"question_id": number, "category": "x", "turns": ["w5 w6"]}) for number in (1, 2)]
    (tmp_path / "data" / "demo" / "question.jsonl").write_text("\n".join(questions))
    arguments += ["--data_dir", str(tmp_path / "data"), "--datasets", "demo", "--output_dir", str(tmp_path / "out")]
    path = tmp_path / "page.html"
    for width in ("1", "2"):
        args = evaluation.build_parser().parse_args([*arguments, "--draft_top_k", width, "--html", str(path)])
        assert evaluation.main(args) == 0
    [data] = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    shown = json.loads(data)["runs"]
    assert [run["label"].split(", ")[-2] for run in shown] == ["W = 1", "W = 2"]
    assert all(run["plots"].startswith("data:image/png;base64,iVBOR") for run in shown)
    assert [prompt["question"] for prompt in shown[0]["prompts"]] == ["w5 w6"] * 2
    args = evaluation.build_parser().parse_args([*arguments, "--html", str(tmp_path / "missing" / "x.html")])
    (tmp_path / "missing").write_text("a file")
    with pytest.raises(ValueError, match=r"--html '.*' cannot be written"):
        evaluation.main(args)
