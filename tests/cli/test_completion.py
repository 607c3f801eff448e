"""Shell completion: in real shells on a pseudo-terminal, and through the completion protocol."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pexpect
import pytest

from rlctl.__main__ import main
from tests.plugin_folders import of_commands

PROMPT = "READY> "


def environment(home: Path, shell: str) -> dict[str, str]:
    """Return an environment with this `rlctl` in PATH and the shell's files in `home`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RLCTL_", "_TYPER", "_RLCTL"))
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return kept | {
        "HOME": str(home),
        "ZDOTDIR": str(home),
        "PATH": path,
        "TERM": "dumb",
        "SHELL": shell,
        "RLCTL_RUNS": str(home / "runs"),
    }


def make_run(home: Path, name: str, created: str) -> None:
    folder = home / "runs" / "project" / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    stamp = float(created)
    os.utime(folder, (stamp, stamp))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_run(home, "kind-otter", "1000")
    make_run(home, "kind-heron", "2000")
    (home / "rows.parquet").touch()
    (home / "run_qwen.sh").touch()
    return home


def start(shell: str, home: Path) -> Iterator[pexpect.spawn]:
    """Yield an interactive shell after `rlctl --install-completion`."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    settings = environment(home, shell)
    probe = {**settings, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run(
        ["rlctl", "--install-completion", shell],
        env=probe,
        cwd=home,
        check=True,
        capture_output=True,
        timeout=600,
    )
    arguments = {"bash": ["--noprofile", "-i"], "zsh": ["-d", "-i"]}[shell]
    child = pexpect.spawn(
        shell,
        arguments,
        env=settings,
        cwd=str(home),
        encoding="utf-8",
        timeout=600,
        dimensions=(50, 400),
    )
    child.sendline(
        {
            "bash": "PS1='READ''Y> '; bind 'set enable-bracketed-paste off'",
            "zsh": "PS1='READ''Y> '; unset zle_bracketed_paste",
        }[shell]
    )
    child.expect_exact(PROMPT)
    yield child
    child.close(force=True)


@pytest.fixture(scope="module")
def bash(home: Path) -> Iterator[pexpect.spawn]:
    yield from start("bash", home)


@pytest.fixture(scope="module")
def zsh(home: Path) -> Iterator[pexpect.spawn]:
    yield from start("zsh", home)


def completed(shell: pexpect.spawn, line: str) -> str:
    """Return the line after TAB. A `%` typed after it marks its end, including a trailing space."""
    shell.send(line + "\t")
    shell.send("%")
    shell.expect(r"rlctl [^\r\n]*?%")
    found = shell.after
    assert isinstance(found, str)
    empty(shell)
    return on_screen(found).removesuffix("%")


def empty(shell: pexpect.spawn) -> None:
    """Clear the line and wait for the next prompt."""
    shell.sendcontrol("u")
    shell.sendline("")
    shell.expect_exact(PROMPT)


def on_screen(sent: str) -> str:
    """Return the visible line: without bells, and with backspaces applied."""
    line, cursor = "", 0
    for character in sent.replace("\a", ""):
        if character == "\b":
            cursor -= 1
        else:
            line, cursor = line[:cursor] + character + line[cursor + 1 :], cursor + 1
    return line


# What is offered is the same in all shells, so the protocol's test has most of it. These lines test
# how a shell splits words and what it appends.
LINES = [
    ("rlctl tra", "rlctl train "),
    (
        "rlctl train ppo actor_rollout_ref.actor.opt",
        "rlctl train ppo actor_rollout_ref.actor.optim.",
    ),
    ("rlctl train ppo data.shuffle=t", "rlctl train ppo data.shuffle=true "),
    ("rlctl train ppo +data.shuffle=f", "rlctl train ppo +data.shuffle=false "),
    ("rlctl import verl run_qwen.sh -o run_q", "rlctl import verl run_qwen.sh -o run_qwen.sh "),
    ("rlctl train ppo reward.functions=mine.py:sc", "rlctl train ppo reward.functions=mine.py:sc"),
]
BASH_LINES = [
    *LINES,
    ("rlctl train ppo trainer.logger=[cons", "rlctl train ppo trainer.logger=[console"),
    ("rlctl train ppo data.train_files=row", "rlctl train ppo data.train_files=rows.parquet "),
]
# zsh treats a bare `[` as a pattern, and completes it quoted.
ZSH_LINES = [
    *LINES,
    (r"rlctl train ppo trainer.logger=\[cons", r"rlctl train ppo trainer.logger=\[console"),
]


@pytest.mark.parametrize(("typed", "expected"), of_commands(BASH_LINES))
def test_bash(bash: pexpect.spawn, typed: str, expected: str) -> None:
    assert completed(bash, typed) == expected


@pytest.mark.parametrize(("typed", "expected"), of_commands(ZSH_LINES))
def test_zsh(zsh: pexpect.spawn, typed: str, expected: str) -> None:
    assert completed(zsh, typed) == expected


@pytest.mark.parametrize(
    ("line", "offers"),
    of_commands(
        [
            ("rlctl train ppo data.shuffle=", ["data.shuffle=true", "data.shuffle=false"]),
            ("rlctl train ppo actor_rollout_ref.actor.opt", ["actor_rollout_ref.actor.optim."]),
            ("rlctl show ", ["@last", "@failed", "kind-heron", "kind-otter"]),
            ("rlctl show kind-", ["kind-heron", "kind-otter"]),
            ("rlctl eval quick", ["quickstart", "quickstart-agent", "quickstart-vision"]),
            ("rlctl train grpo --logger js", ["jsonl"]),
            ("rlctl train ppo algorithm.adv_estimator=rem", ["algorithm.adv_estimator=remax"]),
            (
                "rlctl train ppo actor_rollout_ref.actor.policy_loss.loss_mode=van",
                ["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"],
            ),
            (
                "rlctl train ppo actor_rollout_ref.actor.loss_agg_mode=tok",
                [
                    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
                    "actor_rollout_ref.actor.loss_agg_mode=token-sum",
                ],
            ),
            (
                "rlctl train ppo algorithm.kl_penalty=low",
                ["algorithm.kl_penalty=low_var_kl", "algorithm.kl_penalty=low_var_kl+"],
            ),
            (
                "rlctl train ppo actor_rollout_ref.rollout.name=h",
                ["actor_rollout_ref.rollout.name=hf"],
            ),
            ("rlctl ru", ["runs"]),
            ("rlctl runs --js", ["--json"]),
            ("rlctl import ", ["verl"]),
            ("rlctl import verl --", ["--output", "--force", "--json", "--help"]),
        ]
    ),
)
def test_completion_protocol_offers_candidates(
    home: Path,
    line: str,
    offers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("RLCTL_RUNS", str(home / "runs"))
    monkeypatch.setenv("_RLCTL_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    with pytest.raises(SystemExit) as ended:
        main([])
    out, err = capsys.readouterr()
    assert (ended.value.code or 0, err) == (0, "")
    assert sorted(each.partition("\t")[0] for each in out.splitlines()) == sorted(offers)


def test_fish(home: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    offers = {
        "rlctl train ppo data.shuffle=": ["data.shuffle=false", "data.shuffle=true"],
        "rlctl generate kind-o": ["kind-otter"],
    }
    lines = "; ".join(f"complete -C '{line}'" for line in offers)
    settings = environment(home, "fish") | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        ["fish", "-c", f"rlctl --show-completion fish | source; {lines}"],
        env=settings,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert sorted(done.stdout.split()) == sorted(chain(*offers.values()))
