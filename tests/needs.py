"""Tests outside of tests/extensions and tests/console that need an extension, or the whole repository.

``tests/conftest.py`` leaves them out if the extension is deleted, and in the part "core" of `make test`. The part
"above" has these tests and those of the two folders. ``WHOLE`` marks tests of the repository itself, for example of its
ledgers and shipped recipes. They are left out if anything is deleted.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from pathlib import Path

from core_alone import ABOVE

import grpo_recipes

HERE = Path(__file__).parent
ATROPOS, ENVIRONMENTS = "extensions.atropos", "extensions.environments"
OFFLINE, MIGRATE, PROBLEMS = "extensions.offline", "extensions.migrate", "extensions.problems"
CODE, COLOCATED, JUDGE = "extensions.code", "extensions.colocated", "extensions.judge"
SFT, CONSOLE = "extensions.sft", "console"
WHOLE = "all"
# Globs below tests/ -> the extension that the tests of these files need.
FILES: dict[str, str] = {
    "atropos": ATROPOS,
    "data/test_placeholders.py": ATROPOS,
    "launch/test_atropos_processes.py": ATROPOS,
    "plan/test_plan_atropos.py": ATROPOS,
    "recipe/test_atropos_fields.py": ATROPOS,
    "recipe/test_check_atropos.py": ATROPOS,
    "recipe/test_packing.py": ATROPOS,
    "rollouts/test_atropos.py": ATROPOS,
    "server/test_generate.py": ATROPOS,
    "trainers/test_atropos_*.py": ATROPOS,
    "weights/test_own_server.py": ATROPOS,
    "cli/test_play.py": ENVIRONMENTS,
    "data/test_episodes.py": ENVIRONMENTS,
    "evaluate/test_played.py": ENVIRONMENTS,
    "evaluate/test_tool_benchmarks.py": ENVIRONMENTS,
    "recipe/test_check_environments.py": ENVIRONMENTS,
    "rollouts/test_environments.py": ENVIRONMENTS,
    "rollouts/test_openenv.py": ENVIRONMENTS,
    "rollouts/test_opponents.py": ENVIRONMENTS,
    "rollouts/test_stage.py": ENVIRONMENTS,
    "rollouts/test_verifiers.py": ENVIRONMENTS,
    "trainers/test_environment_python.py": ENVIRONMENTS,
    "trainers/test_episode_records.py": ENVIRONMENTS,
    "trainers/test_episodes.py": ENVIRONMENTS,
    "trainers/test_opponents.py": ENVIRONMENTS,
    "trainers/test_tool_ranks.py": ENVIRONMENTS,
    "trainers/test_tools.py": ENVIRONMENTS,
    "trainers/test_trl_environments.py": ENVIRONMENTS,
    "trainers/test_trl_examples.py": ENVIRONMENTS,
    "trainers/test_iterations.py": OFFLINE,
    "trainers/test_offline_training.py": OFFLINE,
    "trainers/test_without_wandb.py": OFFLINE,
    "recipe/test_check_publishing.py": CONSOLE,
    **dict.fromkeys(
        (
            "bench", "docs", "e2e", "evidence", "setup", "slurm/test_profile_script.py", "recipe/test_schema.py",
            "recipe/test_recipes.py", "test_advice.py", "test_guide_rows.py", "test_ledgers.py", "test_mutants.py",
            "test_needs.py", "test_packages.py", "test_public_files.py", "test_repository.py", "test_whole_runs.py",
            "test_wrong_recipes.py",
        ),
        WHOLE,
    ),
}  # fmt: skip
# Names of tests in other files, with or without parameters -> the extension that they need.
TESTS: dict[str, str] = {
    "test_logs_of_run_api_and_of_all_environments": ATROPOS,
    "test_a_teacher_with_another_tokenizer": ENVIRONMENTS,
    "test_environments_of_atropos_are_loaded_with_their_arguments": ATROPOS,
    "test_the_recipes_number_or_the_most_that_the_run_requests": ATROPOS,
    **dict.fromkeys(
        (
            "test_a_game_is_played_with_moves_that_it_takes", "test_an_episode_is_played_and_shown",
            "test_an_episode_of_a_trl_environment_calls_each_method_once",
            "test_a_template_carries_the_roles_of_every_environment", "test_an_episode_has_one_limit",
            "test_a_template_is_asked_for_the_roles_of_an_environment_alone",
            "test_a_template_shows_the_tools_of_an_environment", "test_the_template_of_a_model_that_is_here_is_read",
            "test_a_template_that_ends_turns_where_sampling_does_not_is_refused_for_several",
            "test_arguments_of_the_users_environment_are_compared_with_its_class",
            "test_each_limit_of_an_environment_is_the_recipes", "test_prompts_of_environments_are_not_known_before",
            "test_sampling_stops_where_the_generation_config_says", "test_the_base_model_plays_only_next_to_a_server",
            "test_the_model_of_secret_mafia_reads_the_game_in_a_few_tokens",
            "test_the_model_of_secret_mafia_saw_well_formed_moves_and_is_flattened",
            "test_the_recipe_plays_the_game_that_the_model_saw",
        ),
        ENVIRONMENTS,
    ),
    "test_a_recipe_of_another_project_is_answered_with_the_command_that_translates_it": MIGRATE,
    "test_a_resume_takes_a_changed_environment": ENVIRONMENTS,
    "test_each_of_several_recipes_is_a_job_that_starts_from_the_model_before": SFT,
    "test_benchmarks[benchmark_unknown]": PROBLEMS,
    "test_runs_profiles_and_the_keys_of_a_sweep": CONSOLE,
    "test_the_help_lists_every_command_in_a_group_and_examples": WHOLE,
    "test_bad_input_is_refused_before_anything_is_written[arguments5-"
    "the run uploads its model, but the nodes of cpu have no internet]": CONSOLE,
    **dict.fromkeys(
        (
            "test_a_broken_rule_is_told_and_the_correction_passes", "test_a_cause_has_its_advice",
            "test_a_forgotten_recipe_is_asked_for_and_nothing_is_started", "test_a_frozen_recipe_is_read_without_notes",
            "test_a_mistake_of_a_command_is_one_line_with_its_fix", "test_an_option_that_is_misspelt_is_suggested",
            "test_commands_options_keys_values_and_files", "test_each_key_of_a_section_is_read",
            "test_every_command_refuses_a_maxent_recipe_with_maxent_off",
            "test_every_shipped_model_is_counted", "test_shipped_recipes_are_right",
            "test_shipped_recipes_fit_eight_gpus_of_80_gb",
            "test_the_four_maxent_flags_of_the_guide_start_with_every_shipped_recipe",
            "test_trl_reads_the_same_values_from_a_frozen_recipe",
        ),
        WHOLE,
    ),
}  # fmt: skip


# Of `make test`: "core", "above", or None for all tests. A pytest that a test starts runs all of its tests.
PART = os.environ.pop("GRPO_TEST_PART", None) if "PYTEST_XDIST_WORKER" in os.environ else None


def deleted() -> set[str]:
    """Return the extensions and the console if they are deleted; ``WHOLE`` if any of them is."""
    package = Path(grpo_recipes.__file__).parent
    missing = {name for name in ABOVE if not (package / name.replace(".", "/")).is_dir()}
    return {*missing, WHOLE} if missing else set()


@functools.cache
def left_out() -> set[str]:
    """Return what tests must not need: all that is deleted, and everything in the part of the core."""
    return {*ABOVE, WHOLE} if PART == "core" else deleted()


def ignore_file(path: Path) -> bool:
    """Return whether no test of a file or folder below tests/ belongs to this run."""
    if PART == "above" and path.suffix == ".py":
        return not _needed_by_file(path) and not any(name in path.read_text() for name in _NAMES)
    return bool(_needed_by_file(path) & left_out())


def ignore_test(path: Path, *names: str) -> bool:
    """Return whether a test of a file does not belong to this run, by its name with or without parameters."""
    needed = {TESTS[name] for name in names if name in TESTS}
    if PART == "above":
        return not needed and not _needed_by_file(path)
    return bool(needed & left_out())


_NAMES = {name.partition("[")[0] for name in TESTS}


def _needed_by_file(path: Path) -> set[str]:
    """Return what all tests of a file or folder need."""
    place = path.relative_to(HERE)
    folders = [str(parent) for parent in (place, *place.parents)]
    needed = {name for glob, name in FILES.items() if any(fnmatch.fnmatch(folder, glob) for folder in folders)}
    return needed | {name for name in ABOVE if name.replace(".", "/") in folders}
