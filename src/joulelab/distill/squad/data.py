"""Questions and paragraphs as windows of tokens, for training and for evaluation."""

from __future__ import annotations

from pathlib import Path

from joulelab.data.squad.windows import WindowShape, load_questions, make_windows, write_features
from joulelab.distill.runner import PREPROCESS, Runner
from joulelab.distill.squad.config import SquadSpec
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.zoo.pretrained import load_tokenizer, weights_identity


def prepare_windows(runner: Runner[SquadSpec]) -> Artifact:
    """The stage `data.preprocess`; one folder for training, one for validation."""
    data, student = runner.spec.data, runner.spec.student.model
    files = list(dict.fromkeys(data.files.values()))

    def write(folder: Path, stage: Stage) -> None:
        tokenizer = load_tokenizer(student)
        shape = WindowShape(data.max_seq_length, data.doc_stride, data.max_query_length)
        samples, tokens = 0, 0
        for name in data.splits:
            questions = data.questions(name)
            windows = make_windows(questions, tokenizer, shape)
            written = write_features(
                folder / name, questions, windows, vocab_size=len(tokenizer), pad_id=tokenizer.pad_token_id
            )
            samples, tokens = samples + len(written), tokens + written.tokens_total
            stage.count(samples=samples, tokens=tokens)

    inputs = {**data.model_dump(mode="json"), "tokenizer": weights_identity(student)}
    if data.is_own and "validation" not in data.files:
        inputs["splits"] = "own"  # artifacts of earlier releases evaluated on synthetic stories
    parents = [runner.input_bill("questions", file, "text", role="data") for file in files]
    made = runner.make("data", PREPROCESS, write, kind="squad-windows", inputs=inputs, parents=parents)
    if data.is_own:
        sizes = {name: len(load_questions(made.folder / name)) for name in data.splits}
        runner.report_data(sizes, data.notes(), data.duplicates())
    return made
