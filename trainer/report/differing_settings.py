"""Settings that differ among runs: those that users set, and all others."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from trainer.config.fields import in_groups
from trainer.report.run_records import RunRecords

# Keys that change neither what is learned nor how fast.
IGNORED = (
    *("run_dir", "resume", "resume.*", "dry_run", "compile_cache", "data.cache_dir"),
    # Users type the group, `tracker=wandb`, which the pattern `tracker.*` does not
    # match.
    *("tracker", "tracker.*", "checkpoint.*", "sample.*", "metrics.*", "profile.*"),
    *("train.log_every", "train.eval_every", "eval.*"),
)
# The first of these fields that a configuration group has names the chosen option.
GROUP_FIELDS = ("source", "kind", "name")
SEED = "seed"

Table = Mapping[str, Sequence[str]]  # a value for each run


def overridden(runs: Sequence[RunRecords]) -> dict[str, list[str]]:
    """Return the values of the keys and groups that users set, where they differ.

    Values come from the resolved configurations: a run's last start need not repeat the
    overrides of the first one.
    """
    overrides = [
        # The fact joins overrides by spaces, which values may hold, too: a word without
        # "=" is the rest of a value.
        dict(
            word.split("=", 1)
            for word in run.facts.get("overrides", "").split()
            if "=" in word
        )
        for run in runs
    ]
    resolved = [run.settings for run in runs]
    # The columns keep the order in which users typed the keys.
    keys = dict.fromkeys(key for run_overrides in overrides for key in run_overrides)

    def value(
        key: str, run_overrides: Mapping[str, str], settings: Mapping[str, Any]
    ) -> str:
        # A group has no key in flat settings, but the field of its chosen option has
        # one.
        choices = (f"{key}.{end}" for end in GROUP_FIELDS)
        choice = next((name for name in choices if name in settings), "")
        setting = settings.get(key, settings.get(choice))
        if setting is None:
            # Null, or a group without such a field: only the override tells the choice.
            return run_overrides.get(key, "-")
        return str(setting)

    def is_same(key: str) -> bool:
        """Return whether a key or group has one value in all resolved configurations.

        It is false for a key that none of them has.
        """
        parts = [
            {k: v for k, v in settings.items() if in_groups(k, [key])}
            for settings in resolved
        ]
        return any(parts) and all(part == parts[0] for part in parts)

    varied = {}
    # A group may be typed in one run, and its values key by key in another: the
    # resolved values are the same, so it is no difference.
    for key in keys:
        values = [value(key, *pair) for pair in zip(overrides, resolved, strict=True)]
        if len(set(values)) > 1 and not matches_any(key, IGNORED) and not is_same(key):
            varied[key] = values
    return varied


def differing_settings(runs: Sequence[RunRecords]) -> dict[str, list[str]]:
    """Return the values of each configuration key that is not the same in all runs."""
    trees = [run.settings for run in runs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    # Compared as numbers and only then written: 1 and 1.0 are one value.
    different: dict[str, list[Any]] = {
        key: [tree.get(key, "-") for tree in trees] for key in keys
    }
    return {
        key: [str(value) for value in values]
        for key, values in different.items()
        if not matches_any(key, IGNORED) and any(value != values[0] for value in values)
    }


def matches_any(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key matches one of these patterns."""
    return any(fnmatch(key, pattern) for pattern in patterns)


def differing_among_first(settings: Table, count: int) -> dict[str, Sequence[str]]:
    """Return the settings that differ among the first `count` runs."""
    # Callers put the runs that count first. Those behind them are not ranked, and their
    # settings must not appear in a verdict.
    first = {key: values[:count] for key, values in settings.items()}
    return {key: values for key, values in first.items() if len(set(values)) > 1}


def differing_alone(key: str, settings: Table) -> dict[str, list[int]]:
    """Return groups of runs that differ in `key`, and in nothing else but the seed.

    Returns:
      by the other settings of a group in words, the indices of its runs.
    """
    other_keys = [name for name in settings if name not in (key, SEED)]
    groups: dict[str, list[int]] = {}
    for i in range(len(settings[key])):
        # A text, because the legend of a sweep's chart names the group by it.
        other_settings = ", ".join(f"{name}={settings[name][i]}" for name in other_keys)
        groups.setdefault(other_settings, []).append(i)
    return {
        other_settings: runs
        for other_settings, runs in groups.items()
        # A group that tried one value says nothing about the key.
        if len({settings[key][i] for i in runs}) > 1
    }
