"""Curves above the list, responses side by side, and short names of sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from rlctl.process import DriverProcess
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord, TrialTable
from rlctl.tracking.tracker import Sample
from tests.browser import wait_for
from tests.plugins.console.board.serving import Served, serving
from tests.plugins.console.test_report import ACC, EVIL, sample
from tests.plugins.console.test_seeds import seeded
from tests.recorded import record
from tests.sweeps.test_study import settings

SEEDS = ("demo/ours-seed1", "demo/ours-seed2", "demo/ours-seed3")


def rows(slope: float) -> dict[int, dict[str, float]]:
    return {
        step: {"critic/score/mean": slope * step, "actor/entropy": 1.0}
        | ({ACC: slope * step / 2} if step % 2 == 0 else {})
        for step in range(5)
    }


def responses(step: int, right: int) -> list[Sample]:
    """Return two responses to each of three prompts; the first `right` ones are right."""
    made = [
        replace(sample(number // 2, step), prompt=f"Prompt {number // 2}") for number in range(6)
    ]
    return [
        replace(
            each,
            response=f"response {number} of step {step}",
            score=float(number < right),
            components={"acc": float(number < right)},
        )
        for number, each in enumerate(made)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overview") / "runs"
    for seed, slope in ((1, 0.1), (2, 0.2), (3, 0.3)):
        seeded(root, f"ours-seed{seed}", seed, rows(slope))
    base = seeded(root, "base", 1, rows(0.05), test_freq=7)
    record(root / "demo" / "ours-seed1", {}, {2: responses(2, 1), 4: responses(4, 6)})
    others = [each for each in responses(4, 2) if each.prompt != "Prompt 2"]
    record(base.path, {}, {4: others[::-1]})
    return root


def test_list_has_main_curves_of_the_runs_that_it_asks_for(board: Served) -> None:
    found = board.get("curves", run=["demo/base", "demo/removed", "../x", *SEEDS])
    assert [run["key"] for run in found["runs"]] == ["demo/base", *SEEDS]
    assert sorted(found["runs"][0]["metrics"]) == ["critic/score/mean", ACC]
    (group,) = found["seeds"]
    assert (group["label"], group["runs"]) == ("ours", [1, 2, 3])
    assert group["metrics"][ACC]["y"] == pytest.approx([0.0, 0.2, 0.4])
    assert group["metrics"][ACC]["n"] == [3, 3, 3]
    every = board.get("seeds", run=SEEDS)
    assert sorted(every[0]["metrics"]) == ["actor/entropy", "critic/score/mean", ACC]
    assert board.get("view", run=SEEDS)["seeds"] == every


def test_responses_to_one_prompt_are_paired_by_prompt(board: Served) -> None:
    found = board.get("samples", run="demo/ours-seed1", beside="demo/base")
    assert (found["step"], found["beside_step"], found["matching"]) == (4, 4, 6)
    pairs = [
        (each["response"], (each["beside"] or {}).get("response")) for each in found["samples"]
    ]
    said = "response {} of step 4".format
    # The other run has them in reverse: its first to a prompt belongs to the first.
    assert pairs == [
        *((said(0), said(1)), (said(1), said(0)), (said(2), said(3)), (said(3), said(2))),
        *((said(4), None), (said(5), None)),
    ]
    differ = board.get("samples", run="demo/ours-seed1", beside="demo/base", verdict="differ")
    assert [each["response"] for each in differ["samples"]] == [said(2), said(3)]
    earlier = {"beside": "demo/ours-seed1", "beside_step": 2}
    found = board.get("samples", run="demo/ours-seed1", text="STEP 2", **earlier)
    assert (found["beside_step"], found["matching"]) == (2, 6)
    assert found["samples"][0]["beside"]["response"] == "response 0 of step 2"
    assert board.request("/api/samples?run=demo/base&verdict=odd")[0] == 400
    assert board.request("/api/samples?run=demo/base&beside=demo/none")[0] == 404


def test_a_sweep_is_found_by_the_name_that_commands_accept(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for project, name in (("demo", "lrs"), ("demo", "betas"), ("other", "betas")):
        record = SweepRecord(
            *(name, project, "ppo", "ppo", "ppo_trainer", [], ["a=1,2"]),
            *(settings().model_dump(), "", 9, 1, [], "", "", DriverProcess.current()),
            state="finished",
        )
        SweepDir.create(root, record).write_table(TrialTable([], {}))
    outside = SweepDir.create(tmp_path / "elsewhere", replace(record, name="hidden"))
    with serving(root) as served:
        for given in ("lrs", "demo/lrs", "lr"):
            assert served.get("trials", sweep=given)["state"] == "finished"
            assert served.get("view", sweep=given)["state"] == "finished"
        status, said = served.request("/api/trials?sweep=betas")
        assert (status, "matches 2 sweeps" in said) == (400, True)
        assert served.get("trials", sweep="other/betas")["num_runs"] == 0
        for given in ("none", "", ".", str(outside.path), "../elsewhere/other/hidden"):
            assert served.request(f"/api/trials?sweep={given}")[0] in (400, 404)


def test_newest_and_pinned_runs_are_overlaid_on_the_first_page(page: Page, board: Served) -> None:
    page.goto(board.url)
    titles = page.locator("#overlay .chart h3")
    expect(titles).to_have_text(["Reward", "Validation"])
    wait_for(page, "plots.length > 0 && plots.every(plot => plot.element.data)")
    assert page.evaluate("plots[0].element.data.length") == 4
    page.locator("#seeds").select_option("mean")
    expect(page.locator("#seeds-note")).to_contain_text("95 % interval of the mean")
    names = "plots[0].element.data.map(trace => trace.meta ?? trace.fill)"
    wait_for(page, "plots[0].element.data.length === 3")
    assert page.evaluate(names) == ["toself", "ours, mean of n = 3 seeds", "base"]
    page.get_by_role("button", name="pin demo/base").click()
    expect(page.locator("#overlay h2")).to_have_text("Pinned runs")
    wait_for(page, "DATA.runs.length === 1")
    page.reload()
    expect(page.locator("#overlay h2")).to_have_text("Pinned runs")  # kept
    pin = page.get_by_role("button", name="pin demo/base")
    expect(pin).to_have_attribute("aria-pressed", "true")
    pin.click()
    expect(page.locator("#overlay h2")).to_have_text("Newest runs")
    page.get_by_role("searchbox", name="name").fill("seed")
    wait_for(page, "DATA.runs.length === 3")


def test_phone_shows_the_first_and_the_last_value(page: Page, board: Served, root: Path) -> None:
    broke = RunDir.create(root, "demo", "broke", "ppo")
    broke.finish("failed", 3, RuntimeError(EVIL))
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(board.url)
    row = page.locator("#runs tbody tr", has_text="demo/base")
    expect(row.locator("td").nth(1)).to_have_text("0.0 % → 10.0 %")
    cells = "[...document.querySelectorAll('#runs tbody td:nth-of-type(2)')]"
    fits = f"{cells}.every(cell => cell.getBoundingClientRect().right <= 390)"
    wait_for(page, f"{cells}.length === 5 && {fits}")
    failed = page.locator("#runs tbody tr", has_text="demo/broke")
    expect(failed.locator("th")).to_contain_text(EVIL[:20])
    expect(failed.locator("th .badge")).to_have_text("failed")
    wait_for(page, "document.documentElement.scrollWidth <= 390")


def test_compare_begins_with_curves_and_ends_with_two_responses(page: Page, board: Served) -> None:
    page.goto(f"{board.url}/?run=demo/base&" + "&".join(f"run={key}" for key in SEEDS))
    wait_for(page, "plots.length > 0 && plots[0].element.data")
    assert page.evaluate("$('view').firstElementChild.id") == "charts"
    # Three seeds: the mean is shown at once, and a run without others as it is.
    expect(page.locator("#seeds")).to_have_value("mean")
    expect(page.locator("#seeds-note")).to_contain_text("ours, 3 seeds")
    expect(page.locator(".chart", has_text="Reward").first).to_contain_text(
        "ours, mean of n = 3 seeds: 0 at 0, 0.8 at 4 step"
    )
    page.locator("#sample-run").select_option(label="ours-seed1")
    page.get_by_label("beside").select_option(label="base")
    pair = page.locator(".pair").first.locator("article")
    expect(pair.locator(".response pre")).to_have_text(
        ["response 0 of step 4", "response 1 of step 4"]
    )
    expect(pair.locator("h3 .run, h3.run, h3 > .run")).to_have_text(["ours-seed1", "base"])
    page.get_by_label("result").select_option("differ")
    expect(page.locator("#sample-count")).to_have_text("2 responses")
    page.get_by_label("beside").select_option("")
    expect(page.locator(".pair")).to_have_count(0)
    expect(page.get_by_label("result")).to_have_value("")
