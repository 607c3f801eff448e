"""Help of the commands of bridges, for lists, which import none of them."""

from rlctl.plugins import CommandHelp

HELP = {
    "commands.import": CommandHelp(
        "Turn a script of verl into a recipe.", "Recipes", before="config"
    ),
}
