"""Summary printed when a run ends."""

from pathlib import Path

from rlctl.monitoring.final_summary import print_summary

ACC = "val-core/arithmetic/acc/mean@1"


def test_summary_of_a_finished_run(capsys):
    rows = [
        {"step": 0, ACC: 0.25},
        {"step": 1, "critic/score/mean": 0.25, "perf/total_num_tokens": 1500.0},
    ]
    rows += [{"step": 2, ACC: 0.75, "critic/score/mean": 0.75, "perf/total_num_tokens": 1500.0}]
    print_summary(
        "finished", Path("runs/p/r"), rows, 72.3, [], ["rlctl show r --samples", "rlctl runs"]
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "finished: 2 steps in 1m 12s, 3k tokens",
        "  accuracy  25.0 % → 75.0 %   best 75.0 % at step 2",
        "  reward    0.25 → 0.75   ▁█",
        "  run       runs/p/r",
        "  next      rlctl show r --samples",
        "            rlctl runs",
    ]


def test_summary_of_a_fork_counts_the_steps_that_it_trained(capsys):
    rows = [{"step": 2, ACC: 0.25}, {"step": 3, "critic/score/mean": 0.25}]
    print_summary("finished", Path("runs/p/r"), rows, 3.0, [], [])
    assert capsys.readouterr().err.splitlines()[0] == "finished: 1 step in 3.0 s"


def test_summary_repeats_alarms_and_says_what_was_not_done(capsys):
    rows = [{"step": 0, ACC: 0.375}, {"step": 1, "critic/lr": 1e-5}, {"step": 2, "critic/lr": 1e-5}]
    alarm = {"name": "kl", "step": 1, "message": "KL is 3", "hint": "lower the lr", "over": None}
    other = {"name": "length_drift", "step": 2, "message": "long", "hint": "h", "over": 4}
    print_summary(
        "finished",
        Path("runs/p/r"),
        rows,
        3.0,
        [alarm | {"over": 1}, other, alarm | {"step": 2}],
        [],
    )
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  accuracy  37.5 % at step 0; not validated later, see trainer.test_freq",
        "  warning   only the critic was trained: the actor learns after "
        "trainer.critic_warmup steps",
        "  alarm     step 1: KL is 3, 2 times (lower the lr)",
        "  alarm     step 2: long, until step 4",
        "  run       runs/p/r",
    ]
