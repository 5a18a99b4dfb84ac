"""A comparison by held-out loss: less is better, and the seeds are the sample."""

import json
import re

import pytest

from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.verdict import verdict
from joulelab.report.export import _difference
from joulelab.report.figures.comparison_figures import quality_against_energy
from joulelab.report.tables.comparison_tables import comparison_markdown
from joulelab.runs.record import Result


def as_losses(records, by_label):
    """The demo's runs with losses in place of their accuracies."""
    made = []
    for record in records:
        losses = by_label.get(record.label)
        if losses is not None:
            seed = int(record.spec["seed"])
            results = {"student.mlm_loss": Result(value=losses[seed], lower_is_better=True)}
            made.append(record.model_copy(update={"results": results}))
    return made


@pytest.fixture
def comparison(made, tmp_path):
    def build(by_label):
        records = as_losses(made.demo_records(), by_label)
        return compare(made.group_of(records), records, tmp_path)

    return build


BETTER = {"labels only": (3.30, 3.32), "response KD": (3.101, 3.119)}


def test_a_lower_loss_over_all_seeds_is_reported_as_better(comparison):
    found = verdict(comparison(BETTER))
    assert found.headline.startswith("Compared with labels only, response KD has a lower held-out loss (-0.200 nats); ")
    assert found.sentences[0] == (
        "response KD has a held-out loss 0.200 nats lower than labels only "
        "(95 % interval [-0.213, -0.187]; seeds -0.199, -0.201)."
    )


def test_the_headline_names_methods_that_are_better_and_those_that_are_worse(comparison):
    found = verdict(comparison({**BETTER, "response + feature KD": (3.50, 3.521)}))
    assert found.headline.startswith(
        "Compared with labels only, response KD has a lower held-out loss (-0.200 nats), and response + feature KD "
        "has a higher one (+0.201 nats); "
    )


def test_seeds_that_state_the_same_have_no_interval_without_width(comparison):
    text = comparison_markdown(comparison({"labels only": (3.30, 3.32), "response KD": (3.1, 3.1)}))
    assert "| 3.100 (n=2, equal) |" in text and "[3.100, 3.100]" not in text


def test_seeds_that_disagree_resolve_nothing(comparison):
    found = verdict(comparison({"labels only": (3.30, 3.32), "response KD": (3.10, 3.40)}))
    assert "no method has a significantly lower or higher held-out loss" in found.headline
    assert "held-out loss inconclusive: difference -0.060 nats, 95 % interval" in found.sentences[0]


def test_the_table_has_the_intervals_over_seeds(comparison):
    text = comparison_markdown(comparison(BETTER))
    row = next(line for line in text.splitlines() if line.startswith("| response KD"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "response KD", "0, 1", "3.110 [2.996, 3.224]", "3.101, 3.119", "-0.200 [-0.213, -0.187]", "yes",
    ]  # fmt: skip
    assert "less is better" in text and "Accuracy" not in text


def test_figure_and_json_know_that_it_is_a_loss(comparison):
    found = comparison(BETTER)
    figure = quality_against_energy(found)
    assert "Held-out loss" in figure.description and "3.110 nats" in figure.description
    assert _difference(found.row("response KD").difference)["interval"]["value"] == pytest.approx(-0.2)


def test_the_axis_of_a_loss_is_named_once(comparison):
    """Layers that name an axis differently are joined, name after name, until the chart is a foot high."""
    figure = quality_against_energy(comparison(BETTER))
    names = set(re.findall(r'"title": "([^"]*nats[^"]*)"', json.dumps(figure.spec)))
    assert names == {"Held-out loss (nats per token), less is better"}
