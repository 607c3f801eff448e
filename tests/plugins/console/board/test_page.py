"""The board in Chromium, driven by playwright: tables, live curves, actions, accessibility."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from rlctl.errors import InternalError
from rlctl.plugins.console.label_changes import set_note
from rlctl.process import DriverProcess
from rlctl.runs.labels import read_labels
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord, TrialTable
from tests.browser import wait_for
from tests.plugins.console.board.serving import Served
from tests.plugins.console.test_report import ACC, EVIL, sample, write_run
from tests.plugins.console.test_thumbnails import write_run as write_seen
from tests.recorded import record
from tests.sweeps.test_study import settings, study


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "runs"
    write_run(root, "first", 1e-5)
    write_run(root, "second", 2e-5)
    set_note(root / "demo" / "second", EVIL)
    log = root / "demo" / "first" / "attempts" / "latest" / "all-0.log"
    log.write_text(f"{EVIL}\n")
    return root


def test_list_sorts_filters_and_opens_a_comparison(page: Page, board: Served) -> None:
    page.goto(board.url)
    names = page.locator("#runs tbody th a")
    expect(names).to_have_text(["demo/second", "demo/first"])
    page.get_by_role("button", name="run", exact=True).click()
    expect(names).to_have_text(["demo/first", "demo/second"])
    sorted_by = page.get_by_role("columnheader", name="run", exact=True)
    expect(sorted_by).to_have_attribute("aria-sort", "ascending")
    titles = page.locator("#runs thead th")
    expect(page.locator("#runs .outline")).to_have_count(2)
    expect(titles.filter(has_text="note")).to_have_count(1)
    expect(titles.filter(has_text="tags")).to_have_count(0)  # no run has any
    page.get_by_label("groups").select_option("project")
    expect(page.locator("#runs .group")).to_have_text(["demo"])
    page.get_by_label("groups").select_option("")
    page.get_by_role("searchbox", name="columns").fill("recipe")
    expect(titles.last).to_have_text("recipe")
    page.get_by_role("searchbox", name="where").fill(f"best({ACC}) > 0.9")
    expect(page.locator("#runs-count")).to_have_text("0 of 2 runs")
    page.get_by_role("searchbox", name="where").fill("nonsense(")
    expect(page.locator("#status")).to_contain_text("example: state ==")
    page.get_by_role("searchbox", name="where").fill("")
    page.get_by_role("searchbox", name="name").fill("fir")
    expect(names).to_have_text(["demo/first"])
    page.reload()
    expect(names).to_have_text(["demo/first"])  # the address keeps the filters
    page.get_by_role("searchbox", name="name").fill("")
    page.get_by_label("compare demo/first").check()
    page.get_by_label("compare demo/second").check()
    page.get_by_role("button", name="compare 2").click()
    expect(page.locator("h1")).to_have_text("first · second")
    assert page.evaluate("DATA.runs.length") == 2


def test_text_of_models_users_and_logs_is_only_text(page: Page, board: Served) -> None:
    page.goto(f"{board.url}/?run=demo/second&run=demo/first")
    expect(page.locator(".card").first).to_contain_text(EVIL)
    page.get_by_label("result").select_option("wrong")
    expect(page.locator("#sample-count")).to_have_text("10 responses")
    page.get_by_label("containing").fill("ONERROR")
    expect(page.locator(".sample").first).to_contain_text(EVIL)
    page.locator("#sample-more").click()
    expect(page.locator(".turn.trained").first).to_be_visible()
    page.locator("#log-run").select_option("1")
    expect(page.locator("#log-lines")).to_have_text(EVIL)
    page.goto(board.url)
    expect(page.locator("#runs tbody").first).to_contain_text("</script>")
    assert page.title() == "rlctl board"
    assert page.locator("img").count() == 0


ALT = ["image 1 of prompt 2", "image 1 of prompt 3"]
LOADED = "images => images.map(image => [image.alt, image.naturalWidth > 0])"


def test_images_of_prompts_are_shown(page: Page, board: Served, root: Path) -> None:
    write_seen(root)
    page.goto(f"{board.url}/?run=demo/seen")
    images = page.locator(".sample img")
    expect(images).to_have_count(2)
    images.last.scroll_into_view_if_needed()
    wait_for(page, "[...document.images].every(image => image.complete)")
    assert images.evaluate_all(LOADED) == [[name, True] for name in ALT]
    expect(page.get_by_text("image 8 of prompt 3, without a thumbnail")).to_be_visible()
    page.set_viewport_size({"width": 400, "height": 900})
    wait_for(page, "document.documentElement.scrollWidth <= 400")  # charts follow later
    assert violations(page) == []


def test_curves_grow_while_the_run_goes_on(page: Page, board: Served, root: Path) -> None:
    run = RunDir.create(root, "demo", "live", "ppo")
    run.update(state="running", total_steps=9)
    page.goto(f"{board.url}/?run=demo/live")
    expect(page.locator(".badge")).to_have_text("running")
    expect(page.locator("#system tbody tr").first).to_contain_text("controller")
    for step in (1, 2, 3):
        with run.metrics.open("a") as file:
            row = {"critic/score/mean": step / 4, "timing_s/step": 1.0}
            file.write(json.dumps({"step": step, **row}) + "\n")
        described = page.locator(".chart", has_text="Reward").first
        expect(described).to_contain_text(f"{step / 4} at {step} step")
    assert page.evaluate("plots[0].element.data[0].y") == [0.25, 0.5, 0.75]
    run.event("alarm", step=2, name="kl", message="kl: high", hint="less", value=1.0, limit=0.5)
    expect(page.locator("#alarms tbody")).to_contain_text("kl: high")
    prompt = f"<|im_start|>system\n{EVIL}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    record(run.path, {}, {3: [replace(sample(0, 3), prompt=f"{prompt}<|im_start|>assistant\n")]})
    expect(page.locator("#sample-count")).to_have_text("1 response")
    parts = page.locator(".sample .part")
    expect(parts.locator("h3")).to_have_text(["system", "user", "truth", "response"])
    expect(parts.locator("pre").first).to_have_text(EVIL)
    run.finish("finished", 0)
    expect(page.locator(".badge")).to_have_text("finished")
    expect(page.locator("#status")).to_have_text("live is finished")


def test_a_failed_run_shows_its_cause_and_sections_fold(
    page: Page, board: Served, root: Path
) -> None:
    run = RunDir.create(root, "demo", "broke", "ppo")
    run.finish("failed", 3, InternalError(EVIL, hint="a smaller batch"))
    page.goto(f"{board.url}/?where=failure+!%3D+null")
    expect(page.locator("#runs td.rings")).to_have_text(EVIL)
    page.goto(f"{board.url}/?run=demo/broke")
    cause = page.locator(".cause")
    expect(cause).to_have_text(EVIL)
    size = "parseFloat(getComputedStyle(each).fontSize)"
    largest = f"Math.max(...[...document.querySelectorAll('body *')].map(each => {size}))"
    assert page.evaluate(largest) == cause.evaluate(f"each => {size}")
    fold = page.get_by_role("button", name="Provenance")
    fold.click()
    expect(page.locator("#facts dl")).to_be_hidden()
    page.reload()
    expect(page.locator("#facts dl")).to_be_hidden()  # remembered
    page.locator("#toc").get_by_text("Provenance").click()
    expect(page.locator("#facts dl")).to_be_visible()


def test_buttons_ask_before_they_act(page: Page, board: Served, root: Path) -> None:
    page.goto(f"{board.url}/?run=demo/first")
    page.get_by_role("button", name="tag first").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    assert read_labels(root / "demo" / "first").tags == ()
    # The button has the focus again. The dialog opens before its last closing has been reported.
    page.evaluate(
        "() => { const tag = document.activeElement; tag.click(); $('ask').close(); tag.click(); }"
    )
    page.get_by_label("tags").fill("good")
    page.keyboard.press("Enter")
    expect(page.locator(".card .tag")).to_have_text("good")
    assert read_labels(root / "demo" / "first").tags == ("good",)
    with page.expect_download() as download:
        page.get_by_role("link", name="save the report of first").click()
    assert "critic/score/mean" in download.value.path().read_text()


def test_sweep_shows_trials_importance_and_pruned_ones(
    page: Page, board: Served, root: Path
) -> None:
    chosen = settings()
    record = SweepRecord(
        *("s", "demo", "ppo", "ppo", "ppo_trainer", [], ["a=1,2,3", "b=0.1,0.2"]),
        *(chosen.model_dump(), "", 9, 1, [], "", "", DriverProcess.current()),
        state="finished",
    )
    sweep = SweepDir.create(root, record)
    made = study(sweep.path, ["a=1,2,3", "b=0.1,0.2"])
    for number in range(6):
        trial = made.ask()
        assert trial is not None
        made.report(trial, 1, float(number))
        made.tell(trial, *(("pruned",) if number == 0 else ("finished", float(number))))
    sweep.write_table(TrialTable(made.outcomes(), made.importances()))
    page.goto(board.url)
    page.get_by_role("link", name="Sweeps").click()
    page.get_by_role("link", name="demo/s", exact=True).click()
    expect(page.locator("#search")).to_contain_text("1 pruned, 5 finished")
    lines = page.locator(".chart", has_text="Trials").locator(".scatterlayer .trace")
    expect(lines).to_have_count(6)
    dashes = page.evaluate("plots[0].element.data.map(trace => trace.line.dash)")
    assert sorted(dashes) == ["dot", *["solid"] * 5]
    expect(page.locator(".chart", has_text="Importance").locator(".barlayer .trace")).to_have_count(
        1
    )
    page.get_by_text("Trials as a table").focus()
    page.keyboard.press("Enter")
    rows = page.get_by_role("region", name="Table of trials").locator("tbody tr")
    expect(rows).to_have_count(6)
    expect(rows.first).to_contain_text("finished")
    cells = page.evaluate(
        "trial => [...trialTable({mode: 'max', axes: ['a'], trials: [trial]}, plots[0])"
        ".querySelectorAll('th, td')].map(cell => cell.textContent)",
        {"number": 7, "params": {"a": "1"}, "state": "finished"}
        | {"value": 0.5, "n": 2, "low": 0.1, "high": 0.9},
    )
    assert cells[:6] == ["trial", "state", "a", "mean", "95 % interval", "n"]
    assert cells[6:] == ["trial 7", "finished", "1", "0.5", "0.1 to 0.9", "2"]
    chosen_one = rows.first.get_by_role("button")
    chosen_one.focus()
    page.keyboard.press("Enter")
    expect(chosen_one).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("plots[0].element.data.map(trace => trace.opacity).sort()") == [
        *[0.15] * 5,
        1,
    ]
    assert violations(page) == []


LIST, ONE, BOTH = "", "?run=demo/first", "?run=demo/first&run=demo/second"


@pytest.mark.parametrize(
    ("query", "width", "theme"),
    [
        *((LIST, 400, "dark"), (BOTH, 1300, "light")),
        *(
            pytest.param(*values, marks=pytest.mark.soak)
            for values in ((LIST, 1300, "light"), (BOTH, 400, "dark"), (ONE, 400, "dark"))
        ),
    ],
)
def test_no_violation_of_accessibility_rules_and_no_overflow(
    page: Page, board: Served, query: str, width: int, theme: Literal["light", "dark"]
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)
    page.goto(f"{board.url}/{query}")
    assert page.locator("#filter").evaluate("each => each.offsetHeight") <= 80
    expect(page.locator("#log-note" if query else "#runs tbody tr").first).not_to_be_empty()
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if query:
        page.get_by_role("button", name="note first").click()
    assert violations(page) == []


def violations(page: Page) -> list[tuple[str, list[str]]]:
    """Return the accessibility rules that the page violates, and the elements that do."""
    found = Axe().run(page).response["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
