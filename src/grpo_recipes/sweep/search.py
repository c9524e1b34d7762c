"""`grpo sweep --search optuna`: Optuna proposes each trial from what the trials before it reached.

Its study lies in the sweep's folder, beside the record of trials. Either may be ahead of the other by one step after a
kill, so both are compared before the search goes on: a trial that was running is continued, a finished one is not run
again. The sampler is seeded for each trial by its number, so a search that was killed proposes what it would have.
"""

import importlib.util
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.runs.rundir import Run, write_json
from grpo_recipes.sweep import folder as sweeps
from grpo_recipes.sweep.spec import Search, Span, SweepSpec, Trial, name_of, numbered

STORAGE = "optuna.journal"
INSTALL = "EXTRAS=search make setup"
_MOST_REPEATS = 100  # proposals in a row that are no new run
_ENDING_SECONDS = 300  # of a trial whose search was killed


def need_optuna() -> None:
    """Refuse a search where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise config_error("--search optuna", "Optuna is not installed", f"install it with: {INSTALL}")


class Proposals:
    """The trials of a search, by their index: those that are not finished, then new ones."""

    def __init__(
        self, sweep: sweeps.Sweep, spec: SweepSpec, search: Search, resources: Resources, environment: Mapping[str, str]
    ) -> None:
        import optuna  # half a second, for a search alone

        self._optuna, self._sweep, self._spec, self._search = optuna, sweep, spec, search
        self._resources, self._environment = resources, environment
        self._trials: list[dict[str, Any]] = sweep.record["cells"]
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(sweep.folder / STORAGE))
        )
        self._study = optuna.create_study(
            storage=storage, study_name=sweep.folder.name, direction="maximize", load_if_exists=True
        )
        self._space = {
            key: _distribution(optuna, search.spans[key])
            if key in search.spans
            else optuna.distributions.CategoricalDistribution(list(values))
            for key, values in spec.axes.items()
        }

    def __iter__(self) -> Iterator[int]:
        """Yield each trial when it may run; ``ended`` is called before the next is asked for."""
        self._agree()
        for index in self._sweep.gaps():
            yield self._frozen(index)
        while len(self._trials) < self._search.trials and self._propose():
            yield self._frozen(len(self._trials) - 1)

    def ended(self, index: int, code: int) -> None:
        """Report a trial to Optuna: its metric, or that it failed. One that was stopped goes on later."""
        if code == EXIT_STOPPED:
            return
        value = sweeps.objective(self._sweep.trial_dir(index), self._search.metric) if code == 0 else None
        if code == 0 and value is None:
            say(f"{self._sweep.names[index]} has no {self._search.metric}: it is reported to Optuna as failed")
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
        for index in self._sweep.gaps():
            if self._sweep.status(index) == sweeps.COMPLETED:
                self.ended(index, 0)
        self._write()

    def _propose(self) -> bool:
        """Add the next trial to the record; return False where Optuna finds none that is new."""
        for _ in range(_MOST_REPEATS):
            count = len(self._study.trials)
            seed = int(self._recipe({key: texts[0] for key, texts in self._spec.axes.items()})["seed"])
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed + count)
            asked = self._study.ask(self._space)
            values = {key: _text(asked.params[key]) for key in self._space}
            same = next((trial for trial in self._trials if trial["values"] == values), None)
            if same is not None:  # it would be the same run
                self._tell(asked.number, same.get("value"))
                continue
            try:
                make_plan(self._recipe(values), self._resources, self._environment)
            except ConfigError as error:
                say(f"{name_of(values)} cannot run, so Optuna chooses others: {error}")
                self._tell(asked.number, None)
                continue
            name = numbered(len(self._trials), name_of(values))
            self._trials.append({"name": name, "values": values, "number": asked.number})
            self._write()
            return True
        say(f"Optuna proposes no other trial after {len(self._trials)}: the search ends here")
        return False

    def _frozen(self, index: int) -> int:
        """Return the index of a trial whose run directory is there and free."""
        folder, deadline = self._sweep.trial_dir(index), time.monotonic() + _ENDING_SECONDS
        while Run(folder).is_running():  # its search was killed, and it saves
            if time.monotonic() > deadline:
                what = "still runs, though the search that started it is gone"
                raise config_error(shown(folder), what, f"end it with grpo stop {shown(folder)}")
            time.sleep(0.5)
        if self._sweep.status(index) == sweeps.GONE:
            shutil.rmtree(folder, ignore_errors=True)
            values = self._trials[index]["values"]
            trial = Trial(index, self._sweep.names[index], values, self._recipe(values))
            sweeps.freeze_trial(self._sweep, trial, self._resources, self._environment)
        return index

    def _recipe(self, values: Mapping[str, str]) -> Recipe:
        spec, device = self._spec, self._resources.device
        return resolve_recipe(spec.recipe, spec.task, spec.flags_of(values), self._environment, device)

    def _tell(self, number: int, value: float | None) -> None:
        failed = self._optuna.trial.TrialState.FAIL if value is None else None
        self._study.tell(number, value, state=failed, skip_if_finished=True)

    def _write(self) -> None:
        write_json(self._sweep.folder / sweeps.RECORD, self._sweep.record)


def _distribution(optuna: Any, span: Span) -> Any:
    if span.whole:
        return optuna.distributions.IntDistribution(int(span.low), int(span.high), log=span.log)
    return optuna.distributions.FloatDistribution(span.low, span.high, log=span.log)


def _text(value: Any) -> str:
    """Return a value as a recipe flag has it; six digits of a drawn number are kept."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
