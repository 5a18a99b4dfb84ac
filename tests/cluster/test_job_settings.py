"""Settings of a job from preset, site file and options."""

import pytest

from joulelab.cluster.job_settings import job_settings
from joulelab.errors import ConfigError, NotFoundError


def test_options_go_over_the_site_file_and_that_over_the_preset(site):
    settings = job_settings("h100", {"cpus": 4}, site)
    assert (settings.partition, settings.account, settings.cpus, settings.memory) == ("hopper", "physics", 4, "128G")


@pytest.mark.parametrize(
    ("preset", "requested", "error", "text"),
    [
        ("h10", {}, NotFoundError, "did you mean 'h100'"),
        (None, {"time": "two hours"}, ConfigError, "D-HH:MM:SS"),
        (None, {"gpu": 2}, ConfigError, "gpus"),
        (None, {"memory": "lots"}, ConfigError, "as in 64G or 512M, found 'lots'"),
        (None, {"sbatch": ["nonsense"]}, ConfigError, "found 'nonsense'"),
        (None, {"export": {"MY-VAR": "1"}}, ConfigError, "found 'MY-VAR'"),
    ],
)
def test_a_mistake_in_the_settings_is_answered_with_what_was_expected(preset, requested, error, text, tmp_path):
    with pytest.raises(error) as refused:
        job_settings(preset, requested, tmp_path / "none")
    assert text in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("default: {account: physics}", "unknown key 'default'"),
        ("presets: [big]", "presets is"),
        ("presets: {big: 3}", "presets.big is '3'"),
        ("defaults: {time: 4:00:00}", "in quotes, .* found the number 14400"),
        ("defaults: {acount: physics}", "did you mean account"),
        ("defaults: {gpus: many}", "whole number"),
    ],
)
def test_a_mistake_in_the_site_file_is_refused_with_its_name(tmp_path, written, text):
    (tmp_path / "slurm.yaml").write_text(written)
    with pytest.raises(ConfigError, match=text) as refused:
        job_settings(None, {}, tmp_path / "slurm.yaml")
    assert str(tmp_path) in f"{refused.value.message} {refused.value.hint}"


def test_a_site_file_that_is_named_must_be_there(tmp_path, monkeypatch):
    for name in (str(tmp_path / "gone.yaml"), "./gone.yaml"):
        monkeypatch.setenv("JOULELAB_SLURM", name)
        with pytest.raises(NotFoundError, match=r"gone\.yaml"):
            job_settings(None, {})


def test_cpu_jobs_have_their_own_resources_whatever_the_preset(site, tmp_path):
    plain = job_settings("h100", {"time": "48:00:00"}, site).cpu_jobs
    assert (plain.cpus, plain.memory, plain.time) == (4, "8G", "02:00:00")
    site.write_text('defaults:\n  cpu_jobs: {cpus: 8, time: "4:00:00"}\n')
    ours = job_settings("h100", {"cpu_jobs": {"memory": "1G"}}, site).cpu_jobs
    assert (ours.cpus, ours.memory, ours.time) == (8, "1G", "4:00:00")
    for wrong in ({"memory": "lots"}, {"time": "long"}, {"cpus": 0}, {"gpus": 1}):
        with pytest.raises(ConfigError):
            job_settings(None, {"cpu_jobs": wrong}, tmp_path / "none")


def test_a_secret_in_a_job_script_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"export\.WANDB_API_KEY contains what looks like a secret"):
        job_settings(None, {"export": {"WANDB_API_KEY": "abc"}}, tmp_path / "none")
    job_settings(None, {"export": {"OMP_NUM_THREADS": "4"}}, tmp_path / "none")
