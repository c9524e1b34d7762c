"""`grpo sweep --search optuna`: Optuna proposes each trial from the results of the previous trials.

The study file is in the sweep's folder next to sweep.json. After a kill, one of them may be ahead of the other by one
step, so the search compares both before it continues: an interrupted trial is resumed, and a finished trial is not run
again. The sampler is seeded by the number of the trial, so a search that was killed during a run proposes the same
trials as an uninterrupted search.
"""

import importlib.util
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grpo_recipes.console.sweep import folder as sweeps
from grpo_recipes.console.sweep.spec import Search, Span, SweepSpec, Trial, make_trial_name, prefix_number
from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error, translate_errors
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
_MAX_REPEATS = 100  # proposals in a row without a new run
_ENDING_SECONDS = 300  # limit for the end of a trial after its search was killed


def require_optuna() -> None:
    """Raise a ConfigError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise config_error("--search optuna", "Optuna is not installed", f"install it with: {INSTALL}")


@dataclass
class Proposals:
    """The trials of a search: iterates over the indices of unfinished trials, then over new trials."""

    sweep: sweeps.Sweep
    spec: SweepSpec
    search: Search
    resources: Resources
    environment: Mapping[str, str]

    @cached_property
    def _study(self) -> Any:
        """Open the Optuna study in the sweep's folder, or create it; the study maximizes its metric.

        Raise ConfigError if the study's file is damaged.
        """
        import optuna  # takes half a second, so only for a search
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path, fix = self.sweep.folder / STORAGE, "restore it, or begin another search with --new"
        with translate_errors(
            (ValueError, KeyError), lambda error: config_error(display_path(path), f"damaged ({error})", fix)
        ):
            storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
            return optuna.create_study(
                storage=storage, study_name=self.sweep.folder.name, direction="maximize", load_if_exists=True
            )

    @property
    def _trials(self) -> list[dict[str, Any]]:
        """The trials in the sweep's record; changes of the list change the record."""
        trials: list[dict[str, Any]] = self.sweep.record["cells"]
        return trials

    def __iter__(self) -> Iterator[int]:
        """Yield each trial when it may run; the caller calls ``report`` before it requests the next one.

        First, Optuna's study and ``sweep.json`` are made to agree, in case the search was killed between their updates.
        A trial that is only in the study is reported to Optuna as failed. A result that is only in the study is added
        to the record. For other trials without a result, wait until their runs have ended, and report the completed
        runs. The others stay without a result. Raise ConfigError if a run still runs after 5 minutes.
        """
        by_number = {trial["number"]: trial for trial in self._trials}
        for study_trial in self._study.trials:
            trial = by_number.get(study_trial.number)
            if trial is None:
                self._report_to_optuna(study_trial.number, None)
            elif study_trial.state.is_finished():
                trial.setdefault("value", study_trial.value)
        for index in self.sweep.find_unfinished_trials():
            folder, deadline = self.sweep.trial_dir(index), time.monotonic() + _ENDING_SECONDS
            while Run(folder).is_running():
                if time.monotonic() > deadline:
                    message = "it is still running, but the search that started it is gone"
                    raise config_error(display_path(folder), message, f"stop it with grpo stop {shell_path(folder)}")
                time.sleep(0.5)
            if self.sweep.status(index) == COMPLETED:
                self.report(index, 0)
        self._write_record()
        for index in self.sweep.find_unfinished_trials():
            yield self._ensure_run_directory(index)
        while len(self._trials) < self.search.trials and self._propose_trial():
            yield self._ensure_run_directory(len(self._trials) - 1)

    def report(self, index: int, code: int) -> None:
        """Report a trial's metric or failure to Optuna, and write it to ``sweep.json``.

        A stopped trial (``code`` 75) is not reported, since it resumes later. A completed trial without the metric
        counts as failed.
        """
        if code == EXIT_STOPPED:
            return
        value = sweeps.read_metric_value(self.sweep.trial_dir(index), self.search.metric) if code == 0 else None
        if code == 0 and value is None:
            say(f"{self.sweep.names[index]} has no {self.search.metric} and is reported to Optuna as failed")
        self._report_to_optuna(self._trials[index]["number"], value)
        self._trials[index]["value"] = value
        self._write_record()

    def _propose_trial(self) -> bool:
        """Request the next trial from Optuna and add it to ``sweep.json``; return False if Optuna finds no new trial.

        A proposal that equals an earlier trial or can't run is reported to Optuna at once, and another one is
        requested. After 100 such proposals in a row, end the search: the current number of trials becomes its total.
        The caller checks the total before.
        """
        from optuna.samplers import TPESampler

        seed = self._resolve_recipe({key: texts[0] for key, texts in self.spec.axes.items()}).batch.seed
        space = {key: _make_distribution(texts, self.search.spans.get(key)) for key, texts in self.spec.axes.items()}
        for _ in range(_MAX_REPEATS):
            self._study.sampler = TPESampler(seed=(seed + len(self._study.trials)) % 2**32)
            proposal = self._study.ask(space)
            values = {key: _format_value(proposal.params[key]) for key in space}
            same = next((trial for trial in self._trials if trial["values"] == values), None)
            if same is not None:  # a repeated run would have the same result
                self._report_to_optuna(proposal.number, same.get("value"))
                continue
            try:
                make_plan(self._resolve_recipe(values), self.resources, self.environment)
            except ConfigError as error:
                say(f"{make_trial_name(values)} can't run, so Optuna chooses other values: {error}")
                self._report_to_optuna(proposal.number, None)
                continue
            name = prefix_number(len(self._trials), make_trial_name(values))
            self._trials.append({"name": name, "values": values, "number": proposal.number})
            self._write_record()
            return True
        say(f"search ended: Optuna proposes no new trial after {len(self._trials)}")
        self.sweep.record["search"]["trials"] = len(self._trials)
        self._write_record()
        return False

    def _ensure_run_directory(self, index: int) -> int:
        """Create the trial's run directory if it is missing or incomplete; return the index unchanged."""
        if self.sweep.status(index) == GONE:
            shutil.rmtree(self.sweep.trial_dir(index), ignore_errors=True)
            values = self._trials[index]["values"]
            trial = Trial(index, self.sweep.names[index], values, self._resolve_recipe(values))
            sweeps.create_trial_directory(self.sweep, trial, self.resources, self.environment)
        return index

    def _resolve_recipe(self, values: Mapping[str, str]) -> Recipe:
        """Load and check the recipe of a trial with these values; raise ConfigError with all of its problems."""
        spec, device = self.spec, self.resources.device
        return resolve_recipe(spec.recipe, spec.task, spec.make_flags(values), self.environment, device)

    def _report_to_optuna(self, number: int, value: float | None) -> None:
        """Report the result of Optuna's trial ``number``: a value, or None for a failure; an earlier report is kept."""
        from optuna.trial import TrialState

        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(number, value, state=state, skip_if_finished=True)

    def _write_record(self) -> None:
        """Write the sweep's record to ``sweep.json``."""
        write_json(self.sweep.folder / sweeps.RECORD, self.sweep.record)


def _make_distribution(texts: Sequence[str], span: Span | None) -> Any:
    """Return an Optuna distribution: of a number in the range ``span``, or of one of ``texts`` if ``span`` is None."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if span is None:
        return CategoricalDistribution(list(texts))
    if span.whole:
        return IntDistribution(int(span.low), int(span.high), log=span.log)
    return FloatDistribution(span.low, span.high, log=span.log)


def _format_value(value: Any) -> str:
    """Return a proposed value as the text of a recipe flag; floats are rounded to six significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
