"""`make soak`: runs that are stopped or killed at chosen moments and must equal undisturbed ones.

A case is `<setup>/<moment>/<signal>`; all of them take hours. Every recorded and learned byte is
compared, or the metrics within 1e-5 where the number of ranks changes. `<setup>/leaks` measures
what an undisturbed run of 210 steps holds (`tests.e2e.leaks`), `<setup>/engine` kills engines and
compares the responses, `<setup>/others` kills any processes of a run (of rewards, environments,
ranks, Ray), `engines/vllm-server*` train on servers (`tests.e2e.soak_engines`),
`data-plane/…` (`tests.e2e.soak_data_plane`) compare two runs, `eager/…` count the prompts of a run
with random faults (`tests.e2e.faults`). Prints the seed and the command that repeats a failed case.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from rlctl.data_prep.arithmetic import generate
from rlctl.data_prep.rows import write_rows
from tests.e2e import faults, leaks, soak_data_plane, soak_engines, soak_sweeps, soak_watchers
from tests.e2e.command import remove_run, reproducible
from tests.e2e.conftest import write_shelf
from tests.e2e.killed_runs import (
    KILLED_FILE,
    LOGGER,
    SCORE,
    VICTIMS,
    differing,
    events,
    finish_despite,
    random_kills,
    responses,
    run,
)
from tests.models import write_mixture_model
from tests.plugins.agents.quiz import write_quiz

SETTINGS = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=model",
    "data.max_prompt_length=160",
    "data.max_response_length=8",
    "data.train_batch_size=8",
    "data.train_max_samples=40",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_epochs=2",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
    "trainer.project_name=quickstart",
    "trainer.rollout_data_dir=elsewhere",
    "trainer.num_threads=1",
    "trainer.timeouts.ray_start_s=120",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "reward.custom_reward_function.path=score.py",
    LOGGER,
]
PPO = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.critic_warmup=3",
]
GRPO = [
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.shuffle=true",
]
PAIRS = ["data.train_files=pairs.parquet", "data.val_files=pairs.parquet"]
SAMPLED = ["actor_rollout_ref.rollout.n=4"]
EPISODES = [
    *("data.train_files=quiz.parquet", "data.val_files=quiz.parquet"),
    "actor_rollout_ref.model.path=quickstart",
    "data.max_response_length=192",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.agent.environment=tests.plugins.agents.quiz:Quiz",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.custom_reward_function.path=null",
]
PROGRAMS = [
    *(each for each in EPISODES if ".environment=" not in each),
    "actor_rollout_ref.rollout.agent.program=tests.plugins.agents.programs:chat",
]
AHEAD = [
    *("async_training.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"),
    "actor_rollout_ref.rollout.n=4",
]
REPLAY = [
    "actor_rollout_ref.model.path=mixture",
    "actor_rollout_ref.actor.router_replay.mode=R3",
]
POOL = ["trainer.placement.rollout=engines", "trainer.placement.pools={engines: 2}"]
VLLM = ["actor_rollout_ref.rollout.name=vllm"]
ADAPTERS = "actor_rollout_ref.rollout.lora_merge=false"
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2"]
# Engines that are killed in their 60th step, once per file `die-*` beside the module.
MORTAL = """
import os, pathlib, signal
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

def mortal(base):
    class Engine(base):
        def step(self):
            self.passes = getattr(self, "passes", 0) + 1
            mine = sorted(pathlib.Path(__file__).parent.glob("die-*"))
            if self.passes == 60 and mine:
                mine[0].unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step()
    return Engine

HF, VLLM = mortal(HFEngine), mortal(VLLMEngine)
"""
RANKS = "trainer.n_gpus_per_node={}"
SWEPT = [*SETTINGS, *GRPO]  # settings of a sweep's runs


def mesh_of(ranks: int, *kinds: str) -> list[str]:
    """Return the settings of a mesh of `ranks` in which each kind of group has two."""
    return [
        *(RANKS.format(ranks), f"ray_kwargs.ray_init.num_cpus={ranks + 2}"),
        "actor_rollout_ref.model.path=quickstart",
        *(
            f"{section}.fsdp_config.{kind}_parallel_size=2"
            for section in ("actor_rollout_ref.actor", "critic")
            for kind in kinds
        ),
    ]


# Two groups of ranks with the same rows, of which two have a slice each and two split each layer.
MESH = mesh_of(8, "ulysses_sequence", "tensor_model")
PIPELINE = mesh_of(4, "pipeline_model")  # two pipelines of two stages
ONE_RANK = [
    RANKS.format(1),
    *(each.replace("size=2", "size=1") for each in (*MESH, *PIPELINE) if "parallel_size" in each),
]


@dataclass(frozen=True)
class Setup:
    """Command of a run, and the options of its resumption; `exact` is False for other ranks."""

    verb: str
    settings: list[str]
    inline: bool = False
    resume: list[str] = field(default_factory=list)
    exact: bool = True

    @property
    def mortal(self) -> str | None:
        """Engine of `MORTAL` that takes the place of the setup's own; None without a pool."""
        if POOL[0] not in self.settings:
            return None
        return "mortal:VLLM" if VLLM[0] in self.settings else "mortal:HF"

    @property
    def options(self) -> list[str]:
        return ["--inline"] if self.inline else []


SETUPS = {
    "sft-inline": Setup("sft", [], inline=True),
    "rm-inline": Setup("rm", [*PAIRS, "reward.reward_model.model.path=model"], inline=True),
    "dpo-inline": Setup("dpo", PAIRS, inline=True),
    "online-dpo-inline": Setup(
        "online_dpo", [*SAMPLED, "algorithm.params.pairs=random"], inline=True
    ),
    "raft-inline": Setup("raft", [*SAMPLED, "algorithm.params.threshold=0"], inline=True),
    "ppo-inline": Setup("ppo", PPO, inline=True),
    "grpo-inline": Setup("grpo", GRPO, inline=True),
    "ppo-vllm-inline": Setup("ppo", [*PPO, *VLLM], inline=True),
    "episodes-inline": Setup("grpo", EPISODES, inline=True),
    "episodes-vllm-inline": Setup("grpo", [*EPISODES, *VLLM], inline=True),
    "episodes-ray-2": Setup("grpo", [*EPISODES, RANKS.format(2)]),
    "episodes-pool": Setup("grpo", [*EPISODES, *POOL]),
    "episodes-vllm-pool": Setup("grpo", [*EPISODES, *POOL, *VLLM]),
    "programs-inline": Setup("grpo", PROGRAMS, inline=True),
    "programs-vllm-inline": Setup("grpo", [*PROGRAMS, *VLLM], inline=True),
    "programs-ray-2": Setup("grpo", [*PROGRAMS, RANKS.format(2)]),
    "programs-pool": Setup("grpo", [*PROGRAMS, *POOL]),
    "ahead-inline": Setup("grpo", AHEAD, inline=True),
    "ahead-pool": Setup("grpo", [*AHEAD, *POOL]),
    "ahead-episodes-pool": Setup("grpo", [*AHEAD, *EPISODES, *POOL]),
    "ahead-lora-vllm-pool": Setup("grpo", [*AHEAD, *LORA, *POOL, *VLLM, ADAPTERS]),
    "replay-vllm-inline": Setup("grpo", [*GRPO, *REPLAY, *VLLM], inline=True),
    "replay-ahead-pool": Setup("grpo", [*AHEAD, *POOL, *REPLAY]),
    "replay-episodes-pool": Setup(
        "grpo", [*EPISODES, *POOL, *REPLAY, "data.max_response_length=96"]
    ),
    "lora-pool": Setup("grpo", [*GRPO, *LORA, *POOL]),
    "lora-vllm-inline": Setup("grpo", [*GRPO, *LORA, *VLLM, ADAPTERS], inline=True),
    "ppo-ray": Setup("ppo", PPO),
    "ppo-ray-2": Setup("ppo", [*PPO, RANKS.format(2)]),
    "ppo-vllm-ray": Setup("ppo", [*PPO, *VLLM]),
    "ppo-vllm-ray-2": Setup("ppo", [*PPO, *VLLM, RANKS.format(2)]),
    "ppo-mesh-8": Setup("ppo", [*PPO, *MESH]),
    "ppo-pipeline-4": Setup("ppo", [*PPO, *PIPELINE]),
    "ppo-pipeline-4-pool": Setup("ppo", [*PPO, *PIPELINE, *POOL]),
    "ppo-pipeline-4-to-1": Setup("ppo", [*PPO, *PIPELINE], resume=ONE_RANK, exact=False),
    "ppo-mesh-8-to-1": Setup("ppo", [*PPO, *MESH], resume=ONE_RANK, exact=False),
    "ppo-ray-1-to-2": Setup("ppo", PPO, resume=[RANKS.format(2)], exact=False),
    "ppo-ray-2-to-1": Setup("ppo", [*PPO, RANKS.format(2)], resume=[RANKS.format(1)], exact=False),
}
EAGER = {  # recipes and transports of weights
    "eager/responses": ("grpo", "auto"),
    "eager/episodes": ("tools", "auto"),
    "eager/store": ("grpo", "object_store"),
}
# Two kills are two moments, one after the other; a kill while resuming needs one before it.
MOMENTS = {
    "start-up": ["start-up"],
    "first-step": ["first step"],
    "write": ["checkpoint write"],
    "commit": ["commit"],
    "resume": ["34", "resume"],  # the 34th phase comes after the first checkpoint
    "twice": ["checkpoint write", "first step"],
}
# Kills at random: their number, and the last phase of an attempt at which one happens.
RANDOM = {"random": (3, 50), "often": (8, 18)}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
TOLERANCE = 1e-5
MOST_ATTEMPTS = 20
PER_RANK = "global_seqlen/"  # tokens per rank
CASES = [f"{setup}/{moment}/{name}" for setup in SETUPS for moment in MOMENTS for name in SIGNALS]
CASES += [f"{setup}/{moment}/SIGKILL" for setup in SETUPS for moment in RANDOM]
CASES += [f"{setup}/engine" for setup, each in SETUPS.items() if each.mortal]
CASES += [f"{setup}/others" for setup in SETUPS]


def _same_on_both_planes(recipe: str, settings: list[str], exact: bool, folder: Path) -> str | None:
    """Return what differs between a run with stored token fields and one with sent ones.

    PPO whitens advantages with sums over ranks, so its metrics are equal up to rounding only.
    """
    first, second = soak_data_plane.train_both(recipe, [*SETTINGS, *settings], folder)
    return ", ".join(_differing(first, second, exact)) or None


# Proofs of their own: each returns None, or what is wrong.
PROOFS: dict[str, Callable[[Path], str | None]] = {
    "engines/vllm-server": partial(soak_engines.train_on_servers, [*SETTINGS, *GRPO]),
    "engines/vllm-server-group": partial(
        soak_engines.train_on_servers, [*SETTINGS, *GRPO], group=True
    ),
    "engines/vllm-server-group-lora": partial(
        soak_engines.train_on_servers, [*SETTINGS, *GRPO, *LORA], group=True
    ),
    "data-plane/grpo": partial(_same_on_both_planes, "grpo", GRPO, True),
    "data-plane/ppo": partial(_same_on_both_planes, "ppo", PPO, False),
}
CASES += PROOFS
CASES += [f"{setup}/leaks" for setup, each in SETUPS.items() if each.exact]
CASES += EAGER
CASES += [*soak_sweeps.CASES, *soak_watchers.CASES]


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # runs inherit that nohup or `&` ignores them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="cases or patterns such as 'ppo-ray/*/SIGTERM'")
    parser.add_argument("--number", type=int, help="run this many of them, chosen by the seed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    wanted = parser.parse_args()
    patterns = wanted.cases or ["*"]
    chosen = [case for case in CASES if any(fnmatchcase(case, each) for each in patterns)]
    if wanted.number is not None:
        chosen = random.Random(wanted.seed).sample(chosen, min(wanted.number, len(chosen)))
        chosen.sort(key=CASES.index)
    if wanted.list:
        print(*chosen, sep="\n")
        return 0
    print(f"{len(chosen)} cases, seed {wanted.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rlctl-soak-") as scratch:
        folder = Path(scratch)
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"  # of own runs, and the board's token
        (folder / "score.py").write_text(SCORE)
        (folder / "mortal.py").write_text(MORTAL)
        write_shelf(folder)
        write_mixture_model(folder / "mixture")
        write_quiz(folder, 40)
        _write_pairs(folder / "pairs.parquet")
        failed = [case for case in chosen if not _proves(case, folder, wanted.seed)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} cases hold")
    for case in failed:
        print(f"again: python -m tests.e2e.soak '{case}' --seed {wanted.seed}")
    return 1 if failed else 0


def _write_pairs(file: Path) -> None:
    """Write rows with a chosen and a rejected response."""
    rows = generate(40, seed=1, level=1, careless=0.0, split="train")
    for row in rows:
        row.extra_info.update(chosen=row.extra_info.pop("answer"), rejected="#### 0")
    write_rows(file, rows)


def _proves(case: str, folder: Path, seed: int) -> bool:
    """Return True if the proof of `case` finds nothing wrong; print the result."""
    setup, _, moment = case.partition("/")
    proof = (
        PROOFS.get(case)
        or (case in EAGER and partial(_learns_once, case, seed))
        or (case in soak_sweeps.CASES and partial(soak_sweeps.survive, case, SWEPT, seed))
        or (case in soak_watchers.CASES and partial(_is_watched, case, seed))
        or {
            "leaks": partial(_grows, setup),
            "engine": partial(_loses_engines, setup),
            "others": partial(_loses_others, setup, seed),
        }.get(moment)
        or partial(_differs, case, seed)
    )
    begin = time.monotonic()
    try:
        wrong = proof(folder)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    result = "holds" if wrong is None else f"DIFFERS: {wrong}"
    print(f"{case:40} {time.monotonic() - begin:5.0f} s  {result}", flush=True)
    return wrong is None


def _straight(name: str, command: list[str], folder: Path) -> Path:
    """Return the undisturbed run of a setup, made once."""
    straight = folder / "runs" / "quickstart" / name
    if not straight.exists():
        ended = run(*command, name, cwd=folder)
        assert ended.code == 0, ended.talk
    return straight


def _differs(case: str, seed: int, folder: Path) -> str | None:
    """Return what differs between a run that is killed as `case` says and an undisturbed one."""
    name, moment, number = case.split("/")
    setup = SETUPS[name]
    generator = random.Random(f"{seed} {case}")  # does not depend on the other cases
    kills = (
        random_kills(*RANDOM[moment], generator)
        if moment in RANDOM
        else [f"{each}:{generator.uniform(0, 0.02):.3f}:{number}" for each in MOMENTS[moment]]
    )
    command = ["train", setup.verb, *setup.options, *SETTINGS, *setup.settings, "--name"]
    straight = _straight(name, command, folder)
    killed = straight.with_name("killed")
    try:
        options = [*setup.options, *setup.resume]
        doing = finish_despite(kills, "killed", [*command, "killed"], folder, *options)
        print(f"killed at {kills}, {doing}", flush=True)
        differing = _differing(killed, straight, setup.exact) if doing else ["nothing was killed"]
    finally:
        remove_run(killed, folder / "elsewhere")
    return ", ".join(differing) or None


def _loses_engines(name: str, folder: Path) -> str | None:
    """Return what is wrong with the responses of a run of which one or two engines are killed."""
    setup = SETUPS[name]
    command = ["train", setup.verb, *SETTINGS, *setup.settings, "--name"]
    straight = _straight(name, command, folder)
    killed = straight.with_name("killed")
    # If all are lost during an update, their responses are generated after it, by other weights.
    for number in range(1 if AHEAD[0] in setup.settings else 2):
        (folder / f"die-{number}").touch()
    engine = f"actor_rollout_ref.rollout.name={setup.mortal}"
    ended = run(*command, "killed", engine, cwd=folder)
    assert ended.code == 0, ended.talk
    lost, same = len(events(killed, "engine_lost")), responses(killed) == responses(straight)
    remove_run(killed, folder / "elsewhere")
    return None if same and lost else f"{lost} engines killed, responses are same: {same}"


def _loses_others(name: str, seed: int, folder: Path) -> str | None:
    """Return what differs after kills of processes that a run has started, and resumptions."""
    setup = SETUPS[name]
    command = ["train", setup.verb, *setup.options, *SETTINGS, *setup.settings, "--name"]
    straight = _straight(name, command, folder)
    killed, victims = straight.with_name("killed"), folder / "victims"
    victims.write_text("")
    generator = random.Random(f"{seed} {name}")
    words: list[str] = [*command, "killed"]
    codes: list[int] = []
    try:
        while not codes or codes[-1] != 0:
            ended = run(
                *words,
                cwd=folder,
                kill_at=f"{generator.randint(2, 30)}:0.001",
                environment={VICTIMS: str(generator.random()), KILLED_FILE: str(victims)},
            )
            assert "internal error" not in ended.talk, ended.talk
            assert len(codes) < MOST_ATTEMPTS, ended.talk
            codes.append(ended.code)
            words = ["resume", "killed", *setup.options]
        print(f"exit codes {codes}", *victims.read_text().splitlines(), sep="\n    ", flush=True)
        # An episode that is played again shares other steps of the engine, and their rounding.
        found = [part for part in _differing(killed, straight, True) if part != "metrics"]
        return ", ".join(found + _differing(killed, straight, exact=False)) or None
    finally:
        remove_run(killed, folder / "elsewhere")


def _grows(name: str, folder: Path) -> str | None:
    """Return what a long run of a setup holds ever more of; print all sizes."""
    setup = SETUPS[name]
    given = [*SETTINGS, *setup.settings, *leaks.SETTINGS]
    command = ["train", setup.verb, *setup.options, *given, "--name", "long"]
    written = folder / "runs" / "quickstart" / "long"
    found = leaks.growths(command, folder, written)
    print(*found, sep="\n    ", flush=True)
    remove_run(written, folder / "elsewhere")
    return ", ".join(str(each) for each in found if each.is_leak) or None


def _learns_once(case: str, seed: int, folder: Path) -> str | None:
    """Print how a run with random faults learns from each prompt once; raise if it does not."""
    print(faults.learn_despite(*EAGER[case], folder, f"{seed} {case}"), flush=True)
    return None


def _is_watched(case: str, seed: int, folder: Path) -> str | None:
    """Return what is wrong with a run whose board or supervisor is killed."""
    setup = SETUPS["grpo-inline"]
    command = ["train", setup.verb, *setup.options, *SETTINGS, *setup.settings, "--name"]
    return soak_watchers.survive(case, command, _straight("grpo-inline", command, folder), seed)


def _differing(killed: Path, straight: Path, exact: bool) -> list[str]:
    """Return what differs between two runs; metrics by more than `TOLERANCE` unless `exact`."""
    if not exact:
        rows = zip(reproducible(killed), reproducible(straight), strict=True)
        return [
            f"{name} of step {row['step']}: {row.get(name)} and {other.get(name)}"
            for row, other in rows
            for name in row.keys() | other.keys()
            if not name.startswith(PER_RANK) and not _close(row.get(name), other.get(name))
        ]
    return differing(killed, straight)


def _close(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
