"""`joulelab infer --json` prints the record with the rows of the table, whatever the model itself prints."""

import json
from pathlib import Path

from commands import joulelab_here

MODEL = Path(__file__).with_name("perceptron.py")


def test_the_rows_are_in_the_record_and_output_of_the_model_is_not_parsed(tmp_path):
    (tmp_path / "chatty.py").write_text(MODEL.read_text() + 'print("loading")\n')
    words = ["--min-run-time", "0.05", "--estimate-cpu", "energy.idle_before_s=0", "energy.idle_after_s=0", "--json"]
    done = joulelab_here("infer", "./chatty.py", *words, "--runs-dir", tmp_path / "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed, _, record = done.stdout.partition("\n")
    found = json.loads(record)
    assert printed == "loading"
    assert found["status"] == "done"
    assert [row["mode"] for row in found["inference"]] == ["eager"]
