"""Help of the console's commands, for lists, which import none of them."""

from rlctl.plugins import CommandHelp

HELP = {
    "commands.new": CommandHelp(
        "Write a recipe and a reward function for your own data, and check them.",
        "Data and rewards",
        before="prep",
    ),
    "commands.fit": CommandHelp(
        "Find the fewest devices and the largest micro-batch that the memory allows.",
        "Training",
        before="resume",
    ),
    "commands.compare": CommandHelp(
        "Compare the settings of runs, and their metrics at the same step.", "Runs", before="show"
    ),
    "commands.board": CommandHelp(
        "Show all runs in the browser: live curves, comparisons, sweeps, samples, logs.",
        "Runs",
        before="loggers",
    ),
    "commands.queue": CommandHelp(
        "Start runs as devices of this machine become free.", "Training", before="eval"
    ),
    "commands.report": CommandHelp(
        "Write one self-contained HTML file about runs: curves, alarms, samples, settings.",
        "Runs",
        before="loggers",
    ),
    "commands.notify": CommandHelp(
        "Send a test notice to receivers of `trainer.notify`.", "Runs", before="loggers"
    ),
    "commands.config.schema": CommandHelp(
        "Print the JSON schema of a recipe, so that editors complete and check its keys."
    ),
    "commands.data.from-runs": CommandHelp(
        "Write training data from the stored responses of runs."
    ),
    "commands.runs.sync": CommandHelp(
        "Send the missing steps of a finished run, or of a sweep's runs, to trackers."
    ),
    "commands.runs.rm": CommandHelp("Move runs to the trash; `rlctl runs restore` restores them."),
    "commands.runs.restore": CommandHelp("Restore removed runs from the trash."),
    "commands.runs.pull": CommandHelp(
        "Download the remote copy of a run, with its latest complete checkpoint."
    ),
    "commands.runs.trash": CommandHelp(
        "List removed runs with their size, or delete them permanently."
    ),
    "commands.runs.tag": CommandHelp(
        "Add tags to a run or remove them, for `--where '\"TAG\" in tags'` and `@tag:TAG`."
    ),
    "commands.runs.note": CommandHelp("Set the note of a run."),
    "commands.runs.prune": CommandHelp(
        "Remove checkpoints of runs for good; metrics, samples and settings stay."
    ),
}
