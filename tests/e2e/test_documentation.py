"""Commands of the README and the docs: each is run in order, or parsed for the reason given here.

Documents start with the run that the README trains, under the names that they use. Training takes
two small steps. `make strangers` runs those of `FROM_SCRATCH`. Pages are generated, blocks are
valid, and the site builds without warnings.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.generate import PAGES as GENERATED
from docs.generate import PARTS, with_parts
from rlctl.__main__ import main
from rlctl.cli.explain.metric_entries import metric_entries
from rlctl.error_codes import error_entries
from tests.e2e.command import environment, rlctl
from tests.plugin_folders import can_run
from tests.settings import given

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM_SCRATCH = ("README.md", "tutorial.md")
NAMES = ("RUN", "A", "B", "C", "S1", "S2", "ppo-261121", "OTHER")

PROGRAMS = ("rlctl", "make", "pip", "python", "seq", "ray", "source")
SHORT = given(batch=8, mini_batch=8, val_rows=4, response=8, steps=2, validate=2, threads=1)
APPENDED = {  # words that make a command short; the text of the document comes first
    r"rlctl generate ": ["--max-tokens", "4"],
}
# The remaining commands are only parsed.
NOT_RUN = {
    r"make demo": "it installs rlctl and runs `rlctl train ppo`, which the test runs in its place",
    r"make test": "it runs this test",
    r"source": "it puts rlctl on the PATH of a shell",
    r"(pip|ray|python -m sglang)": "it installs packages or starts servers",
    r"rlctl .*(--address|s3://|http://|sglang)": "it needs a cluster, a bucket or a server",
    r"rlctl board": "it serves until Ctrl-C; tests/plugins/console/board runs it",
    r"rlctl runs sync": "it needs an account",
    r"rlctl prep gsm8k": "it needs the hub; tests/data_prep runs it with local files",
    r"rlctl (data show|train .*) .*(gsm8k|train\.parquet)": "it needs GSM8K or a model of the hub",
    r"rlctl (train|resume|sweep|stop) ": "e2e/test_train, _resume, _stopping and _sweep train",
    r"rlctl engines ": "cli/test_engines and distributed/test_engines run it",
    r"rlctl runs (-w|rm|restore|pull|trash|prune)": "tests/cli and tests/runs run it",
    r"rlctl (show|sweep best|resume|stop) .*SWEEP": "e2e/test_sweep runs it",
    r"rlctl (watch|logs) big": "a job of SLURM; tests/plugins/console runs it",
    r"rlctl queue ": "tests/plugins/console/test_queue runs it",
    r"rlctl runs import": "tests/plugins/console/test_archive runs it",
    r"rlctl (watch|compare) SWEEP": "sweeps/test_selection runs it",
    r"rlctl export RUN DIR --lora": "the run has no adapter; e2e/test_export runs it",
    r"rlctl (eval|export) ": "`make strangers` runs those of the README and the tutorial",
    r"rlctl (data from-runs|compare .* --group-by)": "tests/plugins/console run them",
    r"rlctl config .*mine\.yaml": "the recipe is an outline; tests/recipes runs it",
}
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s# .*$", re.MULTILINE)


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """Yield language and text of each fenced block."""
    for match in _FENCE.finditer(document.read_text(encoding="utf-8")):
        yield match[2], match[3]


def commands(text: str) -> list[str]:
    """Return the commands of a block without comments; none for a block of output."""
    joined = _COMMENT.sub("", text.replace("\\\n", " "))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    if not lines or lines[0].split()[0] not in PROGRAMS:
        return []
    lines = [line for line in lines if not line.startswith("#")]
    assert all(line.split()[0] in PROGRAMS for line in lines), lines
    return lines


def documented() -> list[str]:
    """Return the commands of all documents."""
    texts = [text for document in DOCS for language, text in blocks(document) if language == ""]
    return [command for text in texts for command in commands(text)]


def reason(command: str) -> str | None:
    """Return why a command is not run, or None."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def words_of(command: str) -> list[str]:
    """Return the words after `rlctl`, with those that shorten the command."""
    more = next((each for pattern, each in APPENDED.items() if re.match(pattern, command)), [])
    return [*shlex.split(command)[1:], *more]


def parsed(command: str) -> tuple[str, ...]:
    """Return the words of a command that a parser looks at: no settings, nothing optional."""
    cleaned = re.sub(r"\[[^\]]*\]|…|\|\w+", "", command) if "'" not in command else command
    return tuple(word for word in shlex.split(cleaned)[1:] if not re.match(r"[\w+~.]+=", word))


def parse(command: str) -> None:
    """Check that the command, its arguments and its options exist."""
    assert main([*parsed(command), "--help"]) == 0, command


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the README's `make demo` was run."""
    folder = tmp_path_factory.mktemp("readme")
    rlctl("train", "ppo", "--inline", *SHORT, cwd=folder)
    return folder


def follow(document: Path, folder: Path) -> None:
    """Write the files that a document shows and run its commands."""
    for language, text in blocks(document):
        if language in ("python", "yaml", "bash") and (name := re.match(r"# (\w+\.\w+)\n", text)):
            (folder / name[1]).write_text(text)
        for command in commands(text) if language == "" else ():
            if not command.startswith("rlctl ") and reason(command) is None:
                env = environment() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
                subprocess.run(["bash", "-ec", command], cwd=folder, env=env, check=True)
            elif not command.startswith("rlctl "):
                continue
            elif reason(command) is None:
                rlctl(*words_of(command), cwd=folder)
            else:
                parse(command)


def test_every_command_exists() -> None:
    found = documented()
    for words in sorted({parsed(each) for each in found if each.startswith("rlctl ")}):
        if can_run(" ".join(words)):
            assert main([*words, "--help"]) == 0, words


@pytest.mark.soak
def test_other_documents(readme: Path, tmp_path: Path) -> None:
    original = next((readme / "runs" / "quickstart").glob("ppo-*"))
    for name in NAMES:
        copy = tmp_path / "runs" / "demo" / name
        shutil.copytree(original, copy, symlinks=True)
        record = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(record | {"name": name, "id": f"id{name}"}))
    for document in DOCS:
        if document.name not in FROM_SCRATCH:
            follow(document, tmp_path)


def test_every_reason_is_used() -> None:
    found = documented()
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, each) for each in found)]
    assert unused == []
    assert len(found) > 40


PAGES = DOCS[1:]
_LOADED = re.compile(
    r'<script[^>]+src="https?:|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+https?:'
)


def texts_in(*languages: str) -> Iterator[tuple[Path, str]]:
    """Yield page and text of the blocks of the docs in these languages."""
    found = ((page, *block) for page in PAGES for block in blocks(page))
    return ((page, text) for page, language, text in found if language in languages)


def test_generated_pages_have_every_entry() -> None:
    errors, metrics = GENERATED["errors.md"](), GENERATED["metrics.md"]()
    assert all(f"\n## {code}\n" in errors for code in error_entries())
    assert all(f"\n| `{entry.name}` |" in metrics for entry in metric_entries())


@pytest.mark.plugin("bridges")
def test_the_page_of_verls_keys_has_its_parts() -> None:
    keys = GENERATED["verl-keys.md"]()
    assert "| `ray_init*` | `ray_kwargs.ray_init\\1` |" in keys
    assert "## Keys without a counterpart" in keys


def test_no_generated_page_is_kept_and_every_part_is_used() -> None:
    assert not {page.name for page in PAGES} & set(GENERATED)
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    marks = {name: re.findall(r"<!-- generated: (.+) -->", text) for name, text in texts.items()}
    assert marks.pop("migrating.md") == ["trl", "openrlhf"]
    assert marks.pop("machines.md") == ["memory"]
    assert marks.pop("models.md") == ["models"]
    assert not any(marks.values())
    assert set(PARTS) == {"trl", "openrlhf", "memory", "models"}
    assert "| `num_generations` | `actor_rollout_ref.rollout.n` |" in with_parts(
        texts["migrating.md"]
    )


def test_pages_that_messages_name_exist() -> None:
    named = {entry.page.partition("#")[0] for entry in error_entries().values() if entry.page}
    sources = (ROOT / "rlctl").rglob("*.py")
    for path in sources:
        named |= set(re.findall(r"docs/([\w-]+\.md)", path.read_text(encoding="utf-8")))
    assert named <= {page.name for page in PAGES}


def test_blocks_are_valid() -> None:
    for _, text in texts_in("yaml"):
        assert yaml.safe_load(text)
    for _, text in texts_in("json"):
        for line in text.splitlines():
            json.loads(line)
    for page, text in texts_in("python"):
        compile(text.replace("…", "..."), page, "exec")
    scripts = "\n".join(text.replace("…", "") for _, text in texts_in("bash", "sh"))
    subprocess.run(["bash", "-n"], input=scripts, text=True, check=True)


def test_examples_of_plug_ins_import_what_they_use_of_rlctl() -> None:
    page = ROOT / "docs" / "extending.md"
    sources = [text for language, text in blocks(page) if language == "python"]
    example = (ROOT / "docs" / "examples" / "plugins" / "rlctl_example.py").read_text()
    public = imported(example) | imported("".join(sources))
    for source in sources:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
        names = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
        assert names & public <= imported(source)
        exec("\n".join(line for line in source.splitlines() if " import " in line), {})


def imported(source: str) -> set[str]:
    """Return the names that a source imports from rlctl."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlctl")
        for alias in node.names
    }


def test_commands_of_scripts_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Parse commands that only a cluster, a hub or a GPU can run."""
    for page, text in texts_in("bash", "sh"):
        for line in re.sub(r"\\\n|(?<=\s)# .*$|&$", "", text, flags=re.MULTILINE).splitlines():
            if line.startswith("rlctl "):
                words = line.replace("…", "").split()[1:]
                if not can_run(" ".join(words)):
                    continue
                assert main([*words, "--help"]) == 0, f"{page}: {line}"
    capsys.readouterr()


@pytest.mark.soak
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.name: page.read_text() for page in (tmp_path / "site").glob("*.html")}
    names = {page.name for page in PAGES} - {"README.md"} | set(GENERATED)
    assert set(pages) >= {name.replace(".md", ".html") for name in names}
    assert [name for name, text in pages.items() if _LOADED.search(text)] == []
    assert 'id="e-oom"' in pages["errors.html"]
    assert "num_generations" in pages["migrating.html"]
    assert not any("<!-- generated:" in text for text in pages.values())
    assert "rlctl.api.train" in pages["api.html"]
