"""The command `grpo completion`: print a completion script for bash or zsh."""

import argparse

from grpo_recipes.cli import command, commands, load_command, option
from grpo_recipes.launch.submission import PROFILES
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.document import UNSET
from grpo_recipes.recipe.keys import catalogue, run_root
from grpo_recipes.recipe.rules import REPORTERS, unsupported_keys

# zsh runs the script in its emulation of bash. If the script offers no words, both shells complete file names.
_SCRIPT = """# {shell}: source <(grpo completion {shell})
{setup}_grpo_runs() {{
    local file
    command find "${{RUN_ROOT:-{run_root}}}" -mindepth 2 -maxdepth 2 -name run.json 2>/dev/null | while read -r file; do
        file=${{file%/run.json}}
        echo "${{file##*/}}"
    done
}}
_grpo() {{
    local IFS=$' \\n' command=${{COMP_WORDS[1]}} word=${{COMP_WORDS[COMP_CWORD]}} words='' files=''
    local before=${{COMP_WORDS[COMP_CWORD-1]}} keys='{keys}'
    if [[ $before == '=' ]]; then before=--${{COMP_WORDS[COMP_CWORD-2]#--}}; fi
    if [[ $word == '=' ]]; then before=--${{COMP_WORDS[COMP_CWORD-1]#--}} word=''; fi
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
        --resume | --run) words="last $(_grpo_runs)" ;;
        --profile) words='{profiles}' files=yaml ;;
{values}
        {switches} | [!-]*) case $command in
{bare}
        esac
            # After its recipe, a sweep has words such as learning_rate=1e-6,1e-5.
            if [[ $command == sweep && $COMP_CWORD -gt 2 ]]; then for key in $keys; do words+=" $key="; done; fi ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ ${{COMPREPLY[*]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
    IFS=$'\\n'
    if [[ -n $files ]]; then COMPREPLY+=($(compgen -f -X '!*.yaml' -- "$word") $(compgen -d -- "$word")); fi
}}
complete -o default -o filenames -F _grpo grpo
"""
_SETUP = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
_TRUTH = ("true", "false")


@command("Print a script that completes commands, options and keys", option("shell", choices=list(_SETUP)))
def completion(options: argparse.Namespace) -> int:
    """Print the completion script of a shell, generated from the commands and the catalogue of keys. Return 0."""
    loaded = {name: load_command(name) for name in commands()}
    recipes = [name for name, item in loaded.items() if item.takes_recipe]
    all_options = [names_and_settings for item in loaded.values() for names_and_settings in item.all_options()]
    switches = {name for names, settings in all_options if settings.get("action") == "store_true" for name in names}
    choices: dict[str, tuple[str, ...]] = {}  # flag -> choices, of options first and then of recipe keys
    for names, settings in all_options:
        choices |= {name: tuple(settings["choices"]) for name in names if name[0] == "-" and "choices" in settings}
    choices["--report_to"] = REPORTERS
    for name, entry in catalogue().items():
        if values := _TRUTH if entry["type"] == "bool" else entry.get("choices"):
            choices.setdefault(f"--{name}", tuple(map(str, values)))
    bare = {"|".join(recipes): "files=yaml", "keys": "words=$keys", "completion": f"words='{' '.join(_SETUP)}'"}
    bare["status|logs|watch|stop|report|chat"] = 'words="last $(_grpo_runs)"'
    print(
        _SCRIPT.format(
            shell=options.shell,
            setup=_SETUP[options.shell],
            keys=" ".join(key for key in [*catalogue(), UNSET] if key not in unsupported_keys()),
            commands=" ".join(loaded),
            options=_format_cases({name: f"words='{' '.join(item.flags())} --help'" for name, item in loaded.items()}),
            with_keys="|".join(recipes),
            values=_format_cases({name: f"words='{' '.join(words)}'" for name, words in choices.items()}),
            run_root=run_root({}),
            profiles=" ".join(sorted(path.stem for path in (find_code_root() / PROFILES).glob("*.yaml"))),
            switches="|".join(sorted(switches)),
            bare=_format_cases(bare),
        ),
        end="",
    )
    return 0


def _format_cases(words: dict[str, str]) -> str:
    """Return a branch of a shell's ``case`` for each pattern: ``PATTERN) COMMAND ;;``. An empty pattern has none."""
    return "\n".join(f"        {name}) {text} ;;" for name, text in words.items() if name)
