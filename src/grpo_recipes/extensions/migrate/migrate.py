"""``grpo new --from``: a recipe of another project becomes one of ours, and every change says its reason.

Names come from ``names.yaml``. What has no key here, and what ``grpo check`` would refuse, stays as a comment. A reward
that nothing here replaces becomes a function to write, so that no run learns something else than was asked for.
"""

import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import Problem, config_error, translate
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import converters, merge_recipe, sort_problems
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.converters.files import FileConverter, Surroundings, converter_of
from grpo_recipes.recipe.converters.table import in_words, short
from grpo_recipes.recipe.document import BASE_KEY, Value, read_file
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, nested_catalogue, schema_line
from grpo_recipes.recipe.registry import PACKAGE_KEYS, benchmark_problem, missing_package, rewards
from grpo_recipes.recipe.rules import EMBEDDINGS, NEUTRAL_SAMPLING, REPORTERS
from grpo_recipes.recipe.tasks import requested_task, with_task
from grpo_recipes.recipe.user_code import source_path
from grpo_recipes.secrets import masked, secret_value

_NEEDED = ("model_name_or_path", "dataset_name", "dataset_mixture", "reward_funcs")  # never left out for being wrong
_LOADERS = ("json", "csv", "parquet", "text")  # named in place of a dataset, whose files another setting has
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_LOGIN = re.compile(r"(hf|hub|api|auth|access|wandb)_?(token|key)|^token$|password|secret")
_VISION = re.compile(r"(?i)[-_.]vl\b|[-_]vl[-_]|vision|llava|pixtral|smolvlm|internvl|paligemma")
_TEACHES = re.compile(r"(?:use|write) (\w+)$")
# Defaults that older versions of TRL had otherwise.
_MOVED = {"beta": "0.04", "temperature": "0.9", "loss_type": "grpo or bnpo", "max_prompt_length": "512"}


class _Dumper(yaml.SafeDumper):
    """Write a text of several lines as one."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass
class Line:
    """A setting of the translated recipe, or one that is left out of it."""

    key: str  # here, or as it was named where there is none
    value: Any
    name: str = ""  # as it was named; empty where it is added
    why: str = ""  # why it is changed, added or left out
    kept: bool = True

    def text(self) -> str:
        """Return the line of the recipe, under the reason of a change."""
        if not self.kept and (_LOGIN.search(self.name) or secret_value(self.value)):
            return f"# not translated: {self.name}: {self.why}\n"
        plain = {self.key if self.kept else self.name: self.value}
        yaml_text = yaml.dump(plain, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=10**6)
        why = f"# {'' if self.kept else 'not translated: '}{' '.join(self.why.split())}\n" if self.why else ""
        return why + (yaml_text if self.kept else "".join(f"#   {line}\n" for line in yaml_text.splitlines()))

    def said(self) -> str:
        """Return what `grpo new` prints of a change."""
        what = f"{self.key} is {'changed' if self.name else 'added'}" if self.kept else f"{self.name} is left out"
        return f"{what}: {' '.join(self.why.split())}"


@dataclass
class Migration:
    """A translated recipe."""

    source: Path
    target: Path
    lines: list[Line] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)  # rewards to write
    notes: list[str] = field(default_factory=list)  # on how the file is written
    problems: list[Problem] = field(default_factory=list)  # what must be filled in

    @property
    def rewards_file(self) -> Path:
        """Where the rewards to write are."""
        return self.target.with_name(f"{self.target.stem}_rewards.py")

    def text(self) -> str:
        """Return the recipe."""
        head = f"# Translated from {self.source.name}; what is changed or left out says why.\n"
        return f"{schema_line(self.target)}\n{head}" + "".join(line.text() for line in self.lines)

    def rewards_text(self) -> str:
        """Return a Python file with a function for each reward to write."""
        made = [f'"""Rewards of {self.source.name} that nothing replaces: write each one."""\n']
        for name in self.unwritten:
            about = '"""Return a score for each completion; columns holds the other columns of the data."""'
            raised = f'raise NotImplementedError("write the reward {name}")'
            made.append(f"\n\ndef {name}(completions, **columns):\n    {about}\n    {raised}\n")
        return "".join(made)

    def files(self) -> dict[Path, str]:
        """Return the text of each file to write."""
        rewards = {self.rewards_file: self.rewards_text()} if self.unwritten else {}
        return {self.target: self.text(), **rewards}

    def report(self) -> list[str]:
        """Return what `grpo new` prints: every change, and what is to be done."""
        said = [*self.notes, *(line.said() for line in self.lines if line.why)]
        moved = [f"{key} ({old})" for key, old in _MOVED.items() if self.get(key) is None]
        if moved:
            said.append(f"not given, and once another default in TRL: {', '.join(moved)}")
        said += [f"write {display_path(self.rewards_file)}: {', '.join(self.unwritten)}"] if self.unwritten else []
        said += [f"to fill in: {problem.what} ({problem.fix})" for problem in self.problems]
        return [f"grpo: {masked(one)}" for one in said]

    def get(self, key: str) -> Line | None:
        """Return the line that gives ``key`` its value."""
        return next((line for line in self.lines if line.kept and line.key == key), None)


def translate_recipe(source: Path, target: Path) -> Migration | None:
    """Translate a recipe of another project, or return None if the file is a recipe of this package."""
    return migrate(source, target) if is_translated(source) else None


def is_translated(source: Path) -> bool:
    """Return whether a file must be translated: it has names that are not ours, or is no YAML."""
    if source.suffix == ".toml":
        return True
    layer = read_file(source, [])
    ours = {BASE_KEY, *converters.ALIASES, *catalogue()}
    asked = layer.get("reward_funcs")
    foreign = {*converters.reward_names(), *converters.other_rewards(True), *converters.other_rewards(False)}
    foreign -= set(rewards())
    return not set(layer) <= ours or bool(foreign & set(map(str, _list(asked and asked.value))))


def migrate(source: Path, target: Path) -> Migration:
    """Return the recipe of another project as one of ours, to be written to ``target``."""
    made = Migration(source, target)
    traps: list[Problem] = []
    read = _read(source, traps)
    file = {name: Value(value, source.name) for name, value in read.items()}
    if converter := converter_of(file):
        made.lines += _converted(converter, file)
        read = {name: value for name, value in read.items() if name not in converter.sections}
    flat = [setting for name, value in read.items() for setting in _flat(name, value)]
    made.notes = [f"{problem.where}: {problem.what}" for problem in traps]
    for name, value in flat:
        made.lines += _translated(name, value)
    _once(made.lines)
    foreign = next((line for line in made.lines if line.why.startswith("it belongs to ")), None)
    if (model := made.get("model_name_or_path")) and _VISION.search(str(model.value)):
        made.notes.insert(0, f"{model.value} reads pictures; only its text part can be trained here")
    if foreign and made.get("reward_funcs") is None and made.get("num_generations") is None:
        why = f"{foreign.name} {foreign.why.removeprefix('it ')}, and no reward is named"
        made.notes.insert(0, f"{source.name} is not a GRPO recipe: {why}. The recipe written here trains with GRPO")
    _keep_rewards(made)
    _add(made, {name for name, _ in flat})
    made.problems = _leave_out_refused(made)
    return made


def _read(source: Path, problems: list[Problem]) -> dict[str, Any]:
    if source.suffix == ".toml":
        wrong = config_error(source.name, "is not valid TOML", "correct it there")
        with translate((tomllib.TOMLDecodeError, UnicodeDecodeError), lambda _: wrong):
            return tomllib.loads(source.read_text(encoding="utf-8"))
    return _joined({name: given.value for name, given in read_file(source, problems).items()})


def _joined(read: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those joined that mean one key together: TRL's datasets, and verl's reward function."""
    entries, size = read.get("datasets"), read.get("test_split_size")
    names = {"path": "id", "name": "config"}
    known = {*names, *nested_catalogue()["dataset_mixture.datasets"]}  # other projects have more, such as `type`
    if (
        isinstance(entries, list)
        and entries
        and all(isinstance(entry, dict) and entry.keys() <= known for entry in entries)
    ):
        mixed = [{names.get(part, part): value for part, value in entry.items()} for entry in entries]
        more = {} if size is None else {"test_split_size": size}
        left = {name: value for name, value in read.items() if name not in ("datasets", "test_split_size", "streaming")}
        read = {**left, "dataset_mixture": {"datasets": mixed, **more}}
    reward = read.get("custom_reward_function")
    if isinstance(reward, dict) and reward.get("path"):
        read = {**read, "reward_funcs": [f"{reward['path']}:{reward.get('name') or 'compute_score'}"]}
        del read["custom_reward_function"]
    return read


def _converted(converter: FileConverter, file: Mapping[str, Value]) -> list[Line]:
    """Return the lines of a file that a config converter reads, whose settings mean what its own table says."""
    around = Surroundings({name: raw.value for name, raw in file.items()})
    lines = [
        Line(key, value, "", f"{reason} {in_words({key: value})}")
        for reason, keys, _ in converter.implied(file, file)
        for key, value in keys.items()
    ]
    for setting in converter.settings(file, around):
        why = f"was {setting.name}{short(setting.value)}"
        lines += [Line(key, value, setting.name, why) for key, value in setting.keys.items()]
        if not setting.keys:
            why = setting.problem.fix.removeprefix("remove it; ") if setting.problem else setting.why
            lines.append(Line(setting.name, setting.value, setting.name, why, kept=False))
    return lines


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings inside mappings, with dots between the names, as far as no key takes the mapping itself."""
    known = converters.meaning_of(name)
    takes = known is not None and any(catalogue()[key]["type"] == "dict" for key in known.sets)
    if isinstance(value, dict) and value and not takes:
        for part, inner in value.items():
            yield from _flat(f"{name}.{part}", inner)
    else:
        yield name, value


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _translated(name: str, value: Any) -> list[Line]:
    """Return the lines of one setting: those that replace it, or the one that says why it is left out."""
    last = name.rpartition(".")[2]
    if _LOGIN.search(last) or secret_value(value):
        return [Line(name, None, name, "export it as a variable, no recipe holds a secret", kept=False)]
    known = converters.meaning_of(name)
    left_out = partial(Line, name, value, name, kept=False)
    if known is None:
        close = converters.meaning_of(converters.nearest(name) or "")
        guess = " and ".join(close.sets) if close else ""
        return [left_out(f"unknown here; did you mean {guess}?" if guess else "no key here has this meaning")]
    if why := converters.harmless(last, value):
        return [left_out(why)]
    writes, instead = known.filled(value), known.fix.removeprefix("remove it; ")
    if last in OWNED_KEYS and (taught := _TEACHES.match(OWNED_KEYS[last])):
        writes = {taught[1]: value} if taught[1] in catalogue() else {}
    writes = converters.by_value(last, value) or writes
    if "dataset_name" in writes and len(_list(value)) > 1:
        writes = {"dataset_mixture": {"datasets": [{"id": one} for one in value]}}
    lines = []
    for key, given in writes.items():
        final, why = _VALUES[key](given) if key in _VALUES else (given, "")
        final = _plain(key, final)
        if key != name:
            why = "; ".join(filter(None, (f"was {name}{short(value)}", why)))
        elif final != value and not why:
            why = f"was {short(value)[2:] or 'written otherwise'}"
        if isinstance(final, str) and "${" in final and not why:
            why = "as it is written: nothing replaces ${...} here"
        # A null that says something is one of a key with another default.
        says_none = value is None and catalogue()[key]["optional"] and catalogue()[key]["default"] is not None
        empty = final in (None, {}, []) and not says_none
        lines.append(Line(key, value if empty else final, name, why or ("it is empty" if empty else ""), not empty))
    return lines or [left_out(instead or "no key here has this meaning")]


def _plain(key: str, value: Any) -> Any:
    """Return a value as a recipe has it: YAML reads ``no`` as false and ``1e-7`` in a mapping as a text."""
    entry = catalogue()[key]
    if isinstance(value, bool):
        value = converters.SAME_VALUES.get(key, {}).get(value, value)
        if value is False and "no" in entry.get("choices", ()):
            return "no"
    if isinstance(value, dict):
        return _number(value)
    if isinstance(value, int | float) and entry["type"].startswith("list["):
        return [value]
    return value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(part): _number(inner) for part, inner in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _only(value: Any, takes: Callable[[str], bool], why: str) -> tuple[Any, str]:
    """Return the items of a list that are taken, and which are left out."""
    taken: list[str] = []
    left: list[str] = []
    for item in map(str, _list(value)):
        (taken if takes(item) else left).append(item)
    return (taken or None, f"without {', '.join(left)}: {why}") if left else (taken or value, "")


def _installed(key: str, value: Any) -> tuple[Any, str]:
    """Return a value that may need a package, each of which saves time or memory alone."""
    package = missing_package(key, value)
    return (None, f"the package {package} is not installed; the default trains the same") if package else (value, "")


def _mixture(value: Any) -> tuple[Any, str]:
    """Return a mixture without ``columns``, whose order is that of prompt and solution here."""
    entries = value.get("datasets") if isinstance(value, dict) else None
    if not any(isinstance(entry, dict) and "columns" in entry for entry in _list(entries)):
        return value, ""
    plain = [{name: part for name, part in entry.items() if name != "columns"} for entry in _list(entries)]
    return {**value, "datasets": plain}, "without columns: the recipe's two and all scalar ones are kept"


def _tex(value: Any) -> tuple[Any, str]:
    """Return a text with the TeX that double quotes took from it, whose backslash and b YAML reads as a backspace."""
    text = value.replace("\b", r"\b").replace("\f", r"\f") if isinstance(value, str) else value
    return text, "" if text == value else r"\b and \f in double quotes were control characters"


def _host(value: Any) -> tuple[Any, str]:
    local = value in ("127.0.0.1", "localhost")
    return ("127.0.0.1", "") if local else (None, "the launcher starts the server where the run is")


# Keys whose values elsewhere may have no meaning here -> what is kept of a value, None for nothing, and why.
_VALUES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    **{key: partial(_installed, key) for key in PACKAGE_KEYS},
    "benchmarks": lambda value: _only(value, lambda name: not benchmark_problem(name, ""), "no benchmark here"),
    "callbacks": lambda value: _only(value, lambda name: source_path(name) is not None,
        "no callback here; push_to_hub publishes the final model"),
    "dataset_config": lambda value: (value[0], "") if isinstance(value, list) and value else (value, ""),
    "dataset_mixture": _mixture,
    "hub_strategy": lambda value: (value if value == "end" else None, "the model is pushed once, at the end"),
    "lora_target_modules": lambda value: _only(value, lambda name: name.rpartition(".")[2] not in EMBEDDINGS,
        "embeddings get no adapter"),
    "report_to": lambda value: _only(value, lambda name: name in REPORTERS, "not supported"),
    "system_prompt": _tex,
    "top_k": lambda value: (0 if value == -1 else value, ""),
    "vllm_server_host": _host,
}  # fmt: skip


def _once(lines: Iterable[Line]) -> None:
    """Leave out what gives a key a second value; one given by its own name and at its default counts for less."""
    given: dict[str, Line] = {}

    def later(line: Line) -> tuple[bool, bool]:
        return line.key != line.name, not line.name.endswith("use_kl_loss")  # which decides over a coefficient

    for line in sorted((line for line in lines if line.kept), key=later):
        other = given.setdefault(line.key, line)
        if other is not line:
            idle = other.key == other.name and other.value in (catalogue()[line.key]["default"], None, *_LOADERS)
            loser, winner = (other, line) if idle else (line, other)
            why = f"the file gives {winner.name}{short(winner.value)} too"
            loser.kept, loser.why, given[line.key] = False, why, winner


def _keep_rewards(made: Migration) -> None:
    """Name our rewards for those of the recipe, each with its weight; leave out the others, or have them written."""
    line = made.get("reward_funcs")
    if line is None:
        default = catalogue()["reward_funcs"]["default"]
        why = "the file names no reward: this is the default, name yours"
        made.lines.append(Line("reward_funcs", default, "", why))
        return
    known, asked, weights = rewards(), [str(name) for name in _list(line.value)], made.get("reward_weights")
    given = _list(weights.value) if weights else []
    judging, of_form = converters.other_rewards(True), converters.other_rewards(False)
    chosen: dict[str, Any] = {}
    left: dict[str, tuple[str, Any]] = {}
    for index, name in enumerate(asked):
        weight = given[index] if index < len(given) else 1.0
        own = name if ":" in name else ":".join(name.rsplit(".", 1))
        ours = own if ":" in own and source_path(own) else converters.reward_names().get(name.rpartition(".")[2], name)
        if ours in chosen:
            left[name] = f"{ours} is there already", weight
        elif ours in known or ":" in ours:
            chosen[ours] = weight
        else:
            left[name] = {**judging, **of_form}.get(name, "no reward here does that"), weight
    judged = any(":" in name or known[name].reads_answer for name in chosen)
    spared = {*of_form, *converters.reward_names(), *(judging if judged else ())} if chosen else set()
    for name in [name for name in left if name not in spared]:
        function = re.sub(r"\W", "_", f"_{name}" if not name or name[0].isdigit() else name)
        made.unwritten.append(function)
        chosen[f"{display_path(made.rewards_file)}:{function}"] = left.pop(name)[1]
    if list(chosen) != asked:
        why = "".join(f"; without {name}: {reason}" for name, (reason, _) in left.items())
        why += f"; write those of {made.rewards_file.name}" if made.unwritten else ""
        line.value, line.why = list(chosen), f"was {line.name}: {', '.join(asked)}{why}"
    if weights and list(chosen.values()) != given:
        weights.value, weights.why = list(chosen.values()), "one for each of reward_funcs"


def _add(made: Migration, names: set[str]) -> None:
    """Add what other projects do without saying so, and what keeps their sampling."""

    def add(key: str, value: Any, why: str) -> None:
        if made.get(key) is None:
            made.lines.append(Line(key, value, "", why))

    if len(names & {name for name, entry in catalogue().items() if entry["config"] == "GRPOConfig"}) > 2:  # of TRL
        add("dataset_solution_column", "solution", "the column that TRL's and open-r1's rewards read")
        if not names & {"dataset_configs", "vllm_device"}:  # of an older open-r1, which reads problem
            add("dataset_prompt_column", "prompt", "the column that TRL and newer versions of open-r1 read")
    truncated = [key for key, neutral in NEUTRAL_SAMPLING.items() if (line := made.get(key)) and line.value != neutral]
    if truncated:
        add("vllm_importance_sampling_correction", False, f"{', '.join(truncated)} would bias it")
    rank = made.get("lora_r")
    if rank and rank.value and "use_peft" not in names:
        add("use_peft", True, f"{rank.name} asks for LoRA; remove both to train all weights")
    mixture = made.get("dataset_mixture")
    held_out = not mixture or "test_split_size" in mixture.value or made.get("eval_dataset_name")
    if held_out and (steps := made.get("eval_steps")) and steps.value and "do_eval" not in names:
        add("eval_strategy", "steps", "eval_steps asks for evaluations; remove both to train without")
    evaluates = made.get("eval_strategy")
    logged = next((line.value for line in made.lines if line.key == "logging_steps"), None)
    if evaluates and evaluates.value == "steps" and isinstance(logged, int) and logged > 1:
        add("eval_steps", logged, "TRL evaluates as often as it logs")
    if (alone := made.get("dataset_name")) and made.get("dataset_mixture"):
        alone.kept, alone.name, alone.why = False, alone.name or alone.key, "dataset_mixture is given"
    grouped = made.get("atropos_api_url")  # environments have the problems
    for key in ("dataset_name", "model_name_or_path"):
        if made.get(key) is None and not (key == "dataset_name" and (made.get("dataset_mixture") or grouped)):
            made.lines.insert(0, Line(key, None, key, "the file names none, name yours", kept=False))


def _leave_out_refused(made: Migration) -> list[Problem]:
    """Leave out what `grpo check` refuses, until nothing is left to; return what is to be filled in."""
    with tempfile.TemporaryDirectory() as folder:
        while True:
            found = _refused(made, Path(folder, made.target.name))
            wrong = [(line, problem) for line, problem in found if line and line.key not in _NEEDED]
            if not wrong:
                return [problem for _, problem in found]
            for line, problem in reversed(wrong):  # the first one of a line is its reason
                line.kept, line.name = False, line.name or line.key
                line.why = f"{problem.what}; {problem.fix.removeprefix('remove it; ')}"


def _refused(made: Migration, path: Path) -> list[tuple[Line | None, Problem]]:
    """Return what `grpo check` refuses in the recipe as it is now, each with its setting where one is wrong."""
    path.write_text(made.text(), encoding="utf-8")
    written = [line for line in made.lines for _ in range(line.text().count("\n"))]
    places = {f"{display_path(path)}:{number}": line for number, line in enumerate(written, 3)}
    recipe, problems = merge_recipe(path)
    recipe, more = with_task(recipe, requested_task({}, None))
    unwritten = made.rewards_file.name if made.unwritten else "\0"
    found = sort_problems([*problems, *more, *check(recipe, {})])
    return [(places.get(problem.where), problem) for problem in found if unwritten not in problem.what]
