"""Settings of the pipeline `squad` that cannot work are refused before anything starts, with the reason."""

from pathlib import Path

import pytest

from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import load_spec

FILES = Path(__file__).parents[2] / "data" / "squad"


def test_the_shipped_settings_are_the_published_ones():
    spec = load_spec("squad")
    data, evaluation = spec.data, spec.evaluation
    assert (data.max_seq_length, data.doc_stride, data.max_query_length) == (384, 128, 64)
    assert (evaluation.n_best_size, evaluation.max_answer_length, evaluation.null_score_diff_threshold) == (20, 30, 0.0)
    assert (spec.distill.alpha_ce, spec.distill.alpha_squad, spec.distill.temperature) == (0.5, 0.5, 2.0)


@pytest.mark.parametrize(
    ("changes", "output_text"),
    [
        ({"distill": {"alpha_ce": 0.0, "alpha_squad": 0.0}}, "nothing to learn from"),
        ({"data": {"max_seq_length": 128, "doc_stride": 128}}, "some tokens would be in no window"),
        ({"distill": {"alpha_squd": 1}}, "did you mean distill.alpha_squad"),
        ({"distill": {"temperature": 0}}, "distill.temperature: expected"),
    ],
)
def test_contradictions_are_refused_with_the_reason(changes, output_text):
    with pytest.raises(ConfigError, match=output_text):
        load_spec("squad", changes)


def test_files_are_looked_at_before_a_run_is_made(tmp_path):
    missing = load_spec("squad-tiny", {"data": {"train_file": str(tmp_path / "none.json")}})
    with pytest.raises(NotFoundError, match=r"none\.json"):
        missing.preflight()
    wrong = load_spec("squad-tiny", {"data": {"validation_file": str(FILES / "v2.json")}})
    with pytest.raises(ConfigError, match="kite-5 is marked impossible"):
        wrong.preflight()


def test_answers_alone_need_no_teacher_to_be_there(tmp_path):
    nowhere = {"teacher": {"model": str(tmp_path / "nowhere")}, "student": {"init": str(tmp_path)}}
    load_spec("squad-tiny-labels", nowhere).preflight()
    with pytest.raises(NotFoundError, match="nowhere"):
        load_spec("squad-tiny", nowhere).preflight()
