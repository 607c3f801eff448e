"""`rlctl report`: the file that the command writes, opened in a real browser."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.recipes.layers import Origin
from rlctl.runs.events import alarms_of, read_events
from rlctl.runs.report.content import content
from rlctl.runs.report.curves import MAX_POINTS, curves
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.tracking.episodes import Episode, Message, Use
from rlctl.tracking.metric_table import MetricTable, metric_tables
from rlctl.tracking.tracker import Sample
from tests.forks import completed
from tests.recorded import plain_environment, record
from tests.runs.browser import CHROMIUM, Browser

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
def browser(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """On the report of both runs."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    done = rlctl(root.parent, "report", "first", "second")
    assert (done.returncode, done.stdout) == (0, "report.html\n"), done.stderr
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile"), "--window-size=1300,900") as browser:
        browser.open(root.parent / "report.html")
        yield browser


def test_figures_are_drawn_without_console_errors(browser: Browser) -> None:
    titles = browser.ask(
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
    drawn = browser.ask(
        "plots.map(({element}) => element.querySelectorAll("
        "'.scatterlayer .trace, .barlayer .trace').length)"
    )
    assert drawn == [2, 2, 2, 2, 2, 2, 3, 3, 2]
    reward = browser.ask("plots[0].element.data.map(trace => [trace.name, trace.x, trace.y])")
    assert [name for name, _, _ in reward] == ["first", "second"]
    assert reward[0][1] == list(range(1, 21))
    assert reward[0][2] == pytest.approx([0.04 * step for step in range(1, 21)])
    norm = browser.ask("plots[4].element.data[0].x")
    assert 5 not in norm
    assert len(norm) == 20  # NaN is a gap
    band = browser.ask("plots[3].element.layout.shapes.map(shape => [shape.x0, shape.x1])")
    assert band == [[15, 20], [15, 20]]
    assert browser.ask("document.title") == "first · second"
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []


def test_one_legend_hides_a_run_everywhere(browser: Browser) -> None:
    count = "plots.map(({element}) => element.data.length)"
    assert browser.ask("document.querySelectorAll('.legend').length") == 0
    browser.ask("document.querySelectorAll('.chip')[1].click()")
    assert browser.ask(count) == [1, 1, 1, 1, 1, 1, 3, 0, 1]
    browser.ask("document.querySelectorAll('.chip')[1].click()")
    assert browser.ask(count) == [2, 2, 2, 2, 2, 2, 3, 3, 2]


def choose(browser: Browser, control: str, value: str, event: str = "change") -> None:
    browser.ask(
        f"$('{control}').value = {json.dumps(value)}, "
        f"$('{control}').dispatchEvent(new Event('{event}')), null"
    )


def test_a_hidden_run_has_a_dim_card_and_parts_have_names(browser: Browser) -> None:
    badge = "getComputedStyle(document.querySelector('.badge')).whiteSpace"
    assert browser.ask(badge) == "nowrap"
    assert browser.ask("document.querySelector('#theme').getAttribute('aria-label')")
    unnamed = "document.querySelectorAll('.plot:not([role=img][aria-label])').length"
    assert browser.ask(unnamed) == 0
    dim = "document.querySelectorAll('.card.off').length"
    for expected in (1, 0):
        browser.ask("document.querySelector('.chip').click()")
        assert browser.ask(dim) == expected


def test_axes_smoothing_and_theme(browser: Browser) -> None:
    choose(browser, "axis", "hours")
    hours = browser.ask("plots[0].element.data[0].x")
    assert hours[-1] == pytest.approx((20 * 1.5 + 3 * 2.0) / 3600, rel=1e-4)
    choose(browser, "axis", "step")
    choose(browser, "smoothing", "0.5", "input")
    smooth = browser.ask("plots[0].element.data[1].y")
    assert smooth[:2] == pytest.approx([0.04, (0.5 * 0.04 + 0.08) / 1.5])
    choose(browser, "smoothing", "0", "input")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = browser.ask(paper)
    browser.ask("$('theme').click()")
    assert browser.ask(paper) != before
    browser.ask("$('theme').click()")
    assert browser.errors == []


def test_the_sample_browser_filters(browser: Browser) -> None:
    shown = "[...document.querySelectorAll('.sample')].map(each => each.className)"
    assert len(browser.ask(shown)) == 5  # a page of the 30 of the last step
    browser.ask("$('sample-more').click()")
    assert len(browser.ask(shown)) == 25
    browser.ask("$('sample-more').click()")
    classes = browser.ask(shown)
    assert (len(classes), classes.count("sample right")) == (30, 20)
    choose(browser, "sample-verdict", "wrong")
    browser.ask("$('sample-more').click()")
    assert browser.ask(shown) == ["sample wrong"] * 10
    assert "onerror" in browser.ask(
        "document.querySelector('.sample').textContent"
    )  # as text: the title below is still ours
    turns = "[...document.querySelectorAll('.turn')].map(each => each.className)"
    assert browser.ask(turns) == ["turn trained", "turn", "turn trained"]
    texts = "[...document.querySelectorAll('.turn pre')].map(each => each.textContent)"
    assert browser.ask(texts) == [EVIL, EVIL, "#### 3"]
    head = "document.querySelector('.turn h3').textContent"
    assert browser.ask(head) == "assistanttrained, 7 tokens, reward 0.5, 0.25 s"
    error = "document.querySelector('.sample pre.rings').textContent"
    assert browser.ask(error) == EVIL
    choose(browser, "sample-text", "IS 25 +", "input")
    assert browser.ask("document.querySelector('.sample mark').textContent") == "is 25 +"
    assert browser.ask("$('sample-count').textContent") == "1 of 30 responses"
    choose(browser, "sample-verdict", "")
    choose(browser, "sample-step", "all")
    assert (
        browser.ask("$('sample-count').textContent") == "3 of 90 responses"
    )  # one prompt, over time
    texts = browser.ask(
        "[...document.querySelectorAll('.sample')].map(each => each.querySelectorAll('pre').length)"
    )
    assert texts == [3, 1, 1]  # the prompt once
    choose(browser, "sample-text", "", "input")
    assert browser.ask("document.title") == "first · second"
    assert browser.errors == []


def test_settings_with_their_origins(browser: Browser) -> None:
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
    assert browser.ask(rows) == [lr]
    browser.ask("document.querySelector('#differing input').click()")
    assert browser.ask(rows) == [
        lr,
        ["trainer.seed", "7\nrecipes/ppo.yaml:9", "7\nrecipes/ppo.yaml:9", "1e-06"],
    ]


def test_one_run_on_a_phone(root: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    done = rlctl(root.parent, "report", "first", "--samples", "5")
    assert done.stdout == "runs/demo/first/report.html\n"
    with Browser(CHROMIUM, tmp_path / "profile") as browser:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=800,
            deviceScaleFactor=2,
            mobile=True,
        )
        browser.open(root / "demo" / "first" / "report.html")
        assert browser.ask("document.documentElement.scrollWidth") == 390
        assert (
            browser.ask("$('sample-count').textContent")
            == "5 of 5 responses; the run has 30: rlctl show first --samples"
        )
        assert browser.errors == []


def test_pools_of_an_asynchronous_run_are_drawn_over_time(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    run = RunDir.create(tmp_path / "runs", "demo", "apart", "grpo")
    run.write_config("{}", {})
    row = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 8.0}
    waits = row | {"async/trainer_idle": 0.2, "async/engines_idle": 0.4}
    record(run.path, {1: row, 2: waits | {"timing_s/testing": 5.0}, 3: waits, 4: waits})
    done = rlctl(tmp_path, "report", "apart")
    assert done.returncode == 0, done.stderr
    with Browser(CHROMIUM, tmp_path / "profile") as browser:
        browser.open(tmp_path / "runs" / "demo" / "apart" / "report.html")
        plot = "plots.find(({element}) => element.ariaLabel.startsWith('timeline')).element"
        assert browser.ask(f"{plot}.ariaLabel") == (
            "timeline of the trainer and the rollout engines, apart, steps 2 to 4: "
            "the trainer waits 20 % of the time, the engines 40 %"
        )
        bars = browser.ask(
            f"{plot}.data.map(each => [each.y[0], each.name, each.base.map(Math.round), each.x])"
        )
        assert bars == [
            ["trainer", "learn", [0, 15, 25], [8, 8, 8]],
            ["trainer", "wait", [8, 23, 33], [2, 2, 2]],
            ["engines", "generate", [0, 15, 25], [6, 6, 6]],
            ["engines", "idle", [6, 21, 31], [4, 4, 4]],
        ]
        assert browser.ask(f"{plot}.querySelectorAll('.barlayer .trace').length") == 4
        phases = "plots.find(({element}) => element.ariaLabel === 'chart of Time by phase').element"
        assert browser.ask(f"{phases}.data.map(each => each.name)") == [
            "actor update",
            "validation",
        ]
        assert browser.errors == []


def test_page_fetches_nothing(root: Path, tmp_path: Path) -> None:
    rlctl(root.parent, "report", "first", "-o", str(tmp_path / "x.html"))
    text = (tmp_path / "x.html").read_text()
    assert len(text) < 6_000_000
    ours = re.sub(
        r"<script>.*?</script>", "", text.replace(EVIL, ""), count=1, flags=re.DOTALL
    )  # without plotly's own
    assert not re.search(r"(src|href)=.?(https?:)?//", ours)


def test_missing_plotly_names_the_extra(root: Path, tmp_path: Path) -> None:
    (tmp_path / "plotly").mkdir()
    (tmp_path / "plotly" / "__init__.py").write_text(
        "raise ModuleNotFoundError('no plotly', name='plotly')"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = rlctl(root.parent, "report", "first", PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (6, "")
    assert "pip install 'rlctl[report]'" in done.stderr


def test_long_run_is_thinned_but_keeps_validations_and_extremes(tmp_path: Path) -> None:
    spikes = {1234: 50.0, 4321: -50.0}
    rows = [
        {"step": step, "a": spikes.get(step, step % 7), "timing_s/step": 3.6, "timing_s/gen": 1.0}
        | ({ACC: 0.5} if step % 777 == 0 else {})
        for step in range(10_000)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = curves(MetricTable.join(list(metric_tables(file))))
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
