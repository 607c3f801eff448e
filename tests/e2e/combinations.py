"""`make soak`: two steps of random combinations of settings, and the promises that each must keep.

A combination has an option of each axis of `combinations.yaml`. `rlctl train … --dry-run` checks
it; another is drawn if the plan refuses it with exit code 2, 3 or 6. The run must finish with
finite metrics, learn from every prompt drawn, score every response once, equal its continuation and
leave no process, segment or temporary file behind. Prints the seed, and each command in the folder
where it can be repeated: that of a failed combination is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlctl.errors import ConfigError, MissingExtraError, UsageError
from tests.e2e.command import VERBS, open_files, reproducible
from tests.e2e.killed_runs import Ended, finish_despite, learned, random_kills, run, state
from tests.plugins.agents.quiz import write_quiz

STEPS, SIZE, ROLLOUTS = 2, 4, 2
SETTINGS = [
    *(f"data.train_batch_size={SIZE}", "data.max_response_length=32"),
    *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.critic_warmup=0"),
    *("data.val_max_samples=4", "data.val_batch_size=3"),
    *("trainer.num_threads=1", "trainer.timeouts.ray_start_s=120"),
]
GIVEN = ("sft", "dpo", "rm")  # recipes that generate no responses
SAMPLED = [
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={SIZE // 2}",
    "trainer.rollout_data_dir=elsewhere",
]
# Counts its calls, and scores in a way that every model reaches by chance.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, calls=None):
    with open(calls, "a") as file:
        file.write("scored\\n")
    total = sum(map(ord, solution_str))
    if calls == "failing" and total % 11 == 0:  # rarely in every group of a step
        raise ValueError("no score")
    return {"score": (total % 7) / 6, "even": float(total % 2 == 0)}

async def compute_later(data_source, solution_str, ground_truth, extra_info=None, calls=None):
    return compute_score(data_source, solution_str, ground_truth, extra_info, calls)
"""
DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
AXES: dict[str, dict[str, str]] = DATA["axes"]


@dataclass(frozen=True)
class Combination:
    """One option of each axis, and the seed of the run."""

    options: dict[str, str]
    seed: int

    @property
    def command(self) -> list[str]:
        """Arguments of `rlctl`, but for the name of the run."""
        options, more = dict(self.options), [f"trainer.seed={self.seed}"]
        if mesh := options.pop("mesh"):
            setting = AXES["mesh"][mesh]
            more += [f"{section}.{setting}" for section in ("actor_rollout_ref.actor", "critic")]
            more += ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=8"]
        words = [word for axis, name in options.items() for word in shlex.split(AXES[axis][name])]
        words = [word.replace("RANKS", "2" if mesh else "1") for word in words]
        sampled = [] if options["algorithm"] in GIVEN else SAMPLED
        verb = VERBS.get(options["algorithm"], "ppo")
        return ["train", verb, *SETTINGS, *sampled, *words, *more]

    def __str__(self) -> str:
        return " ".join(name for name in self.options.values() if name)


def draw(generator: random.Random) -> Iterator[Combination]:
    """Yield random combinations with everything that their options need."""
    while True:
        options: dict[str, str] = {}
        for axis, names in AXES.items():
            first = 1 if axis in DATA["alike"] else len(names) - 1
            (options[axis],) = generator.choices([*names], [first, *[1] * (len(names) - 1)])
        seed = generator.randrange(1000)
        if all(_has(options, need) for need in DATA["needs"]):
            yield Combination(options, seed)


def _has(options: dict[str, str], need: dict[str, Any]) -> bool:
    """Return True if the options do not need the other option, or have it."""
    needing = need.get("only", [*AXES[need["axis"]]][1:])
    other = options[need["other"]]
    has_it = other in need["in"] if "in" in need else other not in need["not"]
    return has_it or options[need["axis"]] not in needing


def accepted(generator: random.Random, folder: Path) -> tuple[Combination, list[str]]:
    """Return a combination that the plan accepts, and why it refuses others."""
    refused: list[str] = []
    for each in draw(generator):
        ended = run(*each.command, "--dry-run", cwd=folder)
        for calls in (*folder.glob("calls"), *folder.glob("failing")):
            calls.rename(f"{calls}-of-plan")  # the run makes the same
        if ended.code == 0:
            return each, refused
        lines = [line for line in ended.talk.splitlines() if line.startswith("error")]
        codes = [error.exit_code for error in (UsageError, ConfigError, MissingExtraError)]
        is_clear = ended.code in codes and lines and "Traceback" not in ended.talk
        assert is_clear, f"{shlex.join(['rlctl', *each.command])}\n{ended.code}\n{ended.talk}"
        refused.append(f"{each}: {lines[0]}")
    raise AssertionError("unreachable")


def check(combination: Combination, folder: Path, generator: random.Random) -> None:
    """Train, continue and compare; raise AssertionError with what is wrong."""
    resume, before = combination.options["resume"], _shared()
    inline = ["--inline"] if "--inline" in combination.command else []
    succeed(run(*combination.command, "--name", "straight", cwd=folder), folder)
    [straight] = folder.glob("runs/*/straight")
    rows, files = reproducible(straight), learned(straight)
    check_counts(combination, straight)
    if resume == "kill":
        command = [*combination.command, "--name", "again"]
        finish_despite(random_kills(1, 50, generator), "again", command, folder, *inline)
    elif resume:
        words = ["resume", "straight", *inline, "--from-step", "1"]
        words += ["--fork", "again"] if resume == "fork" else []
        succeed(run(*words, cwd=folder), folder)
    for each in folder.glob("runs/[!.]*/*"):
        check_records(each, combination)
        if combination.options["async"] != "eager":
            for row in reproducible(each):
                wanted = rows[row["step"] - rows[0]["step"]]
                # A fork has validated, and not trained, the step that it begins with.
                names = row if resume == "fork" and row["step"] == 1 else row | wanted
                differing = {name for name in names if row.get(name) != wanted.get(name)}
                assert not differing, f"{each.name}: step {row['step']} differs in {differing}"
            assert learned(each) == files, f"{each.name}: weights or random state differ"
    check_left(folder, before)


def succeed(ended: Ended, folder: Path) -> None:
    """Check the exit code, and that nothing has raised unseen."""
    logs = (each.read_text() for each in folder.glob("runs/*/*/attempts/*/*.log"))
    talk = ended.talk + "".join(logs)
    words = [each for each in ("Traceback", "internal error") if each in talk]
    assert (ended.code, words) == (0, []), f"exit code {ended.code}\n{talk[-3000:]}"


def check_records(folder: Path, combination: Combination) -> None:
    """Check the state of a run and its metrics; engine and trainer agree on the same weights."""
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]][-1] == STEPS
    values = [each for row in rows for each in row.items() if not math.isfinite(each[1])]
    assert not values, values
    options = combination.options
    # In bypass mode the policy of later mini-batches, which has changed, is compared, too.
    is_compared = options["extra"] != "bypass" and options["memory"] != "half"
    if is_compared and options["async"] == "":
        largest = max(row.get("training/rollout_probs_diff_max", 0.0) for row in rows)
        assert largest <= 1e-3, f"probabilities of engine and trainer differ by {largest}"


def check_counts(combination: Combination, folder: Path) -> None:
    """Check how many prompts the run has drawn, and how many responses it has scored."""
    options, scratch = combination.options, folder.parents[2]
    rows = reproducible(folder)
    batches = sum(row.get("filter_groups/num_gen_batches", 1) for row in rows if row["step"])
    if options["async"] == "ahead":
        batches += 1  # of the next step, in case the run is extended
    if options["async"] != "eager" and options["algorithm"] != "dapo":
        assert state(folder)["loader"]["position"] == batches * SIZE, state(folder)["loader"]
    if options["algorithm"] in GIVEN:
        return
    files = {part: folder.glob(f"{part}/step_*.jsonl") for part in ("rollouts", "generations")}
    lines = {part: "".join(each.read_text() for each in files[part]).splitlines() for part in files}
    prompts = Counter(json.loads(line)["prompt"] for line in lines["rollouts"])
    are_all_kept = options["algorithm"] != "raft" and options["reward"] != "failing"
    if options["agents"] == "" and are_all_kept and options["sampler"] == "":
        assert [*prompts.values()] == [ROLLOUTS] * STEPS * SIZE, prompts
    calls = [each for each in scratch.iterdir() if each.name.startswith(("calls", "failing"))]
    counts = options["async"] != "eager" and options["agents"] in ("", "tools")
    # A single file is left by a refused combination. DAPO draws until groups suffice.
    if len(calls) == 2 and counts and options["algorithm"] != "dapo":
        responses = ROLLOUTS + 1 if options["algorithm"] == "remax" else ROLLOUTS  # and greedy ones
        wanted = batches * SIZE * responses + len(lines["generations"])
        tried, found = (len(each.read_text().splitlines()) for each in sorted(calls, reverse=True))
        assert found - tried == wanted, f"{found - tried} responses are scored, not {wanted}"


def check_left(folder: Path, before: set[Path]) -> None:
    """Check that no process, file in memory, session of Ray or temporary file is left."""
    unfinished = [each for each in folder.rglob("*") if each.suffix in (".tmp", ".partial")]
    temporary = [*unfinished, *(folder / "t").iterdir()]
    assert not temporary, f"left: {temporary}"
    deadline = time.monotonic() + 60  # Ray's daemons end after the command
    while left := _left(folder, before):
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.5)


def _left(folder: Path, before: set[Path]) -> list[str]:
    """Return the processes that use the folder, and new shared files that no process uses."""
    shared, found = _shared() - before, list[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            names = [*process.cmdline(), process.cwd(), *open_files(process.pid)]
            if process.pid != os.getpid() and any(str(folder) in name for name in names):
                found.append(f"{process.pid} {process.name()}")
            if shared:  # of another command on this machine?
                used = "\n".join(
                    [*names, Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")]
                )
                shared -= {each for each in shared if str(each) in used}
    return [*found, *(str(each) for each in shared if each.exists())]


def _shared() -> set[Path]:
    """Return the files in shared memory and the sessions of Ray on this machine."""
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("rlctl-ray-*")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60, help="number of combinations")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, help="index of one combination to repeat")
    wanted = parser.parse_args()
    print(f"{wanted.runs} combinations, seed {wanted.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="combinations-"))
    (root / "score.py").write_text(SCORE)
    write_quiz(root, 40)
    succeed(run("train", "rm", "--inline", *SETTINGS, "--name", "rm", cwd=root), root)
    [model] = root.glob("runs/*/rm/checkpoints/step_000002/huggingface")
    chosen = range(wanted.runs) if wanted.only is None else [wanted.only]
    outcomes = [outcome_of(index, wanted.seed, root, model) for index in chosen]
    num_failed = sum("FAILS" in each for each in outcomes)
    print(*outcomes, f"{len(outcomes) - num_failed} of {len(outcomes)} hold", sep="\n")
    if not num_failed:
        shutil.rmtree(root)
    return int(num_failed > 0)


def outcome_of(index: int, seed: int, root: Path, model: Path) -> str:
    """Run a combination; return a line of the table, and remove the folder unless it fails."""
    folder, generator = root / str(index), random.Random(f"{seed} {index}")
    (folder / "t").mkdir(parents=True)
    for each in ("score.py", "quiz.parquet"):
        shutil.copy(root / each, folder)
    (folder / "rm").symlink_to(model)
    os.environ["TMPDIR"] = str(folder / "t")
    begin, combination, result = time.monotonic(), "", "holds"
    try:
        combination, refused = accepted(generator, folder)
        print(*refused, sep="\n", end="\n" * bool(refused))
        print(f"{index}: cd {folder}; {shlex.join(['rlctl', *combination.command])}", flush=True)
        check(combination, folder, generator)
        shutil.rmtree(folder)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        result = f"FAILS: {error}"
    line = f"{index:4} {time.monotonic() - begin:4.0f} s  {combination}: {result}"
    print(line, flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
