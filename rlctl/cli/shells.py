"""Completion scripts for bash and zsh that replace those of Typer, which break on `key=value`.

Bash splits words at `=` and `:`, and both shells add a space after an incomplete key. These scripts
pass the line up to the cursor to `rlctl` in the form of Typer's fish script.
"""

from __future__ import annotations

from contextlib import suppress

# readline replaces only the text after the last `=` or `:` of the word, so the text before is cut
# off each candidate. No space follows an incomplete candidate (`trainer.`, `data.shuffle=`).
BASH = r"""
%(complete_func)s() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" breaks="${COMP_WORDBREAKS//[^=:]/}" offer
    local word="${line##*[[:space:]]}"
    COMPREPLY=( $(env _TYPER_COMPLETE_ARGS="$line" _TYPER_COMPLETE_FISH_ACTION=get-args \
                      %(autocomplete_var)s=complete_fish "$1") )
    COMPREPLY=( "${COMPREPLY[@]%%%%$'\t'*}" )
    if [[ -n $breaks && $word != [\'\"]* && $word == *["$breaks"]* ]]; then
        word="${word%%"${word##*["$breaks"]}"}"
        COMPREPLY=( "${COMPREPLY[@]#"$word"}" )
    fi
    for offer in "${COMPREPLY[@]}"; do
        case $offer in
            *] ) ;;
            *[=./,] | \[* ) compopt -o nospace ;;
        esac
    done
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""

# The file is sourced or autoloaded; when autoloaded, its first call completes a word.
ZSH = r"""
#compdef %(prog_name)s

%(complete_func)s() {
    local line value
    local -a open whole open_shown whole_shown
    for line in "${(@f)$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \
                             _TYPER_COMPLETE_FISH_ACTION=get-args \
                             %(autocomplete_var)s=complete_fish "${words[1]}")}"; do
        value="${line%%%%$'\t'*}"
        case "$value" in
            '') ;;
            *[=./,] | *=\[*[^]] | *=\[ ) open+=("$value"); open_shown+=("${line/$'\t'/  -- }") ;;
            *) whole+=("$value"); whole_shown+=("${line/$'\t'/  -- }") ;;
        esac
    done
    (( $#open + $#whole )) || { _files; return }
    (( $#open )) && compadd -S '' -l -d open_shown -a open
    (( $#whole )) && compadd -l -d whole_shown -a whole
    return 0
}

if [[ $funcstack[1] == _%(prog_name)s ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


def replace_completion_scripts() -> None:
    """Make `--show-completion` and `--install-completion` use these scripts.

    The table of scripts is private to Typer. If it has moved, the scripts of Typer are used.
    """
    with suppress(ImportError, AttributeError, KeyError):
        from typer import _completion_shared

        _completion_shared._completion_scripts.update(bash=BASH, zsh=ZSH)


def completion_script(shell: str) -> str:
    """Return the script that completes `rlctl` in a shell: bash, zsh, fish, powershell or pwsh."""
    from typer._completion_shared import get_completion_script

    return get_completion_script(prog_name="rlctl", complete_var="_RLCTL_COMPLETE", shell=shell)
