"""Comparison of runs: a table with the best first, and a page with their curves."""

import hashlib
import itertools
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.config.fields import in_groups
from trainer.errors import UserError
from trainer.files import read_file, well_formed, write_text
from trainer.report.charts import SweepChart, SweepPoint
from trainer.report.differing_settings import (
    SEED,
    Table,
    differing_alone,
    differing_among_first,
    differing_settings,
    matches_any,
    overridden,
)
from trainer.report.page import comparison_page
from trainer.report.run_records import FORKED, SCHEDULE_CHANGED, RunRecords
from trainer.run.rundir import MAY_CHANGE

RANKED = "ranked"
# These texts stand in a column of the table, and in front of a run's directory.
OTHER_TEXT = "other validation text, not ranked"
NO_FINAL_LOSS = "no final validation loss, not ranked"
# Settings and metrics outnumber few runs, so that their names fit better into rows.
MAX_RUN_COLUMNS = 2  # with more runs, the table has a row for each run
TEXT_WIDTH = 120  # characters of a line; further columns follow below
CELL_WIDTH = 40  # longer cells are cut in the text, not in the page


class ValidatedText(NamedTuple):
    """The text of a validation.

    Attributes:
      source: its identity: a digest, the shares of a mixture, and whether the first
        tokens of documents count.
      tokens: number of its tokens that were read, from its start.
      early_step: the step of the validation, if it is not the run's last one; None:
        the final validation. Final validations of runs of any length are comparable.
    """

    source: tuple[str, ...]
    tokens: int
    early_step: int | None

    @property
    def is_final(self) -> bool:
        """Return whether it is the text of the final validation."""
        return self.early_step is None


class Entry(NamedTuple):
    """A run of a comparison.

    Attributes:
      ranking: RANKED, or why the run is not ranked.
      loss: the last validation loss, nats; infinite where the run is not ranked.
    """

    records: RunRecords
    ranking: str
    loss: float

    @property
    def is_counted(self) -> bool:
        """Return whether it counts among the runs of its settings.

        A run without a final loss does: the mean of the others would flatter them.
        """
        return self.ranking in (RANKED, NO_FINAL_LOSS)


def write_comparison(paths: Sequence[Path], out: Path | None) -> list[str]:
    """Compare runs: return the lines of a table, of verdicts, and the page's path.

    Args:
      paths: run directories with logs.
      out: the page; None: none.

    Raises:
      UserError: a directory without a log, or given twice, or a page that cannot be
          written.
    """
    # Raises for a directory that is given twice before any log is read.
    run_dirs = dict(zip(short_names(paths), paths, strict=True))
    read = [RunRecords.read(path, name) for name, path in run_dirs.items()]
    # A log may be damaged where only a comparison looks, as in the value of a key.
    with well_formed(
        "the records of the runs", "repair their files, or leave a run out"
    ):
        entries = ranked_entries(read)
        runs = [entry.records for entry in entries]
        # They stand first in `entries`, as `differing_among_first` needs them.
        counted = [entry for entry in entries if entry.is_counted]
        unranked = {e.records.name: e.ranking for e in entries if e.ranking != RANKED}
        # Of all runs: the table has a row for those that are not ranked, too.
        user_settings = overridden(runs)
        other_settings = implied_settings(runs, user_settings)
        table = comparison_table(entries, user_settings, other_settings)
        user_differing = differing_among_first(user_settings, len(counted))
        differing = differing_among_first(user_settings | other_settings, len(counted))
        means = seed_means(counted, differing)
        # With one run for each setting, the means would repeat the table of runs.
        has_seeds = SEED in differing and any(mean.run_count > 1 for mean in means)
        mean_rows = mean_table(means) if has_seeds else []
        # Settings that follow from those of the user would only lengthen the line.
        verdicts = best_run(counted, user_differing or differing, run_dirs)
        verdicts += [f"{why}: {run_dirs[name]}" for name, why in unranked.items()]
        hints = uneven_validations(counted)
        if has_seeds:
            hints += best_by_mean(differing, means)
        hints += best_at_boundary(counted, user_differing, means)
        lines = text_table(table)
        if verdicts or mean_rows or hints:
            lines += ["", *verdicts, *text_table(mean_rows), *hints]
        if out is None:
            return lines
        charts = [
            sweep_chart(counted, key, values, groups)
            for key, values in user_differing.items()
            # A loss over seeds shows noise; the table of means has its size.
            if key != SEED and (groups := differing_alone(key, differing))
        ]
        page = comparison_page(
            runs, table, charts, [*verdicts, *hints], mean_rows, unranked
        )
        # The first one alone: Bokeh's inlined code may contain the tag, too.
        page = page.replace("<head>", f"<head>{runs_tag(paths)}", 1)
        # Asked before it is written. A page that the user names is replaced, but not
        # silently.
        replaces_other = out.is_file() and not compares(out, paths)
    write_text(out, page)
    return [*lines, f"{out}{' (replaced an existing file)' * replaces_other}"]


def implied_settings(
    runs: Sequence[RunRecords], user_settings: Table
) -> dict[str, Sequence[str]]:
    """Return the differing settings that users did not set.

    The changes of the schedule are among them, if these differ.
    """
    settings: dict[str, Sequence[str]] = {
        key: values
        # A group that users set has a column already, which names its choice.
        for key, values in differing_settings(runs).items()
        if not in_groups(key, user_settings)
    }
    # config.yaml has the last schedule alone, so two runs can have the same one and
    # other learning rates on the way.
    changes = [run.facts.get(SCHEDULE_CHANGED, "-") for run in runs]
    if len(set(changes)) > 1:
        settings[SCHEDULE_CHANGED] = changes
    return settings


def comparison_table(
    entries: Sequence[Entry], user_settings: Table, other_settings: Table
) -> list[list[str]]:
    """Return the rows of the table of runs, the first of which is its head."""
    runs = [entry.records for entry in entries]
    # What users set comes first: the text wraps columns, and the first block is read.
    columns = {**user_settings, **final_metrics(runs), **other_settings}
    if any(entry.ranking != RANKED for entry in entries):
        rankings = [entry.ranking for entry in entries]
        columns = {"validation text": rankings, **columns}
    rows = [["", *(run.name for run in runs)]]
    rows += [[key, *values] for key, values in columns.items()]
    if len(runs) > MAX_RUN_COLUMNS:
        return [list(row) for row in zip(*rows, strict=True)]
    return rows


def ranked_entries(runs: Sequence[RunRecords]) -> list[Entry]:
    """Return the runs, the best first, and those that are not ranked last.

    Only runs whose last validation read the same text are ranked. That text is one that
    a finished run was validated on, if there is any; then the one shared by the most
    runs; then the longest.
    """
    # The same weights have other losses on other text, so the easier text would win.
    texts = [last_validated(run) for run in runs]
    ranked_text = max(
        texts,
        key=lambda text: (text.is_final, texts.count(text), text.tokens),
    )
    entries = []
    for run in runs:
        ranking = ranking_of(run, ranked_text)
        losses = [math.inf]
        # `values` leaves NaN out, but a run whose last loss is NaN is not ranked.
        if ranking == RANKED:
            losses += run.values("val/loss")
        entries.append(Entry(run, ranking, losses[-1]))
    return sorted(
        entries, key=lambda e: (not e.is_counted, e.ranking != RANKED, e.loss)
    )


def last_validated(run: RunRecords) -> ValidatedText:
    """Return the text of the last validation of a run, or else of its final one."""
    points = run.points("val/loss")
    # A run without a finite loss still says what it would have been validated on, so
    # that all diverged runs can be compared.
    if points:
        return validated(run, points[-1][0])
    return final_validated(run)


def final_validated(run: RunRecords) -> ValidatedText:
    """Return the text that a run validates on after its last step."""
    return validated(run, steps_of(run))


def validated(run: RunRecords, step: int) -> ValidatedText:
    """Return the text of the validation after a step."""
    # A digest, because a text that is edited may keep its path and length, and a copy
    # has another path.
    source = [run.validation_digest, *validation_shares(run)]
    # These losses leave the hardest tokens out, so the same weights would win.
    if run.settings.get("data.boundary_loss") is False:
        source.append("without the first token of each document")
    # Stopped runs are comparable only after the same step: a longer one has the lower
    # loss anyway.
    early_step = step if step < steps_of(run) else None
    return ValidatedText(tuple(source), run.validated_tokens(step), early_step)


def steps_of(run: RunRecords) -> int:
    """Return the steps of a whole run.

    Raises:
      UserError: its config.yaml lacks them, since it was cut. A run that was stopped
          would count as a finished one.
    """
    steps = run.settings.get("train.steps")
    if not isinstance(steps, int):
        raise UserError(
            f"the config.yaml of the run {run.name} has no train.steps: restore it (the"
            " command that trained this run, given again, does), or leave this run out"
        )
    return steps


def validation_shares(run: RunRecords) -> list[str]:
    """Return the shares of a mixture's sources in its validations.

    They are those that the run ends with. Empty: the text is no mixture.
    """
    # The digest is that of the sources' texts, and says nothing about their shares.
    if run.settings.get("data.source") != "mix":
        return []
    stages, weights = (run.settings.get(f"data.{key}") for key in ("stages", "weights"))
    last = (
        # A stage is its first step and the weights. Without weights the sources have
        # equal ones.
        stages[-1][1:] if stages else weights or [1] * len(run.settings["data.sources"])
    )
    # Shares, so that weights of 1, 1 and 2, 2 are the same.
    return [f"{weight / math.fsum(last):.6f}" for weight in last]


def ranking_of(run: RunRecords, ranked: ValidatedText) -> str:
    """Return RANKED for a run that was last validated on this text, else the reason."""
    text = last_validated(run)
    losses = run.line("val/loss").ys
    # An earlier, finite loss does not stand for a run that diverged.
    has_diverged = bool(losses) and not math.isfinite(losses[-1])
    if text == ranked and not has_diverged:
        return RANKED
    # Had it come to its end, it would be ranked: it counts in the means of its
    # settings.
    if final_validated(run) == ranked:
        return NO_FINAL_LOSS
    if text.source != ranked.source:
        return OTHER_TEXT
    if text.tokens != ranked.tokens:
        return f"validated on {text.tokens:,} tokens, not ranked"
    return f"last validated after step {text.early_step:,}, not ranked"


def runs_tag(paths: Sequence[Path]) -> str:
    """Return a meta tag that identifies the runs of a page."""
    # Sorted and resolved: the same runs in another order, or by another path, are the
    # same comparison. fsencode takes names that are not UTF-8.
    digest = hashlib.blake2b(
        b"\n".join(sorted(os.fsencode(path.resolve()) for path in paths)),
        digest_size=16,
    )
    return f'<meta name="runs" content="{digest.hexdigest()}">'


def compares(page: Path, paths: Sequence[Path]) -> bool:
    """Return whether a page is a comparison of these runs."""
    # The tag is looked for as bytes, since a file of this name may be anything.
    return page.is_file() and runs_tag(paths).encode() in read_file(page)


def free_page(page: Path, paths: Sequence[Path]) -> Path:
    """Return the first path of `page`, `page-2`, ... without another comparison."""
    # Somebody's other comparison of runs in this directory must not be lost.
    for n in itertools.count(1):
        path = page if n == 1 else page.with_name(f"{page.stem}-{n}{page.suffix}")
        if not path.exists() or compares(path, paths):
            return path
    raise AssertionError("unreachable: the count is infinite")


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns.

    Columns beyond `TEXT_WIDTH` follow below, after a copy of the first one, and long
    cells are cut.
    """
    # One long path in a cell would push all columns behind it out of view.
    cut = [
        [x if len(x) <= CELL_WIDTH else f"{x[: CELL_WIDTH - 3]}..." for x in row]
        for row in rows
    ]
    columns = list(zip(*cut, strict=True))
    if not columns:
        return []
    widths = [max(map(len, column)) for column in columns]
    blocks = [[0]]
    width = widths[0]
    for i in range(1, len(columns)):
        # A block has at least one column beside the first, however wide that is.
        if len(blocks[-1]) > 1 and width + 2 + widths[i] > TEXT_WIDTH:
            blocks.append([0])
            width = widths[0]
        blocks[-1].append(i)
        width += 2 + widths[i]
    lines = []
    for block in blocks:
        for row in cut:
            # Spaces at a line's end would wrap in a narrow terminal.
            cells = [row[i].ljust(widths[i]) for i in block]
            lines.append("  ".join(cells).rstrip())
    return lines


def best_run(
    entries: Sequence[Entry], settings: Table, run_dirs: Mapping[str, Path]
) -> list[str]:
    """Return a line that names the best run, which is the first of the entries.

    Return nothing if it has no validation loss, or if it is the only run.
    """
    # The first loss is infinite only if no run has a loss that counts.
    if len(entries) < 2 or not math.isfinite(entries[0].loss):
        return []
    name, loss = entries[0].records.name, entries[0].loss
    values = "".join(f"; {key}={values[0]}" for key, values in settings.items())
    return [f"best: {run_dirs[name]} (validation loss {loss:.4f}{values})"]


def uneven_validations(entries: Sequence[Entry]) -> list[str]:
    """Return a line if the validations of the runs read different amounts of text."""
    counts = []
    for entry in entries:
        # Runs with other batches leave out other amounts at the end, up to 1%, and are
        # still ranked.
        tokens = entry.records.logged_validation_tokens
        if tokens:
            counts.append(list(tokens.values())[-1])
    if len(set(counts)) < 2:
        return []
    return [
        f"the runs validated on {min(counts):,} to {max(counts):,} tokens, so small"
        " differences of their losses mean nothing"
    ]


class SeedMean(NamedTuple):
    """The final validation losses of the runs that differ in the seed alone.

    Attributes:
      settings: the values of the keys that differ among all runs, without the seed.
      losses: those of the runs that have one, nats.
      run_count: the number of runs.
    """

    settings: Mapping[str, str]
    losses: Sequence[float]
    run_count: int

    @property
    def mean(self) -> float:
        """Return the mean loss; infinite without any loss."""
        if not self.losses:
            return math.inf
        return statistics.fmean(self.losses)

    @property
    def is_partial(self) -> bool:
        """Return whether a run has no loss: the mean of the others would flatter."""
        return len(self.losses) < self.run_count


def seed_means(entries: Sequence[Entry], settings: Table) -> list[SeedMean]:
    """Return the means over seeds, the best first and the partial ones last.

    `settings`: values of the keys that differ, by run.
    """
    # All keys that differ, not only the user's: a preset may change others, too.
    keys = [key for key in settings if key != SEED]
    groups: dict[tuple[str, ...], list[float]] = {}
    for i, entry in enumerate(entries):
        values = tuple(settings[key][i] for key in keys)
        groups.setdefault(values, []).append(entry.loss)
    means = []
    for values, losses in groups.items():
        # A run without a final loss has an infinite one here, see `Entry.loss`.
        known_losses = list(filter(math.isfinite, losses))
        group_settings = dict(zip(keys, values, strict=True))
        means.append(SeedMean(group_settings, known_losses, len(losses)))
    # A mean that lacks a seed, which may have diverged, must not come first.
    return sorted(means, key=lambda m: (m.is_partial, m.mean))


def mean_table(means: Sequence[SeedMean]) -> list[list[str]]:
    """Return a table of means over seeds, whose first row is its head."""
    head = ["mean validation loss over seeds", "standard deviation", "runs"]
    rows = [[*means[0].settings, *head]]
    for m in means:
        mean = f"{m.mean:.4f}" if m.losses else "-"
        # `stdev` raises for a single value.
        spread = f"{statistics.stdev(m.losses):.4f}" if len(m.losses) > 1 else "-"
        count = str(m.run_count)
        if m.is_partial:
            count = f"{len(m.losses)} of {m.run_count}"
        rows.append([*m.settings.values(), mean, spread, count])
    return rows


def best_by_mean(settings: Table, means: Sequence[SeedMean]) -> list[str]:
    """Return a line if the settings with the best mean are not those of the best run.

    The mean is over seeds; the loss of one seed may be chance.
    """
    # Entries are sorted, so index 0 is the best single run.
    best_settings = means[0].settings
    if all(settings[key][0] == value for key, value in best_settings.items()):
        return []
    named = ", ".join(f"{key}={value}" for key, value in best_settings.items())
    return [
        f"by the mean over seeds, {named} is the best; the best single run may be"
        " chance"
    ]


def best_at_boundary(
    entries: Sequence[Entry], user_keys: Iterable[str], means: Sequence[SeedMean]
) -> list[str]:
    """Return a hint for each key whose best value is the largest or smallest tried.

    A better value may lie outside the range. The values tried are those of runs that
    differ from the best settings in this key alone; the best settings have the lowest
    mean loss over seeds. Skip keys that decide only how long or where a run trains, and
    model sizes, of which the largest is nearly always best. Return nothing if a run is
    a fork, because forks start from other weights.

    Args:
      entries: the best first.
      user_keys: the keys that users set.
      means: the best first.
    """
    is_forked = any(FORKED in entry.records.facts for entry in entries)
    if is_forked or not means or not math.isfinite(means[0].mean):
        return []
    best_settings = means[0].settings
    lines = []
    for key in user_keys:
        if key == SEED or matches_any(
            key, (*MAY_CHANGE, "train.eval_batches", "model", "model.*")
        ):
            continue
        tried = set()
        for m in means:
            # Equal but for this key: elsewhere in a sweep the best value may be another
            # one.
            if {**m.settings, key: ""} == {**best_settings, key: ""}:
                tried.add(number_or_inf(m.settings[key]))
        smallest, largest = min(tried), max(tried)
        # Infinite: a value is no number, such as a name, which has no larger or
        # smaller.
        if len(tried) < 2 or not math.isfinite(largest):
            continue
        for value, end, further in (
            (largest, "largest", "larger"),
            (smallest, "smallest", "smaller"),
        ):
            if number_or_inf(best_settings[key]) == value:
                lines.append(
                    f"the best {key} is the {end} tried, {best_settings[key]}; try"
                    f" {further}"
                )
    return lines


def best_loss(run: RunRecords) -> str:
    """Return the lowest comparable validation loss, to four digits; `-`: none."""
    losses = [loss for _, loss in run.comparable_validations]
    if losses:
        return f"{min(losses):.4g}"
    return "-"


def final_metrics(runs: Sequence[RunRecords]) -> dict[str, list[str]]:
    """Return the final metrics of the runs, by name: those that any run has."""
    all_metrics = {
        "validation loss": [run.last("val/loss") for run in runs],
        "best loss on train.eval_batches": [best_loss(run) for run in runs],
        "steps": [f"{run.rows[-1]['step']:,}" for run in runs],
        "tokens/s, median": [run.median("perf/tokens_per_s") for run in runs],
        "host memory, GiB": [run.last("memory/host_peak_gib") for run in runs],
        "skipped": [run.last("watchdog/skipped") for run in runs],
        "rolled back": [run.last("watchdog/rollbacks") for run in runs],
    }
    # No run of these has it: a column of dashes only takes space.
    return {name: xs for name, xs in all_metrics.items() if set(xs) != {"-"}}


def sweep_chart(
    entries: Sequence[Entry],
    key: str,
    values: Sequence[str],
    groups: Mapping[str, Sequence[int]],
) -> SweepChart:
    """Return a chart of the last validation losses over the values of a key.

    `groups`: runs that differ in the key alone, by their other settings.
    """
    runs = [i for group in groups.values() for i in group]
    # Numbers by size: as texts, 1e-3 would follow 0.01. Names come behind them.
    order = sorted(
        {values[i] for i in runs}, key=lambda value: (number_or_inf(value), value)
    )
    points = []
    for other_settings, group in groups.items():
        for i in group:
            entry = entries[i]
            text = f"{entry.records.name}: {entry.loss:.6g}"
            points.append(SweepPoint(values[i], entry.loss, text, other_settings))
    return SweepChart(
        f"Validation loss by {key}",
        order,
        points,
        "nats per token; a line joins the best of runs that differ in this alone",
    )


def number_or_inf(text: str) -> float:
    """Return the number in `text`; infinity, which sorts last, where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell them apart."""
    # Resolved, because `.` and `runs/../a` name a run as well.
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("one run directory is given twice; give different ones")
