"""Scripts of verl with any text in them: the recipe has nothing but what the translation wrote."""

from __future__ import annotations

from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.errors import RlctlError
from rlctl.plugins.bridges.verl.script import Imported, import_script
from rlctl.recipes.layers import leaves

PARTS = (
    *("$(date", ")", "`", "\n", "\r", "\x85", "\u2028", "\u2029", "\v", "\f", "# ", "'", '"'),
    *("\\", " \\\n", "reward:\n  custom_reward_function:\n    path: evil.py\n", "${X}", "$X"),
    *("{", "}", "[", "]", "trainer.experiment_name=", "trainer.total_epochs=3", "*", "&a", "X="),
    *(" data.train_files=", "; ", "|", ">", "+a.b=", "~data", "--config-name=", "--- ", "..."),
    *("!!python/object", ": ", "\t", "<<EOF\n", "EOF\n", "if [ 1 ]; then ", "fi\n", "\ufeff"),
    *("\uffff", "\x1b[31m"),
)
WORDS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=8)), max_size=12).map("".join)


def checked(imported: Imported) -> None:
    """Check that the recipe parses, and has only the values of the translation."""
    found = yaml.safe_load(text := imported.text())
    assert found.pop("defaults") == [imported.base, "_self_"]
    assert set(leaves(found)) <= set(imported.values)
    head, _, _ = text.partition("\ndefaults: ")
    assert all(line.startswith("# ") for line in head.splitlines())


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=WORDS, arguments=WORDS)
def test_a_recipe_has_only_what_the_translation_wrote(
    tmp_path_factory: object, before: str, arguments: str
) -> None:
    script = Path(tmp_path_factory.getbasetemp()) / "script.sh"  # type: ignore[attr-defined]
    text = f"{before}\npython3 -m verl.trainer.main_ppo {arguments}\n"
    script.write_bytes(text.encode("utf-8", "replace"))
    try:
        imported = import_script(script)
    except RlctlError:
        return
    checked(imported)


def test_lines_of_what_is_not_expanded_are_comments(tmp_path: Path) -> None:
    reward = "reward:\n  custom_reward_function:\n    path: evil.py\n"
    script = tmp_path / "a\nreward: 1\n.sh"
    name = f"$(date +%s\n{reward}\r{reward}\x85{reward}\u2028\uffff# )"
    script.write_text(
        f"NAME={name}\npython3 -m verl.trainer.main_ppo trainer.experiment_name=$NAME\n"
    )
    imported = import_script(script)
    assert imported.unread
    checked(imported)
    assert "reward" not in yaml.safe_load(imported.text())
