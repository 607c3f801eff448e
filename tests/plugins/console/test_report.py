"""`rlctl report`: the file that the command writes, opened in a real browser."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from rlctl.episodes import Episode, Message, Use
from rlctl.plugins.console.report import page as html
from rlctl.plugins.console.report.content import content
from rlctl.plugins.console.report.curves import MAX_POINTS, curves
from rlctl.recipes.layers import Origin
from rlctl.runs.events import alarms_of, read_events
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.tracking.metric_table import MetricTable
from rlctl.tracking.tracker import Sample
from tests.browser import chromium, problems_of
from tests.forks import completed
from tests.recorded import plain_environment, record

ACC = "val-core/arithmetic/acc/mean@1"
EVIL = (
    "</script><script>document.title='hacked'</script>"
    "<img src=x onerror=\"document.title='hacked'\"> {{script}} <!-- #### 3"
)
EPISODE = Episode(
    "done",
    (
        Message("assistant", EVIL, True, 7, 0.25, 0.5),
        Message("tool", EVIL, False, name=EVIL),
        Message("assistant", "#### 3", True, 5),
    ),
    (Use(EVIL, 0.5, "unknown"),),
    1.5,
    error=EVIL,
)


def sample(number: int, step: int) -> Sample:
    right = number < step
    return Sample(
        f"What is {number} + 1?",
        f"#### {number + 1}" if right else EVIL,
        number + 1,
        float(right),
        {"acc": float(right)},
        3 + number,
        "stop",
        "arithmetic",
        episode=EPISODE if number == 29 else None,
    )


def write_run(root: Path, name: str, lr: float) -> None:
    run = RunDir.create(root, "demo", name, "ppo")
    base = Origin(1e-6, "optim.yaml:2", 1)
    settings = {
        "actor_rollout_ref.actor.optim.lr": [base, Origin(lr, f"override …lr={lr}", 3)],
        "trainer.seed": [base, Origin(7, "/home/me/secret/recipes/ppo.yaml:9", 2)],
    }
    run.write_config("{}", settings)
    rows: dict[int, dict[str, float]] = {}
    for step in range(21):
        row = {"actor/grad_norm": float("nan") if step == 5 else 0.1 * step}
        if step:
            row |= {"critic/score/mean": 0.04 * step, "actor/entropy": math.exp(-step / 5)}
            row |= {"response_length/clip_ratio": 0.02 * step, "timing_s/gen": 1.0}
            row |= {"timing_s/update_actor": 0.5, "timing_s/step": 1.5}
            row |= {"perf/total_num_tokens": 1000}
        if step % 10 == 0:
            row |= {ACC: step / 25, "timing_s/testing": 2.0}
        rows[step] = row
    samples = {step: [sample(number, step) for number in range(30)] for step in (0, 10, 20)}
    record(run.path, rows, samples)
    run.event(
        "alarm",
        step=15,
        name="truncation",
        message="truncation: 30% of the answers",
        hint="a larger length",
        value=0.3,
        limit=0.3,
    )
    run.update(state="finished", exit_code=0, ended=run.record.created, total_steps=20)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work") / "runs"
    write_run(root, "first", 1e-5)
    write_run(root, "second", 2e-5)
    return root


def rlctl(cwd: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return completed([*arguments], cwd, plain_environment(**changes))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextmanager
def opened(browser: Browser, file: Path, **settings: Any) -> Iterator[Page]:
    """Open a report in a page that must not cause an error or a warning."""
    page = browser.new_page(**settings)
    problems = problems_of(page)
    page.goto(file.as_uri())
    yield page
    assert problems == []


@pytest.fixture(scope="module")
def page(browser: Browser, root: Path) -> Iterator[Page]:
    """On the report of both runs."""
    done = rlctl(root.parent, "report", "first", "second")
    assert (done.returncode, done.stdout) == (0, "report.html\n"), done.stderr
    size = {"width": 1300, "height": 900}
    with opened(browser, root.parent / "report.html", viewport=size) as page:
        yield page


def test_figures_are_drawn_without_console_errors(page: Page) -> None:
    titles = page.evaluate(
        "[...document.querySelectorAll('.chart h3')].map(each => each.textContent)"
    )
    assert titles == [
        *(
            "Reward",
            "Validation",
            "Entropy",
            "Truncated responses",
            "Gradient norms",
            "Time of a step",
        ),
        *("Time by phase, first", "Time by phase, second", "Any metric"),
    ]
    drawn = page.evaluate(
        "plots.map(({element}) => element.querySelectorAll("
        "'.scatterlayer .trace, .barlayer .trace').length)"
    )
    assert drawn == [2, 2, 2, 2, 2, 2, 3, 3, 2]
    reward = page.evaluate("plots[0].element.data.map(trace => [trace.name, trace.x, trace.y])")
    assert [name for name, _, _ in reward] == ["first", "second"]
    assert reward[0][1] == list(range(1, 21))
    assert reward[0][2] == pytest.approx([0.04 * step for step in range(1, 21)])
    norm = page.evaluate("plots[4].element.data[0].x")
    assert 5 not in norm
    assert len(norm) == 20  # NaN is a gap
    band = page.evaluate("plots[3].element.layout.shapes.map(shape => [shape.x0, shape.x1])")
    assert band == [[15, 20], [15, 20]]
    assert page.evaluate("document.title") == "first · second"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_one_legend_hides_a_run_everywhere(page: Page) -> None:
    count = "plots.map(({element}) => element.data.length)"
    assert page.evaluate("document.querySelectorAll('.legend').length") == 0
    page.evaluate("document.querySelectorAll('.chip')[1].click()")
    assert page.evaluate(count) == [1, 1, 1, 1, 1, 1, 3, 0, 1]
    page.evaluate("document.querySelectorAll('.chip')[1].click()")
    assert page.evaluate(count) == [2, 2, 2, 2, 2, 2, 3, 3, 2]


def choose(page: Page, control: str, value: str, event: str = "change") -> None:
    page.evaluate(
        f"$('{control}').value = {json.dumps(value)}, "
        f"$('{control}').dispatchEvent(new Event('{event}')), null"
    )


def test_axes_smoothing_and_theme(page: Page) -> None:
    choose(page, "axis", "hours")
    hours = page.evaluate("plots[0].element.data[0].x")
    assert hours[-1] == pytest.approx((20 * 1.5 + 3 * 2.0) / 3600, rel=1e-4)
    choose(page, "axis", "step")
    choose(page, "smoothing", "0.5", "input")
    smooth = page.evaluate("plots[0].element.data[1].y")
    assert smooth[:2] == pytest.approx([0.04, (0.5 * 0.04 + 0.08) / 1.5])
    choose(page, "smoothing", "0", "input")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.evaluate("$('theme').click()")
    assert page.evaluate(paper) != before
    page.evaluate("$('theme').click()")


def test_the_sample_browser_filters(page: Page) -> None:
    shown = "[...document.querySelectorAll('.sample')].map(each => each.className)"
    assert len(page.evaluate(shown)) == 5  # a page of the 30 of the last step
    page.evaluate("$('sample-more').click()")
    assert len(page.evaluate(shown)) == 25
    page.evaluate("$('sample-more').click()")
    classes = page.evaluate(shown)
    assert (len(classes), classes.count("sample right")) == (30, 20)
    choose(page, "sample-verdict", "wrong")
    page.evaluate("$('sample-more').click()")
    assert page.evaluate(shown) == ["sample wrong"] * 10
    assert "onerror" in page.evaluate(
        "document.querySelector('.sample').textContent"
    )  # as text: the title below is still ours
    turns = "[...document.querySelectorAll('.turn')].map(each => each.className)"
    assert page.evaluate(turns) == ["turn trained", "turn", "turn trained"]
    texts = "[...document.querySelectorAll('.turn pre')].map(each => each.textContent)"
    assert page.evaluate(texts) == [EVIL, EVIL, "#### 3"]
    head = "document.querySelector('.turn h3').textContent"
    assert page.evaluate(head) == "assistanttrained, 7 tokens, reward 0.5, 0.25 s"
    error = "document.querySelector('.sample pre.rings').textContent"
    assert page.evaluate(error) == EVIL
    choose(page, "sample-text", "IS 25 +", "input")
    assert page.evaluate("document.querySelector('.sample mark').textContent") == "is 25 +"
    assert page.evaluate("$('sample-count').textContent") == "1 of 30 responses"
    choose(page, "sample-verdict", "")
    choose(page, "sample-step", "all")
    assert (
        page.evaluate("$('sample-count').textContent") == "3 of 90 responses"
    )  # one prompt, over time
    texts = page.evaluate(
        "[...document.querySelectorAll('.sample')].map(each => each.querySelectorAll('pre').length)"
    )
    assert texts == [3, 1, 1]  # the prompt once
    choose(page, "sample-text", "", "input")
    assert page.evaluate("document.title") == "first · second"


def test_settings_with_their_origins(page: Page) -> None:
    rows = (
        "[...document.querySelectorAll('#settings tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    lr = [
        "actor_rollout_ref.actor.optim.lr",
        "1e-05\noverride …lr=1e-05",
        "2e-05\noverride …lr=2e-05",
        "1e-06",
    ]
    assert page.evaluate(rows) == [lr]
    page.evaluate("document.querySelector('#differing input').click()")
    assert page.evaluate(rows) == [
        lr,
        ["trainer.seed", "7\nrecipes/ppo.yaml:9", "7\nrecipes/ppo.yaml:9", "1e-06"],
    ]


def test_one_run_on_a_phone(browser: Browser, root: Path) -> None:
    done = rlctl(root.parent, "report", "first", "--samples", "5")
    assert done.stdout == "runs/demo/first/report.html\n"
    phone = {"viewport": {"width": 390, "height": 800}, "device_scale_factor": 2, "is_mobile": True}
    report = root / "demo" / "first" / "report.html"
    with opened(browser, report, **phone) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert (
            page.evaluate("$('sample-count').textContent")
            == "5 of 5 responses; the run has 30: rlctl show first --samples"
        )
    text = report.read_text()
    assert len(text) < 6_000_000
    ours = re.sub(
        r"<script>.*?</script>", "", text.replace(EVIL, ""), count=1, flags=re.DOTALL
    )  # without plotly's own
    assert not re.search(r"(src|href)=.?(https?:)?//", ours), "it fetches nothing"


def test_pools_of_an_asynchronous_run_are_drawn_over_time(browser: Browser, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "demo", "apart", "grpo")
    run.write_config("{}", {})
    row = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 8.0}
    waits = row | {"async/trainer_idle": 0.2, "async/engines_idle": 0.4}
    record(run.path, {1: row, 2: waits | {"timing_s/testing": 5.0}, 3: waits, 4: waits})
    report = content([RunStore(tmp_path / "runs").find("apart")], 50)
    (tmp_path / "x.html").write_text(html.page(report))
    with opened(browser, tmp_path / "x.html") as page:
        plot = "plots.find(({element}) => element.ariaLabel.startsWith('timeline')).element"
        assert page.evaluate(f"{plot}.ariaLabel") == (
            "timeline of the trainer and the rollout engines, apart, steps 2 to 4: "
            "the trainer waits 20 % of the time, the engines 40 %"
        )
        bars = page.evaluate(
            f"{plot}.data.map(each => [each.y[0], each.name, each.base.map(Math.round), each.x])"
        )
        assert bars == [
            ["trainer", "learn", [0, 15, 25], [8, 8, 8]],
            ["trainer", "wait", [8, 23, 33], [2, 2, 2]],
            ["engines", "generate", [0, 15, 25], [6, 6, 6]],
            ["engines", "idle", [6, 21, 31], [4, 4, 4]],
        ]
        assert page.evaluate(f"{plot}.querySelectorAll('.barlayer .trace').length") == 4
        phases = "plots.find(({element}) => element.ariaLabel === 'chart of Time by phase').element"
        assert page.evaluate(f"{phases}.data.map(each => each.name)") == [
            "actor update",
            "validation",
        ]


def test_long_run_is_thinned_but_keeps_validations_and_extremes(tmp_path: Path) -> None:
    spikes = {1234: 50.0, 4321: -50.0}
    rows = [
        {"step": step, "a": spikes.get(step, step % 7), "timing_s/step": 3.6, "timing_s/gen": 1.0}
        | ({ACC: 0.5} if step % 777 == 0 else {})
        for step in range(10_000)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = curves(MetricTable.read(file))
    steps, metrics = found["x"]["step"], found["metrics"]
    drawn = {name: [steps[at] for at in curve["at"]] for name, curve in metrics.items()}
    assert found["thinned"]
    assert drawn[ACC] == list(range(0, 10_000, 777))
    assert len(drawn["a"]) <= MAX_POINTS
    assert (drawn["a"][0], drawn["a"][-1]) == (0, 9999)
    values = dict(zip(drawn["a"], metrics["a"]["y"], strict=True))
    assert spikes.items() <= values.items()
    assert all(value == rows[step]["a"] for step, value in values.items())
    assert drawn["timing_s/gen"] == drawn["timing_s/step"]  # stacked bars
    assert found["x"]["hours"][-1] == pytest.approx(10.0)


def test_alarms_of_discarded_steps_are_left_out(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    for step, kind, name in [
        (3, "alarm", "kl"),
        (5, "alarm_over", "kl"),
        (6, "alarm", "truncation"),
        (4, "resume", None),
        (8, "alarm", "kl"),
    ]:
        run.event(kind, step=step, **({"name": name} if name else {}))
    found = [
        (alarm["name"], alarm["step"], alarm["over"]) for alarm in alarms_of(read_events(run.path))
    ]
    assert found == [("kl", 3, None), ("kl", 8, None)]


def test_report_of_a_run_without_metrics(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "p", "r", "ppo")
    made = content([RunStore(tmp_path).find("r")], 50)
    assert made["runs"][0]["x"] == {"step": [], "hours": [], "tokens": []}
