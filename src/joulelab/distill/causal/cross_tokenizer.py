"""A teacher with another tokenizer than the student: its documents, and batches of both with the spans they share.

The teacher reads every conversation or text in its own tokens and its own chat template, and its completions reach the
student as text. Where distributions are compared (kd, on-policy), its documents are numbered like the student's. A
batch has the student's rows, the teacher's rows of the same documents, and the spans of text
that both cover by whole tokens; the loss over them (`logit_cache.aligned_loss`) is approximate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joulelab.data import sources
from joulelab.data.batches import Rows, ShuffledRows
from joulelab.data.chat.conversations import Row
from joulelab.data.chat.datasets import encoded_rows
from joulelab.data.chat.encoding import (
    DocumentList,
    Documents,
    DocumentStore,
    EncodedDocument,
    encode_rows,
    encoding_identity,
    pad_id_of,
    require_end_id,
    tokenizer_sha256,
    vocab_size_of,
    write_documents,
)
from joulelab.data.chat.encoding import encode_prompt as encode_chat_prompt
from joulelab.data.chat.packing import NOT_TRAINED, CausalBatch, PackedRows, causal_batch, pack
from joulelab.data.chat.templates import CHATML, ChatTemplate, ConversationRefused, read_template, template_of
from joulelab.data.chat.token_alignment import CommonVocabulary, Ints, TokenBytes, align
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.data import data_rows, split_rows
from joulelab.distill.causal.models import (
    TEST,
    TRAIN,
    CausalContext,
    Split,
    embedding_rows,
    max_positions,
    require_positions,
    student_tokenizer,
)
from joulelab.distill.logit_cache.aligned_loss import AlignedTargets, BatchSpans, CommonTokens, CrossTokenizerLoss
from joulelab.distill.logit_cache.kd_loss import DenseTargets, target_positions
from joulelab.distill.runner import StageSpec
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Prompt, answer_ids, as_messages, encode_prompt, end_of_turn
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.zoo.pretrained import load_tokenizer

STAGE = StageSpec("data.teacher-tokens", "data", "preprocess")
SPAN_COUNTS = ("trained", "aligned", "spans", "with text", "one to one")
"""What is counted of tokens and spans; all but spans are tokens or parts of the spans."""
IN_TEACHERS_TOKENS = "in-teachers-tokens"
"""Folder in an artifact of completions: the same documents in the teacher's tokens."""
_COMPARE_BYTES = "Losses per token of teacher and student are not comparable: compare bits per byte"
_BLOCK = 256
_CHECKED_ROWS = 20
_SAME = "use a teacher and a student of one family, or a randomly initialized student (student.size)"


# what is refused


def check_tokenizers(spec: CausalSpec) -> None:
    """Raise if teacher and student have different tokenizers and the pipeline needs the same ids, or compares
    distributions and no text of the data can be aligned."""
    name = spec.teacher.model
    if spec.until == "train" and spec.student.model is not None:
        require_embeddings("student.model", spec.student.model, spec.tokenizer, spec.data.template)
    if spec.until == "data" or not spec.has_teacher:
        return
    own = student_tokenizer(spec)
    if spec.teacher_is_elsewhere:
        return
    other = load_tokenizer(name)
    if own.get_vocab() == other.get_vocab():  # another template or normalizer with the same ids is no obstacle
        if spec.teacher.cross_tokenizer_loss != "gold":
            raise ConfigError(
                f"teacher.cross_tokenizer_loss={spec.teacher.cross_tokenizer_loss} has no effect, because {name} and "
                "the student have the same tokenizer",
                "leave it out",
            )
        reads = spec.evaluates_teacher or spec.teacher_phase == "logits" or spec.pipeline == "on-policy"
        if reads and spec.teacher.server is None:
            require_positions("teacher.model", name, spec)
        return
    found = f"{spec.tokenizer} and the teacher {name} have different tokenizers: the same id is a different token"
    reason = _why_same_needed(spec)
    if reason is not None:
        raise ConfigError(f"{found}; {reason[0]}", reason[1])
    require_embeddings("teacher.model", name, name)
    if not spec.compares_distributions:
        return
    if spec.data.template is not None:
        own.chat_template = read_template(Path(spec.data.template))
    pair = TokenizerPair.of(own, other, spec.teacher.cross_tokenizer_loss, max_positions(name))
    if sources.parse(spec.data.files.get(TRAIN, spec.data.source)).kind == "hub":
        return  # checked when its rows are encoded
    tally: Counter[str] = Counter()
    rows = list(islice(data_rows(spec.data, TRAIN, limit=None), _CHECKED_ROWS))
    for _ in pair.documents(iter(rows), spec, tally):
        pass
    _require_spans(tally, spec)


def require_embeddings(setting: str, model: str, tokenizer: str, template: str | None = None) -> None:
    """Raise if tokens of texts have no embedding. A special token that no text has may have none: Gemma 3 has one for
    images. `template`: a file with the chat template, if it is not the tokenizer's own."""
    rows = embedding_rows(model)
    loaded = load_tokenizer(tokenizer)
    beyond = {number: word for word, number in loaded.get_vocab().items() if number >= rows}
    if not beyond:
        return
    text = template_of(loaded, None if template is None else read_template(Path(template))).text
    added = loaded.added_tokens_decoder
    is_used = {number for number in beyond if number not in added or str(added[number]) in text}
    if found := sorted(is_used | ({pad_id_of(loaded), require_end_id(loaded)} & beyond.keys())):
        raise ConfigError(
            f"{setting}={model} has embeddings for {rows:,} tokens, but the tokenizer {tokenizer} has ids up to "
            f"{found[-1]:,} ({beyond[found[-1]]})",
            "use the tokenizer of the model (data.tokenizer), or resize the embeddings of the model",
        )


def _why_same_needed(spec: CausalSpec) -> tuple[str, str] | None:
    """Why this run cannot use different tokenizers, and what to do; None: it can."""
    if spec.student.layers is not None or spec.student.teacher_embeddings:
        setting = "student.teacher_embeddings=false" if spec.student.teacher_embeddings else "student.layers=null"
        return "the student starts from the teacher's layers or embeddings, which belong to its ids", (
            f"set {setting}, or use a teacher and a student of one family"
        )
    if spec.pipeline == "on-policy" and spec.scores_on_server:
        return (
            "a teacher.server lists some tokens, but aligned spans need all probabilities",
            "use a teacher in this process: remove teacher.server",
        )
    if spec.teacher_phase == "logits" and spec.distill.teacher == "cached" and spec.distill.codec != "hidden":
        return (
            f"the codec {spec.distill.codec} stores part of the teacher's distribution, but aligned spans need all of "
            "it",
            "set distill.teacher=live, or distill.codec=hidden",
        )
    return None


def _require_spans(tally: Counter[str], spec: CausalSpec) -> None:
    if not tally["with text"]:  # the end of every document is aligned
        raise ConfigError(
            f"no text of {spec.data.source} can be aligned between {spec.tokenizer} and the teacher "
            f"{spec.teacher.model}: {tally['trained']:,} trained tokens, none of them in a span that both tokenizers "
            "cover by whole tokens",
            "check that both tokenizers encode this language and that both chat templates contain the answers; or "
            + _SAME,
        )


# two tokenizers


@dataclass(frozen=True, eq=False)
class TokenizerPair:
    """The student's and the teacher's tokenizer, and what their vocabularies have in common."""

    student: Any
    teacher: Any
    own: TokenBytes
    other: TokenBytes
    common: CommonVocabulary
    loss: CrossTokenizerLoss
    teacher_positions: int | None
    """Tokens that the teacher can read at most; None: no limit is known."""
    _on_device: dict[torch.device, CommonTokens] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        student: Any,
        teacher: Any,
        loss: CrossTokenizerLoss,
        teacher_positions: int | None = None,
        student_rows: int | None = None,
        teacher_rows: int | None = None,
    ) -> TokenizerPair:
        own, other = TokenBytes.of(student), TokenBytes.of(teacher)
        ends = ((end_of_turn(student), end_of_turn(teacher)), (student.eos_token_id, teacher.eos_token_id))
        known = [(int(one), int(two)) for one, two in ends if one is not None and two is not None]
        common = CommonVocabulary.of(own, other, known, student_rows, teacher_rows)
        return cls(student, teacher, own, other, common, loss, teacher_positions)

    def describe(self) -> str:
        how = {
            "gold": "exact on common tokens, by sorted probabilities on others (GOLD)",
            "uld": "by sorted probabilities (ULD)",
        }[self.loss]
        return (
            f"approximate: teacher and student have different tokenizers ({len(self.other.pieces):,} and "
            f"{len(self.own.pieces):,} tokens, {self.common.size:,} in common); their distributions are compared over "
            f"aligned spans of text, {how}"
        )

    def loss_name(self, name: str) -> str:
        """Of a loss whose last term compares with the teacher; ULD has no divergence."""
        *others, _ = name.split(" + ")
        return " + ".join([*others, "ULD"]) if self.loss == "uld" else f"{name}, approximate"

    # documents

    def documents(
        self, rows: Iterator[Row], spec: CausalSpec, tally: Counter[str]
    ) -> Iterator[tuple[EncodedDocument, EncodedDocument]]:
        """Student's and teacher's document of each row that the student is trained on. Where their distributions are
        compared, the teacher's ends with the last span, and spans are counted in `tally`."""
        last_only = spec.data.last_answer_only
        own, other = (template_of(one, last_answer_only=last_only) for one in (self.student, self.teacher))
        found = encoded_rows(self.student, own, rows, spec.data.max_tokens, Counter(), Counter())
        trained = ((row, document) for row, document in found if document.trained_count)
        while block := list(islice(trained, _BLOCK)):
            theirs = _encode_all(self.teacher, [row for row, _ in block], other, tally)
            for (_, document), whole in zip(block, theirs, strict=True):
                if not spec.compares_distributions:
                    yield document, whole.cut(self.teacher_positions)
                    continue
                spans = align(document, whole, self.own, self.other)
                # what follows the last span would be computed for nothing
                used = int(spans[-1, 3]) if len(spans) else 1 + int(np.argmax(whole.trained))
                cut = whole.cut(max(2, min(used, self.teacher_positions or used)))
                self.count(document, spans, tally)
                yield document, cut

    def count(self, document: EncodedDocument, spans: Ints, tally: Counter[str]) -> None:
        first, end, teacher_first, teacher_end = spans.T
        tally["trained"] += document.trained_count
        tally["aligned"] += int((end - first).sum())
        tally["spans"] += len(spans)
        tally["with text"] += int((~self.own.is_special[document.ids[first]]).sum())
        tally["one to one"] += int(((end - first == 1) & (teacher_end - teacher_first == 1)).sum())

    def completion(self, prompt: Prompt, ids: Sequence[int]) -> EncodedDocument:
        """The teacher's document of a completion that the student has written as these tokens."""
        text, finished = self.own.text(ids), bool(ids) and bool(self.own.is_special[ids[-1]])
        answer = answer_ids(self.teacher, prompt, text, finished)
        if text[:1] == " " and text[:2] != "  " and self.other.join(answer).startswith(b"  "):
            # the tokenizer adds a space before every text, and this one begins with its own
            answer = answer_ids(self.teacher, prompt, text[1:], finished)
        return EncodedDocument.answered(_encode_prompt(self.teacher, prompt), answer).cut(self.teacher_positions)

    # batches

    def batch(
        self, packed: PackedRows, rows: Rows, documents: Documents, tally: Counter[str] | None = None
    ) -> PairedBatch:
        """Rows of the student with the teacher's rows of the same documents, which have the same numbers."""
        batch = causal_batch(packed, rows)
        own_BT = _numbers(batch)
        found: list[tuple[int, int, EncodedDocument, Ints]] = []
        for place, number in enumerate(rows):
            offset = 0
            for source, start, length in packed.pieces_of(int(number)):
                assert start == 0, "a document is not longer than a row"
                document, theirs = packed.documents.document(source), documents.document(source)
                spans = align(document, theirs, self.own, self.other)
                if tally is not None:
                    self.count(document, spans, tally)
                found.append((place, offset, theirs, spans))
                offset += length
        # Documents without a span need no teacher; but a batch has at least one document with a token to score.
        used = [one for one in found if len(one[3])]
        if not used:
            place, offset, theirs, spans = found[0]
            used = [(place, offset, EncodedDocument(np.resize(theirs.ids, 2), np.array([False, True])), spans)]
        teacher, places = _packed(DocumentList([one[2] for one in used], documents.pad_id), packed.row_length)
        other_BT = _numbers(teacher)
        firsts: list[Ints] = []
        sizes: list[Ints] = []
        for (place, offset, _, spans), (row, first) in zip(used, places, strict=True):
            firsts.append(np.stack([own_BT[place, offset + spans[:, 0]], other_BT[row, first + spans[:, 2]]]))
            sizes.append(np.stack([spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]]))
        aligned = _batch_spans(np.concatenate(firsts, axis=1), np.concatenate(sizes, axis=1), batch.count)
        own = {name: getattr(batch, name) for name in CausalBatch.__dataclass_fields__}
        return PairedBatch(**own, teacher=teacher, spans=aligned)

    def targets(self, batch: CausalBatch, dense: DenseTargets) -> AlignedTargets:
        """Of a batch on its device; `dense` are the teacher's hidden states at its own trained tokens."""
        assert isinstance(batch, PairedBatch)
        device = dense.hidden_NE.device
        if device not in self._on_device:
            ids = (self.common.student_ids, self.common.teacher_ids, self.common.student_rest, self.common.teacher_rest)
            self._on_device[device] = CommonTokens(*(torch.from_numpy(one).to(device) for one in ids))
        common = self._on_device[device]
        _, ids_M = target_positions(batch.teacher.labels, batch.teacher.count)
        weight_WE = dense.head.projection(device, dense.hidden_NE.dtype).weight_VD[: common.teacher_words]
        return AlignedTargets(dense.hidden_NE, ids_M, weight_WE, batch.spans, common, self.loss)


def both_trained(
    own: Iterable[EncodedDocument], other: Iterable[EncodedDocument]
) -> tuple[Iterator[EncodedDocument], Iterator[EncodedDocument]]:
    """The documents that have trained tokens in both tokenizers, so that their numbers are equal."""
    pairs = [both for both in zip(own, other, strict=True) if all(one.trained_count for one in both)]
    return (one for one, _ in pairs), (one for _, one in pairs)


def _encode_all(tokenizer: Any, rows: list[Row], template: ChatTemplate, tally: Counter[str]) -> list[EncodedDocument]:
    """A conversation that the teacher's template refuses, for example one with a system turn, is written as ChatML."""
    try:
        return encode_rows(tokenizer, rows, template)
    except ConversationRefused:
        if len(rows) > 1:
            return [_encode_all(tokenizer, [row], template, tally)[0] for row in rows]
        tally["refused by the teacher's template"] += 1
        return encode_rows(tokenizer, rows, replace(template, text=CHATML))


def _encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Like documents, a prompt that the teacher's template refuses is written as ChatML."""
    try:
        return encode_prompt(tokenizer, prompt)
    except ConversationRefused:
        messages = as_messages(prompt)
        assert messages is not None  # a plain text has no template
        return encode_chat_prompt(tokenizer, messages, replace(template_of(tokenizer), text=CHATML))


def _numbers(batch: CausalBatch) -> Any:
    """[B, T]: number of each trained token among those of the batch."""
    trained_BT = (batch.labels != NOT_TRAINED).numpy()
    return trained_BT.cumsum().reshape(trained_BT.shape) - 1


def _packed(documents: DocumentList, row_length: int) -> tuple[CausalBatch, list[tuple[int, int]]]:
    """All documents in rows, and row and first token of each."""
    packed = pack(documents, max(row_length, int(documents.lengths.max())), seed=0)
    places: dict[int, tuple[int, int]] = {}
    for row in range(len(packed)):
        offset = 0
        for source, _, length in packed.pieces_of(row):
            places[source] = row, offset
            offset += length
    batch = causal_batch(packed, np.arange(len(packed), dtype=np.int64))
    return batch, [places[number] for number in range(len(documents))]


def _batch_spans(first_2G: Ints, size_2G: Ints, count: int) -> BatchSpans:
    """From the first token and the number of tokens of each span, of the student and of the teacher; `count`: trained
    tokens of the student."""
    rest, group = _other_tokens(first_2G[0], size_2G[0])
    inside = np.concatenate([first_2G[0], rest])
    order = np.concatenate([inside, np.setdiff1d(np.arange(count), inside)])
    arrays = order, group, first_2G[1], *_other_tokens(first_2G[1], size_2G[1])
    return BatchSpans(*map(torch.from_numpy, arrays))


def _other_tokens(first_G: Ints, size_G: Ints) -> tuple[Ints, Ints]:
    """The tokens of spans after their first ones, and the span of each."""
    group_R = np.repeat(np.arange(len(first_G)), size_G - 1)
    before_G = np.cumsum(size_G - 1) - (size_G - 1)
    return first_G[group_R] + np.arange(len(group_R)) - before_G[group_R] + 1, group_R


@dataclass(frozen=True, eq=False)
class PairedBatch(CausalBatch):
    """The student's rows with the teacher's rows of the same documents."""

    teacher: CausalBatch
    spans: BatchSpans

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> CausalBatch:
        own = super()._with_each(change)
        return replace(own, teacher=self.teacher._with_each(change), spans=BatchSpans(*map(change, self.spans)))  # type: ignore[call-arg]


def paired_batches(
    pair: TokenizerPair,
    packed: PackedRows,
    documents: Documents,
    batch_size: int,
    seed: int,
    complete: Callable[[PairedBatch], PairedBatch] = lambda batch: batch,
) -> ShuffledRows[CausalBatch]:
    """In the order of `training_batches`; `complete` adds what a cache knows of the teacher's rows."""
    every = np.arange(len(packed), dtype=np.int64)
    return ShuffledRows(every, batch_size, seed, lambda rows, draw: complete(pair.batch(packed, rows, documents)))


# in a run


def tokenizer_pair(context: CausalContext) -> TokenizerPair | None:
    """None if teacher and student have the same vocabulary."""
    if "pair" not in context.cross_tokenizer:
        own, other, teacher = context.tokenizer, context.teacher_tokenizer, context.spec.teacher
        pair = None
        if other is not own:
            limits = max_positions(teacher.model), context.compared_words, embedding_rows(teacher.model)
            pair = TokenizerPair.of(own, other, teacher.cross_tokenizer_loss, *limits)
        context.cross_tokenizer["pair"] = pair
    found: TokenizerPair | None = context.cross_tokenizer["pair"]
    return found


def teacher_data(context: CausalContext, data: Artifact) -> Artifact:
    """The data in the teacher's tokens: `data` itself, or other documents, with the same numbers where distributions
    are compared."""
    pair, spec = tokenizer_pair(context), context.spec
    if pair is None:
        return data
    if (data.folder / IN_TEACHERS_TOKENS).is_dir():
        return replace(data, folder=data.folder / IN_TEACHERS_TOKENS)
    template = template_of(context.teacher_tokenizer, last_answer_only=spec.data.last_answer_only)

    def work(folder: Path, stage: Stage) -> None:
        done = 0
        splits: tuple[Split, ...] = (TRAIN, TEST)
        for split in splits:
            tally: Counter[str] = Counter()

            def written(split: Split = split, tally: Counter[str] = tally) -> Iterator[EncodedDocument]:
                nonlocal done
                for _, document in pair.documents(split_rows(context, split), spec, tally):
                    done += 1
                    stage.count(samples=done)
                    context.run.stop.check()
                    yield document

            store = write_documents(
                folder / split, written(),
                vocab_size=vocab_size_of(context.teacher_tokenizer), pad_id=pad_id_of(context.teacher_tokenizer),
                tokenizer=spec.teacher.model, notes={"spans": tally},
            )  # fmt: skip
            if spec.compares_distributions:
                _require_spans(tally, spec)
                _require_same_numbers(context.documents(data, split), store)

    inputs = {
        "max_tokens": spec.data.max_tokens,
        **({} if spec.compares_distributions else {"spans": "none"}),
        "student_tokenizer": context.tokenizer_identity,
        **encoding_identity(context.teacher_tokenizer, template),
    }
    made = context.runner.make("teacher-data", STAGE, work, kind="documents", inputs=inputs, parents=[data.bill])
    if spec.compares_distributions:
        report_spans(context, pair, Counter(context.documents(made, TRAIN).attributes["spans"]), "the training data")
    elif "noted" not in context.cross_tokenizer:
        context.cross_tokenizer["noted"] = True
        context.run.note(f"teacher and student have different tokenizers. {_COMPARE_BYTES}")
    return made


def _require_same_numbers(own: DocumentStore, other: DocumentStore) -> None:
    if len(own) != len(other):
        raise ConfigError(
            f"the teacher's tokenizer gives {len(other):,} documents where the student's gives {len(own):,}",
            "a document of the teacher has no token to learn from: check its chat template",
        )


def report_spans(context: CausalContext, pair: TokenizerPair, tally: Counter[str], what: str) -> None:
    """The record says that the comparison is approximate, and how much of the text it covers."""
    report, trained = context.runner.report, max(1, tally["trained"])
    report("alignment.common_tokens", float(pair.common.size))
    report("alignment.token_share", tally["aligned"] / trained)
    report("alignment.one_to_one_share", tally["one to one"] / max(1, tally["spans"]))
    if "noted" not in context.cross_tokenizer:
        context.cross_tokenizer["noted"] = True
        aligned, single = 100 * tally["aligned"] / trained, 100 * tally["one to one"] / max(1, tally["spans"])
        refused = tally["refused by the teacher's template"]
        context.run.note(
            f"{pair.describe()}. Of {what}, {aligned:.1f} % of the trained tokens are in an aligned span, and "
            f"{single:.1f} % of the spans are one token of each. {_COMPARE_BYTES}"
        )
        if refused:
            context.run.note(f"the teacher's chat template refused {refused:,} conversations; it reads them as ChatML")


def teacher_rows(context: CausalContext, data: Artifact, split: Split) -> PackedRows:
    """The teacher's documents in rows. With another tokenizer no document is split, because a batch has whole ones."""
    if tokenizer_pair(context) is None:
        return context.rows(data, split)
    documents = context.documents(teacher_data(context, data), split)
    return pack(documents, max(context.spec.data.row_length, int(documents.lengths.max())), seed=0)


def teacher_tokenizer_identity(context: CausalContext) -> str:
    return tokenizer_sha256(context.teacher_tokenizer)


def cross_tokenizer_inputs(context: CausalContext) -> dict[str, str]:
    """For a student's key; empty with one tokenizer, so that keys of earlier versions do not change."""
    pair = tokenizer_pair(context)
    return {} if pair is None else {"cross_tokenizer_loss": pair.loss}
