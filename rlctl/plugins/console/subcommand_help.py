"""Help of the console's commands in groups, for the lists of these groups."""

from rlctl.plugins import CommandHelp

CONFIG = {
    "commands.config.schema": CommandHelp(
        "Print the JSON schema of a recipe, so that editors complete and check its keys."
    ),
}

DATA = {
    "commands.data.from-runs": CommandHelp(
        "Write training data from the stored responses of runs."
    ),
}

RUNS = {
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
    "commands.runs.export": CommandHelp("Write a run with its checkpoints into one file."),
    "commands.runs.import": CommandHelp("Unpack a run that `rlctl runs export` wrote."),
}
