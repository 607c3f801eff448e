"""Help of the console's commands, for lists, which import none of them."""

from rlctl.plugins import CommandHelp as Help

HELP = {
    "commands.new": Help(
        "Write a recipe and a reward function for your own data, and check them.",
        "Data and rewards",
        before="prep",
    ),
    "commands.fit": Help(
        "Find the fewest devices and the largest micro-batch that the memory allows.",
        "Training",
        before="resume",
    ),
    "commands.compare": Help(
        "Compare the settings of runs, and their metrics at the same step.", "Runs", before="show"
    ),
    "commands.board": Help(
        "Show all runs in the browser: live curves, comparisons, sweeps, samples, logs.",
        "Runs",
        before="loggers",
    ),
    "commands.report": Help(
        "Write one self-contained HTML file about runs: curves, alarms, samples, settings.",
        "Runs",
        before="loggers",
    ),
    "commands.mcp": Help(
        "Serve runs to clients of the Model Context Protocol.", "Runs", before="loggers"
    ),
    "commands.notify": Help(
        "Send a test notice to receivers of `trainer.notify`.", "Runs", before="loggers"
    ),
    "commands.config.schema": Help(
        "Print the JSON schema of a recipe, so that editors complete and check its keys."
    ),
    "commands.data.from-runs": Help("Write training data from the stored responses of runs."),
    "commands.runs.sync": Help(
        "Send the missing steps of a finished run, or of a sweep's runs, to trackers."
    ),
    "commands.runs.rm": Help("Move runs to the trash; `rlctl runs restore` restores them."),
    "commands.runs.restore": Help("Restore removed runs from the trash."),
    "commands.runs.pull": Help(
        "Download the remote copy of a run, with its latest complete checkpoint."
    ),
    "commands.runs.trash": Help("List removed runs with their size, or delete them permanently."),
    "commands.runs.tag": Help(
        "Add tags to a run or remove them, for `--where '\"TAG\" in tags'` and `@tag:TAG`."
    ),
    "commands.runs.note": Help("Set the note of a run."),
    "commands.runs.prune": Help(
        "Remove checkpoints of runs for good; metrics, samples and settings stay."
    ),
}
