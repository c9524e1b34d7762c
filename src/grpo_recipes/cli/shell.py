"""The command for the shell: completion."""

import argparse
import itertools

from grpo_recipes.cli import Command, command, commands, load_command, option
from grpo_recipes.recipe.document import UNSET
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.rules import unsupported_keys

# zsh reads bash's completions in its emulation of sh. Where nothing is offered, both complete names of files.
_SCRIPT = """# {shell}: source <(grpo completion {shell})
{setup}_grpo() {{
    local IFS=$' \\n' command=${{COMP_WORDS[1]}} word=${{COMP_WORDS[COMP_CWORD]}} words='' files=''
    local before=${{COMP_WORDS[COMP_CWORD-1]}} keys='{keys}'
    if [[ $before == '=' ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if [[ $word == '=' ]]; then before=${{COMP_WORDS[COMP_CWORD-1]}} word=''; fi
    if [[ $COMP_CWORD == 1 ]]; then
        words='{commands} --help --version'
    elif [[ $word == -* ]]; then
        case $command in
{options}
        esac
        case $command in {with_keys}) for key in $keys; do words+=" --$key"; done ;; esac
    else
        case $before in
        --config | --from) files=yaml ;;
        --resume | --run) words=last ;;
{values}
        {switches} | [!-]*) case $command in
{bare}
        esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    IFS=$'\\n'
    if [[ -n $files ]]; then COMPREPLY+=($(compgen -f -X '!*.yaml' -- "$word") $(compgen -d -- "$word")); fi
}}
complete -o default -o filenames -F _grpo grpo
"""
_SETUP = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
_TRUTH = ("true", "false")


@command("print a script that completes commands, options and keys", option("shell", choices=list(_SETUP)))
def completion(options: argparse.Namespace) -> int:
    """Print the shell's script, made from the commands and the catalogue of keys."""
    loaded = {name: load_command(name) for name in commands()}
    recipes = [name for name, one in loaded.items() if one.takes_recipe]
    bare = {"|".join(recipes): "files=yaml", "keys": "words=$keys", "completion": f"words='{' '.join(_SETUP)}'"}
    bare["status|logs|watch|stop|report|chat"] = "words=last"
    print(
        _SCRIPT.format(
            shell=options.shell,
            setup=_SETUP[options.shell],
            keys=" ".join(key for key in [*catalogue(), UNSET] if key not in unsupported_keys()),
            commands=" ".join(loaded),
            options=_cases({name: f"words='{' '.join(one.flags())} --help'" for name, one in loaded.items()}),
            with_keys="|".join(recipes),
            values=_cases({name: f"words='{' '.join(words)}'" for name, words in _choices(loaded).items()}),
            switches="|".join(_switches(loaded)),
            bare=_cases(bare),
        ),
        end="",
    )
    return 0


def _choices(commands: dict[str, Command]) -> dict[str, tuple[str, ...]]:
    """Return the values to choose from of each option and key that has some, by its flag."""
    found: dict[str, tuple[str, ...]] = {}
    for names, settings in itertools.chain(*(one.all_options() for one in commands.values())):
        found |= {name: tuple(settings["choices"]) for name in names if name[0] == "-" and "choices" in settings}
    for name, entry in catalogue().items():
        if values := _TRUTH if entry["type"] == "bool" else entry.get("choices"):
            found[f"--{name}"] = tuple(map(str, values))
    return found


def _switches(commands: dict[str, Command]) -> list[str]:
    every = itertools.chain(*(one.all_options() for one in commands.values()))
    return sorted({name for names, settings in every for name in names if settings.get("action") == "store_true"})


def _cases(words: dict[str, str]) -> str:
    return "\n".join(f"        {name}) {text} ;;" for name, text in words.items() if name)
