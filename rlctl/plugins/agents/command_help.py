"""Help of the commands of agents, for lists, which import none of them."""

from rlctl.plugins import CommandHelp

ENV = "List, show and test environments and tools."
HELP = {"commands.env": CommandHelp(ENV, "Data and rewards", before="recipes")}
