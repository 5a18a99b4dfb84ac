"""Progress lines of a run."""

from joulelab.cli.console import PlainProgress


def test_a_stage_with_an_early_message_prints_its_duration_at_its_end(capsys):
    with PlainProgress() as watching:
        watching.stage("model.train.phases", None)
        watching.write("taking the step apart")
        assert capsys.readouterr().err == "taking the step apart\n"
        watching.finish()
    name, *duration = capsys.readouterr().err.split()
    assert name == "model.train.phases" and duration[-1] == "ms"
