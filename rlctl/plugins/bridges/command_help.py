"""Help of the commands of bridges, for lists, which import none of them."""

from rlctl.plugins import CommandHelp

IMPORT = "Turn a script of verl into a recipe."
HELP = {"commands.import": CommandHelp(IMPORT, "Recipes", before="config")}
