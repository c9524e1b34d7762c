"""`grpo sweep --search optuna`: Optuna proposes each trial from what the trials before it reached.

Its study lies in the sweep's folder, beside the record of trials. Either may be ahead of the other by one step after a
kill, so both are compared before the search goes on: a trial that was running is continued, a finished one is not run
again. The sampler is seeded for each trial by its number, so a search that was killed during a
run proposes what it would have.
"""

import importlib.util
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_recipes.console.sweep import folder as sweeps
from grpo_recipes.console.sweep.spec import Search, Span, SweepSpec, Trial, name_of, numbered
from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error, translate
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.runs.groups import COMPLETED, GONE
from grpo_recipes.runs.rundir import Run, write_json

STORAGE = "optuna.journal"
INSTALL = "EXTRAS=search make setup"
_MOST_REPEATS = 100  # proposals in a row that are no new run
_ENDING_SECONDS = 300  # of a trial whose search was killed


def need_optuna() -> None:
    """Refuse a search where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise config_error("--search optuna", "Optuna is not installed", f"install it with: {INSTALL}")


@dataclass
class Proposals:
    """The trials of a search, by their index: those that are not finished, then new ones."""

    sweep: sweeps.Sweep
    spec: SweepSpec
    search: Search
    resources: Resources
    environment: Mapping[str, str]

    @cached_property
    def _study(self) -> Any:
        import optuna  # half a second, for a search alone
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path, fix = self.sweep.folder / STORAGE, "restore it, or begin another search with --new"
        with translate(
            (ValueError, KeyError), lambda error: config_error(display_path(path), f"is damaged ({error})", fix)
        ):
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
            return optuna.create_study(
                storage=storage, study_name=self.sweep.folder.name, direction="maximize", load_if_exists=True
            )

    @property
    def _trials(self) -> list[dict[str, Any]]:
        return self.sweep.record["cells"]

    def __iter__(self) -> Iterator[int]:
        """Yield each trial when it may run; ``ended`` is called before the next is asked for."""
        self._agree()
        for index in self.sweep.gaps():
            yield self._frozen(index)
        while len(self._trials) < self.search.trials and self._propose():
            yield self._frozen(len(self._trials) - 1)

    def ended(self, index: int, code: int) -> None:
        """Report a trial to Optuna: its metric, or that it failed. One that was stopped goes on later."""
        if code == EXIT_STOPPED:
            return
        value = sweeps.objective(self.sweep.trial_dir(index), self.search.metric) if code == 0 else None
        if code == 0 and value is None:
            say(f"{self.sweep.names[index]} has no {self.search.metric}: it is reported to Optuna as failed")
        self._tell(self._trials[index]["number"], value)
        self._trials[index]["value"] = value
        self._write()

    def _agree(self) -> None:
        """Bring study and record to the same trials, where a kill came between the two."""
        by_number = {trial["number"]: trial for trial in self._trials}
        for told in self._study.trials:
            trial = by_number.get(told.number)
            if trial is None:
                self._tell(told.number, None)
            elif told.state.is_finished():
                trial.setdefault("value", told.value)
        for index in self.sweep.gaps():
            self._wait_for(self.sweep.trial_dir(index))
            if self.sweep.status(index) == COMPLETED:
                self.ended(index, 0)
        self._write()

    def _propose(self) -> bool:
        """Add the next trial to the record; return False where Optuna finds none that is new."""
        from optuna.samplers import TPESampler

        seed = int(self._recipe({key: texts[0] for key, texts in self.spec.axes.items()})["seed"])
        space = {key: _distribution(texts, self.search.spans.get(key)) for key, texts in self.spec.axes.items()}
        for _ in range(_MOST_REPEATS):
            self._study.sampler = TPESampler(seed=(seed + len(self._study.trials)) % 2**32)
            asked = self._study.ask(space)
            values = {key: _text(asked.params[key]) for key in space}
            same = next((trial for trial in self._trials if trial["values"] == values), None)
            if same is not None:  # it would be the same run
                self._tell(asked.number, same.get("value"))
                continue
            try:
                make_plan(self._recipe(values), self.resources, self.environment)
            except ConfigError as error:
                say(f"{name_of(values)} cannot run, so Optuna chooses others: {error}")
                self._tell(asked.number, None)
                continue
            name = numbered(len(self._trials), name_of(values))
            self._trials.append({"name": name, "values": values, "number": asked.number})
            self._write()
            return True
        say(f"Optuna proposes no other trial after {len(self._trials)}: the search ends here")
        self.sweep.record["search"]["trials"] = len(self._trials)
        self._write()
        return False

    def _wait_for(self, folder: Path) -> None:
        """Wait for a run that saves, since the search that started it was killed."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while Run(folder).is_running():
            if time.monotonic() > deadline:
                what = "still runs, though the search that started it is gone"
                raise config_error(display_path(folder), what, f"end it with grpo stop {shell_path(folder)}")
            time.sleep(0.5)

    def _frozen(self, index: int) -> int:
        """Return the index of a trial whose run directory is there."""
        if self.sweep.status(index) == GONE:
            shutil.rmtree(self.sweep.trial_dir(index), ignore_errors=True)
            values = self._trials[index]["values"]
            trial = Trial(index, self.sweep.names[index], values, self._recipe(values))
            sweeps.freeze_trial(self.sweep, trial, self.resources, self.environment)
        return index

    def _recipe(self, values: Mapping[str, str]) -> Recipe:
        spec, device = self.spec, self.resources.device
        return resolve_recipe(spec.recipe, spec.task, spec.flags_of(values), self.environment, device)

    def _tell(self, number: int, value: float | None) -> None:
        from optuna.trial import TrialState

        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(number, value, state=state, skip_if_finished=True)

    def _write(self) -> None:
        write_json(self.sweep.folder / sweeps.RECORD, self.sweep.record)


def _distribution(texts: Sequence[str], span: Span | None) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if span is None:
        return CategoricalDistribution(list(texts))
    if span.whole:
        return IntDistribution(int(span.low), int(span.high), log=span.log)
    return FloatDistribution(span.low, span.high, log=span.log)


def _text(value: Any) -> str:
    """Return a value as a recipe flag has it; six digits of a drawn number are kept."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
