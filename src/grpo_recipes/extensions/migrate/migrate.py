"""Translate a recipe of another project for ``grpo new --from``, with a reason for every change.

* The tables of the config converters (``names.yaml``) map foreign names to recipe keys.
* Settings without a key, and settings that ``grpo check`` would reject, stay in the recipe as comments.
* A reward without a replacement becomes a stub function, so that no run optimizes a different objective by accident.

    translation = translate_recipe(Path("open_r1.yaml"), Path("my.yaml"))
    print(*translation.report(), sep="\n")
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

from grpo_recipes.errors import Problem, config_error
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
from grpo_recipes.secrets import contains_secret, mask_secrets

_NEEDED = ("model_name_or_path", "dataset_name", "dataset_mixture", "reward_funcs")  # kept even if their value is wrong
_LOADERS = ("json", "csv", "parquet", "text")  # loaders instead of a dataset name; another setting has the files
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_LOGIN = re.compile(r"(hf|hub|api|auth|access|wandb)_?(token|key)|^token$|password|secret")
_VISION = re.compile(r"(?i)[-_.]vl\b|[-_]vl[-_]|vision|llava|pixtral|smolvlm|internvl|paligemma")
_SUGGESTED_KEY = re.compile(r"(?:use|write|set) (\w+)$")
# Defaults of older versions of TRL that have changed.
_OLD_DEFAULTS = {"beta": "0.04", "temperature": "0.9", "loss_type": "grpo or bnpo", "max_prompt_length": "512"}


class _Dumper(yaml.SafeDumper):
    """A YAML writer that writes a text with several lines as a literal block."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the YAML node of a text: a literal block (``|``) if it has several lines."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass
class Line:
    """A setting of the translated recipe, or a setting that is left out of it."""

    key: str  # recipe key, or the original name without a key
    value: Any  # value in the recipe, or the original value if it is left out
    name: str = ""  # original name; empty for an added setting
    why: str = ""  # reason for changing, adding or leaving it out
    kept: bool = True  # whether the recipe has it

    def text(self) -> str:
        """Return the YAML of the setting, below a comment with the reason for its change.

        A setting that is left out becomes a comment, and its value is left out if it may be a secret.
        """
        if not self.kept and (_LOGIN.search(self.name) or contains_secret(self.value)):
            return f"# not translated: {self.name}: {self.why}\n"
        setting = {self.key if self.kept else self.name: self.value}
        yaml_text = yaml.dump(setting, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=10**6)
        why = f"# {'' if self.kept else 'not translated: '}{' '.join(self.why.split())}\n" if self.why else ""
        return why + (yaml_text if self.kept else "".join(f"#   {line}\n" for line in yaml_text.splitlines()))

    def report(self) -> str:
        """Return one line for the output of `grpo new`: the key was changed, added or left out, and why."""
        change = f"{self.key} is {'changed' if self.name else 'added'}" if self.kept else f"{self.name} is left out"
        return f"{change}: {' '.join(self.why.split())}"


@dataclass
class Migration:
    """A translated recipe with everything that `grpo new` writes and prints about it."""

    source: Path  # file of the other project
    target: Path  # recipe to write
    lines: list[Line] = field(default_factory=list)  # settings in their order
    unwritten: list[str] = field(default_factory=list)  # names of reward functions that the user must write
    notes: list[str] = field(default_factory=list)  # notes about the whole file
    problems: list[Problem] = field(default_factory=list)  # problems that the user must fix

    @property
    def rewards_file(self) -> Path:
        """The path of the Python file for the rewards that the user must write, next to the recipe."""
        return self.target.with_name(f"{self.target.stem}_rewards.py")

    def text(self) -> str:
        """Return the translated recipe as YAML with comments."""
        head = f"# Translated from {self.source.name}. Comments give the reasons for changes.\n"
        return f"{schema_line(self.target)}\n{head}" + "".join(line.text() for line in self.lines)

    def rewards_text(self) -> str:
        """Return the text of a Python file with a stub for each reward function that the user must write."""
        parts = [f'"""Rewards of {self.source.name} without a replacement. Write their functions."""\n']
        for name in self.unwritten:
            docstring = '"""Return a score for each completion; columns has the other columns of the data."""'
            body = f'raise NotImplementedError("write the reward {name}")'
            parts.append(f"\n\ndef {name}(completions, **columns):\n    {docstring}\n    {body}\n")
        return "".join(parts)

    def files(self) -> dict[Path, str]:
        """Return the text of each file to write, by path: the recipe, and a file of rewards if some are missing."""
        rewards = {self.rewards_file: self.rewards_text()} if self.unwritten else {}
        return {self.target: self.text(), **rewards}

    def report(self) -> list[str]:
        """Return the lines that `grpo new` prints: every change with its reason, and what the user must still do."""
        messages = [*self.notes, *(line.report() for line in self.lines if line.why)]
        old_defaults = [f"{key} ({value})" for key, value in _OLD_DEFAULTS.items() if self.get(key) is None]
        if old_defaults:
            messages.append(f"not set, and older versions of TRL had other defaults: {', '.join(old_defaults)}")
        if self.unwritten:
            messages.append(f"write {display_path(self.rewards_file)}: {', '.join(self.unwritten)}")
        messages += [f"to fill in: {problem.what} ({problem.fix})" for problem in self.problems]
        return [f"grpo: {mask_secrets(message)}" for message in messages]

    def get(self, key: str) -> Line | None:
        """Return the line that sets ``key``; None if no line does."""
        return next((line for line in self.lines if line.kept and line.key == key), None)


def translate_recipe(source: Path, target: Path) -> Migration | None:
    """Translate a recipe of another project; return None if the file is a recipe of this package."""
    return migrate(source, target) if needs_translation(source) else None


def needs_translation(source: Path) -> bool:
    """Return whether a file is not a recipe of this package: it is TOML, or has other names of keys or rewards."""
    if source.suffix == ".toml":
        return True
    layer = read_file(source, [])
    recipe_keys = {BASE_KEY, *converters.ALIASES, *catalogue()}
    reward_funcs = layer.get("reward_funcs")
    foreign = {*converters.reward_names(), *converters.other_rewards(True), *converters.other_rewards(False)}
    foreign -= set(rewards())
    names = set(map(str, _to_list(reward_funcs and reward_funcs.value)))
    return not set(layer) <= recipe_keys or bool(foreign & names)


def migrate(source: Path, target: Path) -> Migration:
    """Translate another project's recipe to a recipe for ``target``, and return it; raise ConfigError if unreadable."""
    migration = Migration(source, target)
    problems: list[Problem] = []
    if source.suffix == ".toml":
        try:
            settings = tomllib.loads(source.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise config_error(source.name, "is not valid TOML", "correct it there") from error
    else:
        settings = _join_settings({name: setting.value for name, setting in read_file(source, problems).items()})
    file = {name: Value(value, source.name) for name, value in settings.items()}
    if converter := converter_of(file):
        migration.lines += _convert_settings(converter, file)
        settings = {name: value for name, value in settings.items() if name not in converter.sections}
    flat = [pair for name, value in settings.items() for pair in _flatten(name, value)]
    migration.notes = [f"{problem.where}: {problem.what}" for problem in problems]
    for name, value in flat:
        migration.lines += _translate_setting(name, value)
    _leave_out_duplicates(migration.lines)
    foreign = next((line for line in migration.lines if line.why.startswith("it belongs to ")), None)
    if (model := migration.get("model_name_or_path")) and _VISION.search(str(model.value)):
        migration.notes.insert(0, f"{model.value} reads pictures; only its text part can be trained here")
    if foreign and migration.get("reward_funcs") is None and migration.get("num_generations") is None:
        why = f"{foreign.name} {foreign.why.removeprefix('it ')}, and no reward is set"
        migration.notes.insert(0, f"{source.name} is not a GRPO recipe: {why}. The new recipe trains with GRPO")
    _translate_rewards(migration)
    _add_settings(migration, {name for name, _ in flat})
    migration.problems = _leave_out_rejected(migration)
    return migration


def _join_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Join settings that form one recipe key: TRL's list of datasets to dataset_mixture, verl's reward to reward_funcs.

    Return the other settings unchanged.
    """
    entries, size = settings.get("datasets"), settings.get("test_split_size")
    part_names = {"path": "id", "name": "config"}
    known = {*part_names, *nested_catalogue()["dataset_mixture.datasets"]}  # other projects use more, such as `type`
    if (
        isinstance(entries, list)
        and entries
        and all(isinstance(entry, dict) and entry.keys() <= known for entry in entries)
    ):
        mixture = {"datasets": [{part_names.get(part, part): entry[part] for part in entry} for entry in entries]}
        mixture |= {} if size is None else {"test_split_size": size}
        joined = ("datasets", "test_split_size", "streaming")
        settings = {name: value for name, value in settings.items() if name not in joined}
        settings["dataset_mixture"] = mixture
    reward = settings.get("custom_reward_function")
    if isinstance(reward, dict) and reward.get("path"):
        settings = {**settings, "reward_funcs": [f"{reward['path']}:{reward.get('name') or 'compute_score'}"]}
        del settings["custom_reward_function"]
    return settings


def _convert_settings(converter: FileConverter, file: Mapping[str, Value]) -> list[Line]:
    """Translate the settings of a file by the table of a config converter; return the lines of the recipe.

    First come keys that the table adds. Then each setting has a line for each of its recipe keys, or a single line
    with ``kept=False`` if it has no key.
    """
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


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each setting in a nested mapping; keep a mapping that a recipe key accepts."""
    meaning = converters.meaning_of(name)
    accepts_mapping = meaning is not None and any(catalogue()[key]["type"] == "dict" for key in meaning.sets)
    if isinstance(value, dict) and value and not accepts_mapping:
        for part, inner in value.items():
            yield from _flatten(f"{name}.{part}", inner)
    else:
        yield name, value


def _to_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, None as [], and any other value as a list with this value."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _translate_setting(name: str, value: Any) -> list[Line]:
    """Translate one foreign setting; return the lines of its recipe keys, or one left-out line with the reason.

    It is left out if it may be a secret, changes nothing, or has no meaning here. A key is left out if its value is
    empty or not supported.
    """
    last = name.rpartition(".")[2]
    if _LOGIN.search(last) or contains_secret(value):
        return [Line(name, None, name, "export it as a variable, because recipes contain no secrets", kept=False)]
    meaning = converters.meaning_of(name)
    left_out = partial(Line, name, value, name, kept=False)
    if meaning is None:
        similar = converters.meaning_of(converters.nearest(name) or "")
        guess = " and ".join(similar.sets) if similar else ""
        return [left_out(f"unknown here; did you mean {guess}?" if guess else "no key here has this meaning")]
    if why := converters.harmless(last, value):
        return [left_out(why)]
    keys, replacement = meaning.filled(value), meaning.fix.removeprefix("remove it; ")
    if last in OWNED_KEYS and (suggestion := _SUGGESTED_KEY.match(OWNED_KEYS[last])):
        keys = {suggestion[1]: value} if suggestion[1] in catalogue() else {}
    keys = converters.by_value(last, value) or keys
    if "dataset_name" in keys and len(_to_list(value)) > 1:
        keys = {"dataset_mixture": {"datasets": [{"id": dataset} for dataset in value]}}
    lines = []
    for key, raw in keys.items():
        final, why = _VALUES[key](raw) if key in _VALUES else (raw, "")
        final = _convert_value(key, final)
        if key != name:
            why = "; ".join(filter(None, (f"was {name}{short(value)}", why)))
        elif final != value and not why:
            why = f"was {short(value)[2:] or 'written differently'}"
        if isinstance(final, str) and "${" in final and not why:
            why = "copied unchanged: recipes do not replace ${...}"
        # A null only has a meaning if the key's default is not null.
        sets_none = value is None and catalogue()[key]["optional"] and catalogue()[key]["default"] is not None
        empty = final in (None, {}, []) and not sets_none
        lines.append(Line(key, value if empty else final, name, why or ("it is empty" if empty else ""), not empty))
    return lines or [left_out(replacement or "no key here has this meaning")]


def _convert_value(key: str, value: Any) -> Any:
    """Convert a value to the type of its recipe key: false to "no", a number to a list, texts in mappings to numbers.

    Return other values unchanged.
    """
    entry = catalogue()[key]
    if isinstance(value, bool):
        value = converters.SAME_VALUES.get(key, {}).get(value, value)
        if value is False and "no" in entry.get("choices", ()):
            return "no"
    if isinstance(value, dict):
        return _convert_number(value)
    if isinstance(value, int | float) and entry["type"].startswith("list["):
        return [value]
    return value


def _convert_number(value: Any) -> Any:
    """Convert a text in exponent notation, e.g. ``1e-7``, to a float, also inside mappings; return others unchanged."""
    if isinstance(value, dict):
        return {str(part): _convert_number(inner) for part, inner in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _filter_items(value: Any, accepts: Callable[[str], bool], why: str) -> tuple[Any, str]:
    """Keep the items of a list that ``accepts`` allows; return them, and a text with the dropped items and ``why``.

    The items are None if all are dropped. The text is "" if none is dropped.
    """
    accepted: list[str] = []
    rejected: list[str] = []
    for item in map(str, _to_list(value)):
        (accepted if accepts(item) else rejected).append(item)
    return (accepted or None, f"without {', '.join(rejected)}: {why}") if rejected else (accepted or value, "")


def _drop_missing_package(key: str, value: Any) -> tuple[Any, str]:
    """Return None and the reason if the value needs an optional package that is missing, else the value and ""."""
    package = missing_package(key, value)
    return (None, f"the package {package} is not installed; the default trains the same") if package else (value, "")


def _can_report_to(name: str) -> bool:
    """Return whether ``report_to`` accepts a tracker, and its package is installed."""
    return name in REPORTERS and missing_package("report_to", name) is None


def _drop_columns(value: Any) -> tuple[Any, str]:
    """Return a mixture of datasets without ``columns``, and the reason: ``columns`` has another meaning in a recipe.

    If no dataset has ``columns``, return the value unchanged, and "".
    """
    entries = value.get("datasets") if isinstance(value, dict) else None
    if not any(isinstance(entry, dict) and "columns" in entry for entry in _to_list(entries)):
        return value, ""
    datasets = [{name: part for name, part in entry.items() if name != "columns"} for entry in _to_list(entries)]
    reason = "without columns: the recipe's prompt and solution and all scalar columns are kept"
    return {**value, "datasets": datasets}, reason


def _restore_tex(value: Any) -> tuple[Any, str]:
    r"""Replace backspaces by ``\b`` and form feeds by ``\f``; return the text, and the reason, or "" if unchanged.

    In double quotes, YAML reads the TeX commands ``\boxed`` and ``\frac`` as these control characters.
    """
    text = value.replace("\b", r"\b").replace("\f", r"\f") if isinstance(value, str) else value
    return text, "" if text == value else r"\b and \f in double quotes were control characters"


def _keep_local_host(value: Any) -> tuple[Any, str]:
    """Return 127.0.0.1 and "" for this machine, or None and the reason for leaving out another machine's address."""
    is_local = value in ("127.0.0.1", "localhost")
    return ("127.0.0.1", "") if is_local else (None, "the launcher starts the server on the run's machine")


# Recipe key -> function from a foreign value to the recipe's value (None to leave it out) and the reason.
_VALUES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    **{key: partial(_drop_missing_package, key) for key in PACKAGE_KEYS},
    "benchmarks": lambda value: _filter_items(value, lambda name: not benchmark_problem(name, ""), "no benchmark here"),
    "callbacks": lambda value: _filter_items(value, lambda name: source_path(name) is not None,
        "no callback here; push_to_hub publishes the final model"),
    "dataset_config": lambda value: (value[0], "") if isinstance(value, list) and value else (value, ""),
    "dataset_mixture": _drop_columns,
    "hub_strategy": lambda value: (value if value == "end" else None, "the model is pushed once, at the end"),
    "lora_target_modules": lambda value: _filter_items(value, lambda name: name.rpartition(".")[2] not in EMBEDDINGS,
        "embeddings get no adapter"),
    "report_to": lambda value: _filter_items(value, _can_report_to, "not supported, or its package is not installed"),
    "system_prompt": _restore_tex,
    "top_k": lambda value: (0 if value == -1 else value, ""),
    "vllm_server_host": _keep_local_host,
}  # fmt: skip


def _leave_out_duplicates(lines: Iterable[Line]) -> None:
    """Set ``kept`` to false in all lines except one that set the same key, with the reason: they become comments.

    The line with the key as its original name is kept, unless it only has the default value. ``use_kl_loss`` is kept
    instead of a coefficient.
    """
    winners: dict[str, Line] = {}

    def priority(line: Line) -> tuple[bool, bool]:
        """Return a sort key: smaller for a line with the key as its original name, and for ``use_kl_loss``."""
        return line.key != line.name, not line.name.endswith("use_kl_loss")

    for line in sorted((line for line in lines if line.kept), key=priority):
        earlier = winners.setdefault(line.key, line)
        if earlier is not line:
            has_default = earlier.value in (catalogue()[line.key]["default"], None, *_LOADERS)
            loser, winner = (earlier, line) if earlier.key == earlier.name and has_default else (line, earlier)
            loser.kept, loser.why = False, f"the file also sets {winner.name}{short(winner.value)}"
            winners[line.key] = winner


def _translate_rewards(migration: Migration) -> None:
    """Translate reward_funcs and reward_weights in the migration's lines; list rewards to write in ``unwritten``.

    A reward that judges only the form of a completion is left out if another reward remains. A reward that reads the
    answer is left out if another reward does so. Without reward_funcs, add a line with the default.
    """
    line = migration.get("reward_funcs")
    if line is None:
        default = catalogue()["reward_funcs"]["default"]
        why = "the file sets no reward: this is the default, set your own"
        migration.lines.append(Line("reward_funcs", default, "", why))
        return
    registered, original = rewards(), [str(name) for name in _to_list(line.value)]
    weights_line = migration.get("reward_weights")
    weights = _to_list(weights_line.value) if weights_line else []
    answer_rewards, form_rewards = converters.other_rewards(True), converters.other_rewards(False)
    weight_of: dict[str, Any] = {}  # translated reward -> weight
    left_out: dict[str, tuple[str, Any]] = {}  # original name -> reason, weight
    for index, name in enumerate(original):
        weight = weights[index] if index < len(weights) else 1.0
        function = name if ":" in name else ":".join(name.rsplit(".", 1))
        if ":" in function and source_path(function):
            reward = function
        else:
            reward = converters.reward_names().get(name.rpartition(".")[2], name)
        if reward in weight_of:
            left_out[name] = f"{reward} is already used", weight
        elif reward in registered or ":" in reward:
            weight_of[reward] = weight
        else:
            left_out[name] = {**answer_rewards, **form_rewards}.get(name, "no reward here does that"), weight
    reads_answer = any(":" in reward or registered[reward].reads_answer for reward in weight_of)
    not_needed: set[str] = set()
    if weight_of:
        not_needed = {*form_rewards, *converters.reward_names(), *(answer_rewards if reads_answer else ())}
    for name in [name for name in left_out if name not in not_needed]:
        function = re.sub(r"\W", "_", f"_{name}" if not name or name[0].isdigit() else name)
        migration.unwritten.append(function)
        weight_of[f"{display_path(migration.rewards_file)}:{function}"] = left_out.pop(name)[1]
    if list(weight_of) != original:
        why = "".join(f"; without {name}: {reason}" for name, (reason, _) in left_out.items())
        why += f"; write the functions in {migration.rewards_file.name}" if migration.unwritten else ""
        line.value, line.why = list(weight_of), f"was {line.name}: {', '.join(original)}{why}"
    if weights_line and list(weight_of.values()) != weights:
        weights_line.value, weights_line.why = list(weight_of.values()), "one for each of reward_funcs"


def _add_settings(migration: Migration, names: set[str]) -> None:
    """Add lines for settings that other projects imply, e.g. use_peft if a LoRA rank is set; remind of missing data.

    ``names`` are original names. Reminders are comments. A dataset_name next to dataset_mixture becomes a comment.
    """

    def add(key: str, value: Any, why: str) -> None:
        """Add a setting with its reason, unless the recipe has the key."""
        if migration.get(key) is None:
            migration.lines.append(Line(key, value, "", why))

    trl_names = {name for name, entry in catalogue().items() if entry["config"] == "GRPOConfig"}
    if len(names & trl_names) > 2:
        add("dataset_solution_column", "solution", "the column that TRL's and open-r1's rewards read")
        if not names & {"dataset_configs", "vllm_device"}:  # older versions of open-r1 read the column problem
            add("dataset_prompt_column", "prompt", "the column that TRL and newer versions of open-r1 read")
    truncated = [
        key for key, neutral in NEUTRAL_SAMPLING.items() if (line := migration.get(key)) and line.value != neutral
    ]
    if truncated:
        add("vllm_importance_sampling_correction", False, f"{', '.join(truncated)} would bias it")
    rank = migration.get("lora_r")
    if rank and rank.value and "use_peft" not in names:
        add("use_peft", True, f"{rank.name} enables LoRA; remove both to train all weights")
    mixture = migration.get("dataset_mixture")
    held_out = not mixture or "test_split_size" in mixture.value or migration.get("eval_dataset_name")
    if held_out and (steps := migration.get("eval_steps")) and steps.value and "do_eval" not in names:
        add("eval_strategy", "steps", "eval_steps enables evaluations; remove both to train without evaluations")
    eval_strategy = migration.get("eval_strategy")
    logging_steps = next((line.value for line in migration.lines if line.key == "logging_steps"), None)
    if eval_strategy and eval_strategy.value == "steps" and isinstance(logging_steps, int) and logging_steps > 1:
        add("eval_steps", logging_steps, "TRL evaluates as often as it logs")
    if (dataset := migration.get("dataset_name")) and mixture:
        dataset.kept, dataset.name, dataset.why = False, dataset.name or dataset.key, "dataset_mixture is set"
    has_data = migration.get("dataset_mixture") or migration.get("atropos_api_url")
    for key in ("dataset_name", "model_name_or_path"):
        if migration.get(key) is None and not (key == "dataset_name" and has_data):
            migration.lines.insert(0, Line(key, None, key, "the file does not set it, set your own", kept=False))


def _leave_out_rejected(migration: Migration) -> list[Problem]:
    """Check the recipe repeatedly and turn rejected lines into comments with the reason; return the remaining problems.

    They concern required keys, or no line, so the user must fix them. Problems of the rewards file that is not written
    yet are left out.
    """
    rewards_file = migration.rewards_file.name if migration.unwritten else "\0"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, migration.target.name)
        while True:
            path.write_text(migration.text(), encoding="utf-8")
            text_lines = [line for line in migration.lines for _ in range(line.text().count("\n"))]
            places = {f"{display_path(path)}:{number}": line for number, line in enumerate(text_lines, 3)}
            recipe, problems = merge_recipe(path)
            recipe, task_problems = with_task(recipe, requested_task({}, None))
            problems = sort_problems([*problems, *task_problems, *check(recipe, {})])
            pairs = [(places.get(problem.where), problem) for problem in problems if rewards_file not in problem.what]
            rejected = [(line, problem) for line, problem in pairs if line and line.key not in _NEEDED]
            if not rejected:
                return [problem for _, problem in pairs]
            for line, problem in reversed(rejected):  # so that the first problem of a line is its reason
                line.kept, line.name = False, line.name or line.key
                line.why = f"{problem.what}; {problem.fix.removeprefix('remove it; ')}"
