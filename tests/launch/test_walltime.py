"""How early the launcher stops a run before the time limit of its Slurm job."""

from __future__ import annotations

from grpo_recipes.launch.walltime import Walltime, read_signal_lead

END = 10_000.0
ROW = {"seconds/sample": 40.0, "seconds/score": 1.0, "seconds/update": 20.0, "seconds/step": 70.0, "seconds/save": 5.0}


def test_the_lead_is_twice_the_longest_phase_plus_the_save():
    walltime = Walltime(lambda: END, 300.0)
    assert walltime.lead == 30
    walltime.observe({**ROW, "seconds/save": None})
    assert walltime.lead == 3 * 40 + 30  # no save was seen yet
    walltime.observe(ROW)
    walltime.observe({"seconds/sample": 1.0})
    assert walltime.lead == 2 * 40 + 5 + 30


def test_the_stop_is_due_when_the_lead_begins():
    walltime = Walltime(lambda: END, 300.0)
    walltime.observe(ROW)
    assert walltime.find_stop_reason(END - 116) is None
    assert walltime.find_stop_reason(END - 115) == "the job's time limit comes in 115 s"


def test_a_limit_that_was_raised_meanwhile_counts():
    ends = iter([END, END + 3600])
    walltime = Walltime(lambda: next(ends), 300.0)
    assert walltime.find_stop_reason(END - 1) is None
    assert walltime.find_stop_reason(END + 3000) is None


def test_phases_too_long_for_slurms_signal_are_noted_once():
    walltime = Walltime(lambda: END, 300.0)
    assert walltime.take_warning() is None
    walltime.observe({"seconds/sample": 400.0, "seconds/save": 20.0})
    assert walltime.take_warning() == (
        "note: phases take up to 400 s, so the signal 300 s before the time limit may come too late; the launcher "
        "stops the run 850 s before the limit"
    )
    assert walltime.take_warning() is None


def test_the_note_is_of_the_lead_that_the_jobs_script_has():
    early, late = (Walltime(lambda: END, read_signal_lead({"GRPO_SIGNAL_LEAD": lead})) for lead in ("900", "77"))
    for walltime in (early, late):
        walltime.observe({"seconds/sample": 40.0, "seconds/save": 20.0})
    assert early.take_warning() is None
    assert "the signal 77 s before the time limit" in str(late.take_warning())
    assert read_signal_lead({}) == read_signal_lead({"GRPO_SIGNAL_LEAD": "soon"}) == 300


def test_without_an_end_nothing_is_due():
    assert Walltime(lambda: None, 300.0).find_stop_reason(1e12) is None
