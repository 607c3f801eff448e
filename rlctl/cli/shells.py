"""The scripts that bash, zsh and fish load for the TAB key, in the place of Typer's own for bash and zsh.

Typer's break on `key=value`: bash splits words at `=` and `:`, and both shells put a space after a half-written key. These hand
the line up to the cursor to `rlctl` in one and the same form (that of Typer's fish script, which is right as it is).
"""

from __future__ import annotations

from contextlib import suppress

# readline replaces only what stands behind the last `=` or `:` of the word, so that much is cut off every offer. An offer that a
# user goes on typing at (`trainer.`, `data.shuffle=`, `[console`) gets no space.
BASH = r"""
%(complete_func)s() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" breaks="${COMP_WORDBREAKS//[^=:]/}" offer
    local word="${line##*[[:space:]]}"
    COMPREPLY=( $(env _TYPER_COMPLETE_ARGS="$line" _TYPER_COMPLETE_FISH_ACTION=get-args %(autocomplete_var)s=complete_fish "$1") )
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

# The file is both sourced and autoloaded: autoloaded, its first call is a TAB already.
ZSH = r"""
#compdef %(prog_name)s

%(complete_func)s() {
    local line value
    local -a open whole open_shown whole_shown
    for line in "${(@f)$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _TYPER_COMPLETE_FISH_ACTION=get-args \
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


def use_our_scripts() -> None:
    """Let `--show-completion` and `--install-completion` give these scripts.

    The table of scripts is not public. A Typer that keeps them elsewhere gives its own: the TAB key then knows less, nothing else fails.
    """
    with suppress(ImportError, AttributeError, KeyError):
        from typer import _completion_shared

        _completion_shared._completion_scripts.update(bash=BASH, zsh=ZSH)
