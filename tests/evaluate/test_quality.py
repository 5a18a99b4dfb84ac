"""Quality figures against closed forms."""

import numpy as np
import pytest

from joulelab.evaluate.classification import Predictions, expected_calibration_error, load_predictions, quality_results


def predictions(labels, predicted, probabilities=None, ids=None):
    ids = [str(number) for number in range(len(labels))] if ids is None else ids
    return Predictions(np.array(ids), np.array(labels), np.array(predicted), probabilities)


def test_macro_f1_is_the_mean_over_classes_however_rare():
    # class 0: 3 right of 3 true and 4 said, F1 6/7; class 1: 0 of 1 true, F1 0
    assert predictions([0, 0, 0, 1], [0, 0, 0, 0]).macro_f1().value == pytest.approx((6 / 7 + 0) / 2)
    assert predictions([0, 1, 2], [0, 1, 2]).macro_f1().value == 1.0


def test_calibration_error_is_sureness_against_being_right():
    sure = np.array([[0.9, 0.1]] * 10, dtype=np.float32)
    nine_right = np.array([0] * 9 + [1])
    assert expected_calibration_error(sure, nine_right) == pytest.approx(0.0, abs=1e-6)
    assert expected_calibration_error(sure, np.ones(10, dtype=np.int64)) == pytest.approx(0.9, abs=1e-6)
    certain = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    assert expected_calibration_error(certain, np.array([0, 1])) == pytest.approx(0.0)


def test_errors_of_different_bins_do_not_cancel():
    probabilities = np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32)
    assert expected_calibration_error(probabilities, np.array([0, 1])) == pytest.approx((0.4 + 0.9) / 2, abs=1e-6)


def test_agreement_pairs_by_item_and_not_by_place():
    mine = predictions([0, 1, 1], [0, 1, 0], ids=["a", "b", "c"])
    theirs = predictions([1, 1, 0], [0, 0, 0], ids=["c", "b", "a"])
    found = mine.agreement(theirs)
    assert (found.successes, found.trials) == (2, 3)


def test_student_over_teacher_is_a_ratio_of_accuracies():
    figures = quality_results(predictions([0, 1, 0, 1], [0, 1, 0, 0]), predictions([0, 1, 0, 1], [0, 1, 0, 1]))
    assert figures["over_teacher"].value == pytest.approx(0.75)
    assert "calibration_error" not in figures


def test_predictions_come_back_from_disk_with_and_without_probabilities(tmp_path):
    made = predictions([0, 1], [0, 0], np.array([[0.7, 0.3], [0.6, 0.4]], dtype=np.float32))
    made.save(tmp_path)
    found = load_predictions(tmp_path)
    assert found.loss() == pytest.approx(-(np.log(0.7) + np.log(0.4)) / 2, rel=1e-6)
    predictions([0, 1], [0, 0]).save(tmp_path)
    assert load_predictions(tmp_path).probabilities is None
