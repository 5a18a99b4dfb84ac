"""What a log shows of the stages while a run runs."""

from joulelab.cli.console import PlainProgress


def test_a_stage_that_begins_with_a_word_is_told_with_its_time_at_its_end(capsys):
    with PlainProgress() as watching:
        watching.stage("model.train.phases", None)
        watching.say("taking the step apart")
        assert capsys.readouterr().err == "taking the step apart\n"
        watching.finish()
    assert capsys.readouterr().err.split() == ["model.train.phases", "0.0", "s"]
