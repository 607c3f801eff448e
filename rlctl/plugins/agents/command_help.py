"""Help of the commands of agents, for lists, which import none of them."""

from rlctl.plugins import CommandHelp

HELP = {
    "commands.env": CommandHelp(
        "List, show and test environments and tools.", "Data and rewards", before="recipes"
    ),
}
