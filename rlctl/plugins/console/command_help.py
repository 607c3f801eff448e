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
    "commands.rerun": CommandHelp(
        "Start a new run from the record of another one, and compare their metrics.",
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
    "commands.mcp": CommandHelp(
        "Serve runs to clients of the Model Context Protocol.", "Runs", before="loggers"
    ),
    "commands.notify": CommandHelp(
        "Send a test notice to receivers of `trainer.notify`.", "Runs", before="loggers"
    ),
}
