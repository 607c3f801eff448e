"""List of all calls that remove, move or replace files, each with the reason why they are ours."""

from __future__ import annotations

import ast
from collections import Counter

from tests.architecture.source import FILES, ROOT, nodes, parsed
from tests.plugin_folders import in_this_tree

METHODS = {"rmtree", "unlink", "rmdir", "rename", "renames", "removedirs"}
OF_MODULES = {("os", "remove"), ("os", "replace"), ("shutil", "move")}
HELPERS = {"remove", "rmtree"}  # imported by name, such as `rlctl.files.remove`

ASIDE = "a temporary name beside the target, of this writer alone"
CALLER = "the caller's file: each call of it is listed here"
LOCKED = "inside the run's folder, which this process has locked"
PLACED = f"{LOCKED}; a part elsewhere is the run's own since `place` was called"
CLAIMED = "`_is_own` has read the claim: the folder is of this run in this place"
# The number after the name of the call, if any, is that of such calls in the function.
REASONS = {
    "files.py:apply_umask unlink": ASIDE,
    "files.py:put_in_place replace": "the target that the caller writes, from " + ASIDE,
    "files.py:remove rmtree": CALLER,
    "files.py:remove unlink": CALLER,
    "files.py:replacing remove 2": ASIDE,
    "plugins/bridges/sglang_server.py:_end unlink": "a log that this process made",
    "plugins/console/archive.py:_aside rmtree": "a hidden folder that this process made",
    "plugins/console/token_values.py:write_step unlink": "tokens of older steps than are kept",
    "plugins/console/board/token_file.py:_create unlink": "own unfinished file",
    "plugins/console/board/token_file.py:stored_token unlink": "a token that others may know",
    "plugins/console/slurm/array.py:submit_array rmtree": "a sweep just made, which SLURM refused",
    "plugins/console/slurm/sbatch.py:send unlink": "own order of a job that SLURM refused",
    "plugins/console/slurm/sbatch.py:write_order unlink": "the number of a job that has ended",
    "runs/engine_requests.py:received unlink": "a request that this driver has read",
    "runs/folders_elsewhere.py:_bring_in unlink": f"{LOCKED}; the link alone, not its target",
    "runs/folders_elsewhere.py:_free unlink 2": CLAIMED,
    "runs/folders_elsewhere.py:_leave rmtree": CLAIMED + ", and no other part is in it",
    "runs/folders_elsewhere.py:_link rename": f"{LOCKED}; a real folder, not a link",
    "runs/folders_elsewhere.py:_link replace": f"{LOCKED}; a link, which is not followed",
    "runs/folders_elsewhere.py:_link rmtree": f"{LOCKED}; the folder that was just renamed",
    "runs/folders_elsewhere.py:_link unlink": LOCKED,
    "runs/folders_elsewhere.py:complete remove 2": "in the idle run's folder; links not followed",
    "runs/folders_elsewhere.py:complete replace": "in the idle run's folder: no part is there",
    "runs/folders_elsewhere.py:delete rmtree": CLAIMED,
    "runs/naming.py:remove_abandoned rmtree": "named by this host, and no process has locked it",
    "runs/prune.py:prune rename": "a checkpoint of the run itself: `is_foreign` was asked",
    "runs/prune.py:prune rmtree": "the checkpoint that was just renamed",
    "runs/rewind.py:_remove_unfinished unlink": PLACED,
    "runs/rewind.py:rewind move": PLACED,
    "runs/run_dir.py:RunDir.creating rmtree": "a random name that this process made",
    "runs/run_dir.py:RunDir.finish unlink": LOCKED,
    "runs/run_dir.py:RunDir.new_attempt replace": LOCKED,
    "runs/run_dir.py:RunDir.new_attempt rmtree": LOCKED,
    "runs/run_dir.py:RunDir.new_attempt unlink 2": LOCKED,
    "runs/trash.py:empty rmtree 2": "runs in the trash of the root that the user named",
    "runs/trash.py:remove rename": "the run that the user named; links are not followed",
    "runs/trash.py:restore rename": "the run that the user named; an existing one is not replaced",
    "runs/trash.py:restore rmdir": "folders of the trash, if they are empty",
    "runtime/export.py:_aside rename": "files of the last export by its manifest",
    "runtime/export.py:_aside rmtree": "the folder that was just renamed",
    "runtime/training/drop_optimizers.py:drop_optimizers rmtree": PLACED,
    "runtime/training/remote_copy.py:RemoteCopy._work rmtree": PLACED,
    "runtime/training/remote_copy.py:_send_checkpoint rmtree 2": f"{PLACED}; links just made",
    "runtime/training/remote_fetch.py:_get_latest rmtree": "fetched by this process, aside",
    "runtime/training/checkpoint_store.py:CheckpointStore.clear rmtree": PLACED,
    "runtime/training/checkpoint_store.py:CheckpointStore.finish rmtree": PLACED,
    "runtime/training/checkpoint_store.py:CheckpointStore.finish unlink": PLACED,
    "runtime/training/checkpoint_store.py:CheckpointStore.remove rename": PLACED,
    "runtime/training/checkpoint_store.py:CheckpointStore.remove rmtree": PLACED,
    "runtime/training/checkpoint_store.py:CheckpointStore.set_aside_after rename": PLACED,
    "runtime/cluster/session_folder.py:_remove_if_stale rmtree": "of this user, its lock is free",
    "runtime/cluster/session_folder.py:session_folder rmtree": "made by this process",
    "runtime/rollout/vllm_engine/vllm_startup.py:_unlink_shared_memory unlink 2": "of this engine",
    "runtime/workers/background.py:_guarded rmdir": f"{PLACED}; if it is empty",
    "runtime/workers/background.py:_guarded rmtree": f"{PLACED}; a write that was given up",
    "runtime/workers/background.py:_guarded unlink": PLACED,
    "runtime/workers/trace.py:Trace.write replace": LOCKED,
    "sweeps/new_folder.py:create rmtree": "a random name that this process made",
    "tracking/jsonl.py:JsonlTracker._write_trained unlink": LOCKED,
    "tracking/wandb.py:_remove_empty_files rmtree": "empty files that this process's SDK made",
}


def test_every_removal_of_files_is_listed_with_its_reason() -> None:
    found = Counter(
        f"{path.relative_to(ROOT / 'rlctl')}:{inside} {name}"
        for path in FILES
        for inside, node in nodes(parsed(path))
        if isinstance(node, ast.Call) and (name := _removal(node)) is not None
    )
    listed = {key if count == 1 else f"{key} {count}" for key, count in found.items()}
    assert listed == {*filter(in_this_tree, REASONS)}


def test_removals_are_recognized() -> None:
    texts = {
        "shutil.rmtree(x)": "rmtree",
        "path.unlink()": "unlink",
        "os.replace(a, b)": "replace",
        "aside.replace(target)": "replace",
        "aside.replace(target=b)": "replace",
        "remove(path)": "remove",
        "os.remove(path)": "remove",
        "text.replace('a', 'b')": None,
        "time.replace(tzinfo=UTC)": None,
        "shutil.move(a, b)": "move",
        "names.remove(x)": None,
        "dataclasses.replace(x, a=1)": None,
    }
    for text, name in texts.items():
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert _removal(call) == name, text


def _removal(call: ast.Call) -> str | None:
    """Return the name of the function if the call removes, moves or replaces files."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id if function.id in HELPERS else None
    if not isinstance(function, ast.Attribute):
        return None
    name = function.attr
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    keywords = [keyword.arg for keyword in call.keywords]
    replaces_path = name == "replace" and (len(call.args), keywords) in ((1, []), (0, ["target"]))
    return name if name in METHODS or (owner, name) in OF_MODULES or replaces_path else None
