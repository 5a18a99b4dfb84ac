"""An archive says the same to somebody else: whole, recomputable, and without what is nobody's business."""

import errno
import gzip
import hashlib
import io
import json
import shutil
import tarfile
import zipfile
from types import SimpleNamespace

import pytest
import yaml

from joulelab.cli.archive import unpack as unpack_verb
from joulelab.errors import InvalidMeasurement, JoulelabError, NotFoundError, StorageFailed, UsageError
from joulelab.runs import pack as unpacking
from joulelab.runs.groups import GroupRecord, Member, run_folders_of
from joulelab.runs.lock import holding
from joulelab.runs.pack import SUMS, TOP, pack, require_archive_name, unpack
from joulelab.runs.paths import RunPaths, read_json, write_json
from joulelab.runs.verification import verify_runs

KINDS = pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@KINDS
def test_what_is_packed_comes_out_again_and_the_same_runs_give_the_same_bytes(folder, tmp_path, name):
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "weights.bin").write_bytes(b"large")
    (folder / "notes-to-myself.txt").write_text("private")
    first, second = tmp_path / "a" / name, tmp_path / "b" / name
    done = pack([folder], [], first)
    for path in folder.rglob("*"):
        path.touch()
    pack([folder], [], second)
    assert first.read_bytes() == second.read_bytes()
    out = files_of(unpack(first, tmp_path / "out"))
    assert len(out) == done.files
    kept = {name for name in files_of(folder) if not name.startswith(("checkpoints", "notes", "trace/node"))}
    kept = {name for name in kept if not name.endswith(".lock")}
    assert {name.removeprefix(f"runs/{folder.name}/") for name in out if name.startswith("runs/")} == kept
    assert out[f"runs/{folder.name}/run.json"] == (folder / "run.json").read_bytes()
    for line in out[SUMS].decode().splitlines():
        digest, inner = line.split("  ")
        assert hashlib.sha256(out[inner]).hexdigest() == digest


def test_every_figure_follows_from_trace_and_marks(folder, tmp_path, capsys):
    archive = tmp_path / "x.tar.gz"
    pack([folder], [], archive)
    unpack_verb(archive, tmp_path / "out", verify=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert {check["verdict"] for check in found["figures"]} == {"matches"}
    names = {check["figure"] for check in found["figures"]}
    stage = "stages.model.train"
    assert names.issuperset({"totals.best.energy_j", "totals.duration_s", "validity.grade", "environment.packages"})
    fields = ("energy.cpu_estimate.energy_j", "duration_s", "tokens", "j_per_token", "validity.grade")
    assert names.issuperset(f"{stage}.{field}" for field in fields)
    assert names.issuperset({"lineage.weights.energy.cpu_estimate.energy_j", "settings.energy.estimate_cpu", "status"})
    files = ("stages/01-model.train.json.best.energy_j", "experiment_summary.json.shown_energy_j")
    assert names.issuperset({*files, "bill of weights.cpu_estimate.energy_j"})


def changed(folder, change):
    record = read_json(folder / "run.json")
    change(record)
    write_json(folder / "run.json", record)


def test_a_prettier_figure_is_found_out_though_the_sums_fit(folder, tmp_path):
    changed(folder, lambda record: record["stages"][0]["best"].update(energy_j=0.001))
    archive = tmp_path / "x.zip"
    pack([folder], [], archive)
    with pytest.raises(
        InvalidMeasurement, match=r"1 of \d+ figures do not match .*stages.model.train.best.energy_j"
    ) as error:
        unpack_verb(archive, tmp_path / "out", verify=True)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_without_its_trace_a_figure_cannot_be_recomputed(folder, how):
    ((_, _, trace),) = RunPaths(folder).traces()
    if how == "gone":
        trace.unlink()
    else:
        trace.write_bytes(trace.read_bytes()[:-100])
    checks = verify_runs([folder])
    (reason,) = {check.reason for check in checks if check.verdict == "cannot be recomputed"}
    assert ("is missing" if how == "gone" else "cannot be read") in reason
    assert not any(check.verdict == "matches" for check in checks if check.figure.startswith(("totals", "stages")))


def test_what_was_inherited_is_checked_where_its_maker_is_there(folder):
    made = read_json(folder / "run.json")["lineage"][0]
    heir = shutil.copytree(folder, folder.with_name("heir-20260101T000000Z-0001"))
    changed(heir, lambda record: record.update(run_id=heir.name, made=[], lineage=[made]))
    inherited = [check for check in verify_runs([folder, heir]) if check.figure.startswith("inherited")]
    assert [check.verdict for check in inherited] == ["matches"]
    alone = [check for check in verify_runs([heir]) if check.figure.startswith("inherited")]
    assert [check.verdict for check in alone] == ["not in the archive"]
    changed(heir, lambda record: record["lineage"][0]["energy"]["cpu_estimate"].update(energy_j=1e-3))
    wrong = [check for check in verify_runs([folder, heir]) if check.figure.startswith("inherited")]
    assert [check.verdict for check in wrong] == ["differs"]


def test_an_heir_that_used_a_provisional_bill_is_not_forged(folder):
    """It ended before its maker: the bill that it used stated the energy so far."""
    (marks,) = (folder / "events").glob("*.jsonl")
    billed = next(json.loads(line) for line in marks.read_text().splitlines() if '"artifact"' in line)
    then = billed["bill"]["artifact"]
    heir = shutil.copytree(folder, folder.with_name("heir-20260101T000000Z-0001"))
    changed(heir, lambda record: record.update(run_id=heir.name, made=[], lineage=[then]))
    (check,) = [check for check in verify_runs([folder, heir]) if check.figure.startswith("inherited")]
    settled = read_json(folder / "run.json")["lineage"][0]["energy"]["cpu_estimate"]["energy_j"]
    assert (check.recorded, check.recomputed) == (then["energy"]["cpu_estimate"]["energy_j"], settled)
    assert check.verdict == "newer method"
    assert "provisional" in check.reason


@KINDS
def test_a_flipped_byte_or_a_missing_end_is_refused_and_leaves_nothing(folder, tmp_path, name):
    archive = tmp_path / name
    pack([folder], [], archive)
    whole, original = archive.read_bytes(), files_of(unpack(archive, tmp_path / "original"))
    shutil.rmtree(tmp_path / "original")
    refused = 0
    for place in range(40, len(whole), len(whole) // 20):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            out = unpack(archive, tmp_path / "out")
        except JoulelabError as error:
            assert error.exit_code == 2
            refused += 1
        else:  # the byte told of nothing that is kept, as a time in a header
            assert files_of(out) == original
            shutil.rmtree(out)
    assert refused > 15
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="corrupted"):
        unpack(archive, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name not in (name, "runs")] == []


def tar_of(path, *members):
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for facts, content in members:
            facts.size = len(content)
            tar.addfile(facts, io.BytesIO(content))
    return path


def named(name, kind=tarfile.REGTYPE, link=""):
    facts = tarfile.TarInfo(name)
    facts.type, facts.linkname = kind, link
    return facts


@pytest.mark.parametrize(
    ("member", "reported"),
    [
        (named("../../escaped"), "points outside"),
        (named("/tmp/escaped"), "points outside"),
        (named(f"{TOP}/../../escaped"), "points outside"),
        (named(f"{TOP}/link", tarfile.SYMTYPE, "/etc"), "not a regular file"),
        (named(f"{TOP}/pipe", tarfile.FIFOTYPE), "not a regular file"),
        (named("elsewhere/run.json"), "not made by"),
        (named(f"{TOP}/x"), "no SHA256SUMS"),
    ],
)
def test_an_archive_of_somebody_elses_making_writes_nowhere(tmp_path, member, reported):
    archive = tar_of(tmp_path / "x.tar.gz", (member, b""))
    with pytest.raises(UsageError, match=reported):
        unpack(archive, tmp_path / "deep" / "er" / "out")
    assert not list(tmp_path.rglob("escaped")) and not (tmp_path / "deep" / "er" / "out").exists()


def test_a_zip_is_trusted_no_more(tmp_path):
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr(f"{TOP}/../../escaped", "x")
    with pytest.raises(JoulelabError, match="points outside"):
        unpack(archive, tmp_path / "a" / "out")


def test_an_extra_file_is_noticed(folder, tmp_path):
    archive = tmp_path / "x.zip"
    pack([folder], [], archive)
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(f"{TOP}/runs/{folder.name}/trace/node.2.jsonl", "{}")
    with pytest.raises(JoulelabError, match=r"node\.2\.jsonl is not in SHA256SUMS"):
        unpack(archive, tmp_path / "out")


def test_mistakes_are_answered(folder, tmp_path):
    with pytest.raises(NotFoundError, match="no such file"):
        unpack(tmp_path / "none.zip", tmp_path / "out")
    with pytest.raises(UsageError, match=r"\.tar\.gz or \.zip|unknown archive format"):
        pack([folder], [], tmp_path / "x.rar")
    (tmp_path / "x.tar.gz").write_text("not an archive")
    with pytest.raises(UsageError, match=r"corrupted or not an archive .* expected a \.tar\.gz or \.zip"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out")
    with pytest.raises(UsageError, match="already exists"):
        unpack(tmp_path / "x.tar.gz", folder)
    with pytest.raises(NotFoundError, match="is a folder"):
        unpack(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match="is a folder"):
        require_archive_name(tmp_path)
    require_archive_name(tmp_path / "new" / "x.zip")  # created with the archive
    tar_of(tmp_path / "x.tar.gz", (named(f"{TOP}/README.md"), b"the header of the next file is damaged"))
    with pytest.raises(UsageError, match="is corrupted: it has no SHA256SUMS"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out")
    changed(folder, lambda record: record.update(status="running"))
    with holding(folder), pytest.raises(UsageError, match="still running"):
        pack([folder], [], tmp_path / "y.zip")


def test_two_runs_of_the_same_name_are_not_packed_into_one_archive(folder, tmp_path):
    other = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, other)
    with pytest.raises(UsageError, match="have the same name"):
        pack([folder, other], [], tmp_path / "both.zip")
    assert not (tmp_path / "both.zip").exists()


def test_a_run_that_is_named_twice_counts_once(folder, store, tmp_path):
    """`--run-dir` makes a link in the store."""
    outside = tmp_path / "elsewhere"
    folder.rename(outside)
    folder.symlink_to(outside, target_is_directory=True)
    assert run_folders_of(store, [folder.name, str(outside), "*"]) == [folder]


def test_a_full_disk_is_no_fault_of_the_archive(folder, tmp_path, monkeypatch):
    pack([folder], [], tmp_path / "x.zip")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unpacking, "_copy", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(tmp_path / "x.zip", tmp_path / "out")


def test_an_archive_that_does_not_fit_is_refused_before_the_disk_is_full(folder, tmp_path, monkeypatch):
    pack([folder], [], tmp_path / "x.zip")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StorageFailed, match=r"contains at least .*1.00 kB free"):
        unpack(tmp_path / "x.zip", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))) == []


@pytest.mark.parametrize("content", ['{"run_id": ', "{}", "[1, 2]"])
def test_a_record_that_cannot_be_read_is_reported_as_a_wrong_figure(folder, tmp_path, content):
    (folder / "run.json").write_text(content)
    (check,) = verify_runs([folder])
    assert (check.run_id, check.figure, check.verdict) == (folder.name, "run.json", "cannot be recomputed")
    assert "run.json" in check.reason and not check.good


def test_an_archive_without_runs_is_not_verified(folder, tmp_path):
    pack([folder], [], tmp_path / "x.tar.gz")
    opened = unpack(tmp_path / "x.tar.gz", tmp_path / "opened")
    files = {f"{TOP}/{name}": content for name, content in files_of(opened).items() if "runs/" not in name}
    sums = files[f"{TOP}/SHA256SUMS"].decode().splitlines(keepends=True)
    files[f"{TOP}/SHA256SUMS"] = "".join(line for line in sums if " runs/" not in line).encode()
    tar_of(tmp_path / "empty.tar.gz", *((named(name), content) for name, content in files.items()))
    with pytest.raises(UsageError, match="contains no run"):
        unpack_verb(tmp_path / "empty.tar.gz", tmp_path / "out", verify=True)


def test_secrets_stay_at_home(folder, tmp_path):
    with (folder / "config.yaml").open("a") as file:
        file.write("hub_token: null\napi_key: 'abc def'\nurl: https://me:pass@host/x\ntokenizer: bert\n")
    with (folder / "events" / "extra.0.1.jsonl").open("w") as file:
        file.write('{"kind": "warning", "text": "hf_abcdefghijklmnopqrst was refused"}\n')
    archive = tmp_path / "x.zip"
    with pytest.raises(UsageError, match="3 texts in these runs look like a secret") as refused:
        pack([folder], [], archive)
    lines = (folder / "config.yaml").read_text().splitlines()
    for text in ("api_key: 'abc def'", "url: https://me:pass@host/x"):
        assert f"{folder.name}/config.yaml, line {1 + lines.index(text)}" in refused.value.message
    assert f"{folder.name}/events/extra.0.1.jsonl, line 1" in refused.value.message
    assert not list(tmp_path.glob("*.zip")) and "--redact" in refused.value.hint
    done = pack([folder], [], archive, redact=True)
    assert sorted(done.redacted.values()) == [1, 2]
    out = files_of(unpack(archive, tmp_path / "out"))
    text = b"".join(out.values())
    assert not [word for word in (b"abc def", b":pass@", b"hf_abc") if word in text]
    assert b"tokenizer: bert" in text and b"hub_token: null" in text


def test_an_archive_of_a_group_contains_its_yaml(folder, tmp_path):
    group_folder = tmp_path / "store" / "groups" / "pair-20260301T100000Z-beef"
    record = read_json(RunPaths(folder).record)
    member = Member(label=record["label"], seed=0, experiment="x", spec=record["spec"], run_id=folder.name)
    group = GroupRecord(
        group_id=group_folder.name,
        name="pair",
        about="",
        baseline=record["label"],
        created_at=record["created_at"],
        members=(member,),
        varying={},
    )
    write_json(group_folder / "group.json", group)
    pack([folder], [group_folder], tmp_path / "x.tar.gz")
    out = unpack(tmp_path / "x.tar.gz", tmp_path / "out")
    settings = yaml.safe_load((out / "runs" / "groups" / group_folder.name / "group.yaml").read_text())
    (named,) = settings["members"]
    assert named == {"experiment": f"../../{folder.name}/config.yaml", "seeds": [0]}
    assert (out / "runs" / "groups" / group_folder.name / named["experiment"]).resolve().is_file()
