"""On-policy distillation: every k steps the student writes completions, the teacher scores their tokens, and the next k
steps train on them (GKD, Agarwal et al., 2024; MiniLLM, Gu et al., 2024).

    student.generate   a copy of the student gets its current weights and answers the prompts of the round
    teacher.score      the teacher reads these rows; its hidden states stay on the device
    student.train      k steps of a divergence per token against the teacher's distributions

Both stages suspend student.train, so that each has its own energy. The rows of a round are fixed by the seed, the
prompts and the weights at its start. Completions are kept on disk until the training ends: a run that is resumed in
the middle of a round trains on the tokens that the killed one had written, and one that a signal stopped while a round
was written or scored continues it.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from joulelab import clock
from joulelab.data.batches import BatchSource
from joulelab.data.chat.encoding import DocumentList, Documents, EncodedDocument, pad_id_of
from joulelab.data.chat.packing import (
    CausalBatch,
    PackedAttention,
    PackedRows,
    causal_batch,
    pack,
    training_batches,
)
from joulelab.distill.causal.cross_tokenizer import (
    SPAN_COUNTS,
    PairedBatch,
    paired_batches,
    report_spans,
    tokenizer_pair,
)
from joulelab.distill.causal.generators import (
    SERVER_KEY,
    TeacherSource,
    engine_identity,
    local_generator,
)
from joulelab.distill.causal.models import TRAIN, CausalContext, lm_head_weight
from joulelab.distill.causal.objective import StudentSetup, Targets, TokenObjective, TrainingData
from joulelab.distill.causal.server_teacher import ServerTeacher
from joulelab.distill.causal.teacher import live_teacher, refuse_unknown_energy, training_prompts
from joulelab.distill.logit_cache.kd_loss import KdLoss, target_positions
from joulelab.distill.logit_cache.teacher_outputs import LiveTeacher
from joulelab.distill.preferences.preference_loss import TargetLogProbabilities
from joulelab.errors import CorruptedFile, EndedBySignal, JoulelabError
from joulelab.infer.generation.completions import (
    Completion,
    GenerationProgress,
    Generator,
    Prompt,
    completion_key,
    encode_prompt,
    generate_into,
    read_completions,
)
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.server import server_energy_gap
from joulelab.infer.generation.settings import PADDED_PROMPTS, GenerationSettings
from joulelab.infer.generation.static_decoder import ENOUGH_ROWS
from joulelab.runs.artifacts import Artifact
from joulelab.runs.paths import read_json, write_json
from joulelab.train.budget import Budget, Position, require_energy_reading
from joulelab.train.checkpoint import matches_its_sum, save_summed
from joulelab.train.parallel import gathered
from joulelab.train.training_session import StageOpener

# Of the GPU's memory: a larger cache of the decoder is freed after every round.
_KEPT_CACHE_SHARE = 0.2

_IS_INTERRUPTED = "interrupted"
"""In the totals of a round: a signal stopped the run before it was complete. The totals are those before it."""

GENERATE, SCORE = ("student.generate", "student", "generate"), ("teacher.score", "teacher", "score")


def on_policy_data(
    context: CausalContext,
    teacher: TeacherSource,
    rows: PackedRows | None,
    setup: StudentSetup,
    teacher_data: Artifact | None = None,
) -> TrainingData:
    """Batches that the student writes during training; `rows` are those of `on_policy.other_data`, and `teacher_data`
    has their documents in the teacher's tokens."""
    spec, policy, pair = context.spec, context.spec.on_policy, tokenizer_pair(context)
    # Batches of the next round cannot be prepared ahead: they do not exist before its generation.
    setup = replace(setup, config=setup.config.model_copy(update={"prefetch": 0}))
    if spec.scores_on_server:
        scorer: LiveTeacher | ServerTeacher = _server_teacher(context)
    else:
        # With another tokenizer the number of the teacher's rows varies; each would be compiled separately.
        scorer = live_teacher(context, teacher, setup.config.compile if pair is None else "off")
    documents = None if teacher_data is None else context.documents(teacher_data, TRAIN)
    rollouts = Rollouts(context, setup, scorer, rows, documents)
    loss = KdLoss(0.0, policy.temperature, policy.divergence, spec.chunk, setup.config.compile, policy.beta)
    objective = TokenObjective(setup.model, setup.attention, loss, _scored_targets)
    context.run.note(_describe(context))
    name = policy.loss_name if pair is None else pair.loss_name(policy.loss_name)
    return TrainingData(rollouts, objective, name, setup.config, rollouts.using, rollouts.close)


def refuse_unmetered_server(context: CausalContext) -> None:
    """Before the first stage: energy that is not measured cannot count toward the budget."""
    spec = context.spec
    require_energy_reading(context.run, spec.training, energy_j=spec.budget.energy_j)  # sensors need a moment
    refuse_unknown_energy(spec, server_energy_gap(context.run.meter))


def _server_teacher(context: CausalContext) -> ServerTeacher:
    spec = context.spec
    teacher = ServerTeacher(
        str(spec.teacher.server), spec.teacher.model, spec.on_policy.listed_tokens, context.compared_words,
        spec.energy.gpus, os.environ.get(SERVER_KEY),
    )  # fmt: skip
    gap = teacher.energy_gap or server_energy_gap(context.run.meter)
    if gap:
        context.run.warn(f"{SCORE[0]}: {gap}")
        context.run.unmetered_work(SCORE[0], teacher.identity, gap)
        refuse_unknown_energy(spec, gap)
    return teacher


def _describe(context: CausalContext) -> str:
    policy = context.spec.on_policy
    name = {"forward": "forward KL", "reverse": "reverse KL", "jsd": f"generalized JSD with beta {policy.beta:g}"}
    every = "in every step" if policy.sync_every == 1 else f"every {policy.sync_every} steps"
    temperature = f" at temperature {policy.temperature:g}" if policy.temperature != 1 else ""
    pair = tokenizer_pair(context)
    loss = "sorted probabilities (ULD)" if pair is not None and pair.loss == "uld" else name[policy.divergence]
    others = {"data": "the training documents", "teacher": "the teacher's completions"}[policy.other_data]
    mixed = f", {100 - 100 * policy.student_share:g} % of the batches from {others}" if policy.student_share < 1 else ""
    how = "the projection of the teacher's hidden states to logits is part of student.train"
    if context.spec.scores_on_server:
        how = (
            f"{context.spec.teacher.server} lists {policy.listed_tokens} tokens per position, and the rest of the sum "
            "is estimated from the sampled token, without bias"
        )
    return f"on-policy distillation: {loss} per token{temperature}, weights synchronized {every}{mixed}; {how}"


@dataclass(frozen=True, eq=False)
class ScoredBatch(CausalBatch):
    """A batch on its device with the teacher's targets."""

    targets: Targets


def _scored_targets(batch: CausalBatch) -> Targets:
    assert isinstance(batch, ScoredBatch)
    return batch.targets


class StudentCopy:
    """A copy of the student for generation, without gradients and in the precision of its computation.

    A copy, because the trained model may be compiled or wrapped, and because decoding in float32 would take twice the
    memory traffic of bf16. Its tensors stay the same objects, so a decoder that refers to them never sees old weights.
    """

    def __init__(self, setup: StudentSetup, device: torch.device) -> None:
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16} if device.type == "cuda" else {}
        dtype = halves.get(setup.config.precision, torch.float32)
        # Each weight is cast while it is copied: a second model in float32 may not fit into memory.
        self._source = setup.model
        weights = list(setup.model.parameters())
        copies = {
            id(weight): nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False) for weight in weights
        }
        self.model: nn.Module = copy.deepcopy(setup.model, dict(copies)).eval()
        if setup.attention.by_bounds:
            self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        self._copies = [copies[id(weight)] for weight in weights]

    @torch.no_grad()
    def synchronize(self) -> None:
        """All ranks together: the weights of a sharded student are gathered, one at a time."""
        # Listed again: FSDP replaces the parameters of the model by shards after this copy was made.
        for copied, weight in zip(self._copies, self._source.parameters(), strict=True):
            copied.copy_(gathered(weight))

    @torch.no_grad()
    def log_probabilities(self, batch: CausalBatch, words: int, chunk: int) -> Tensor:
        """Of the trained tokens of a batch, in reading order: those with which they were sampled, up to rounding."""
        hidden_BTD = self.model(**PackedAttention(by_bounds=False).inputs(batch), hidden_only=True)
        order_N, targets_N = target_positions(batch.labels, batch.count)
        weight_VD = lm_head_weight(self.model)[:words]
        return TargetLogProbabilities(chunk)(hidden_BTD.flatten(0, 1)[order_N], weight_VD, targets_N)


@dataclass(frozen=True)
class _Request:
    """A prompt of a micro-batch, and the pass over all prompts that it belongs to: a prompt occurs once in a pass."""

    micro_batch: int
    prompt: Prompt
    number_of_pass: int


_Answers = list[tuple[_Request, list[Completion]]]


@dataclass(frozen=True)
class _Written:
    """What the student has written to a prompt."""

    prompt: Prompt
    answer: Completion


class Rollouts:
    """The batches of an on-policy training (a BatchSource), and the work that makes them (a StepPreparation)."""

    def __init__(
        self,
        context: CausalContext,
        setup: StudentSetup,
        teacher: LiveTeacher | ServerTeacher,
        rows: PackedRows | None,
        teacher_documents: Documents | None = None,
    ) -> None:
        spec, config = context.spec, setup.config
        self._pair = tokenizer_pair(context)
        self._context, self._config, self._teacher = context, config, teacher
        self._policy, self._ranks = spec.on_policy, context.runner.ranks
        self._copy = StudentCopy(setup, context.device)
        self._prompts = [prompt for prompt, _ in training_prompts(context)]
        self._others: BatchSource[CausalBatch] | None = None
        if rows is not None and self._pair is not None:
            assert teacher_documents is not None
            self._others = paired_batches(self._pair, rows, teacher_documents, config.batch_size, spec.seed)
        elif rows is not None:
            self._others = training_batches(rows, config.batch_size, spec.seed)
        # So many documents of the largest length fit into a row; best-fit packing never needs more rows than that.
        documents = config.batch_size * (spec.data.row_length // spec.generation.longest)
        self._prompts_per_batch = max(1, documents // spec.generation.answer.n)
        self._folder = context.run.paths.checkpoints / GENERATE[0]
        self._orders: dict[int, Sequence[int]] = {}
        self._before = [0]
        """How many of the first n micro-batches are the student's, by n."""
        self._round = -1
        self._synchronized = -1
        """The round in which the copy got the weights of the student."""
        self._generated: set[int] = set()
        """Micro-batches of this round that its weights at the start have written, as the present ones would."""
        self._continues = False
        """Whether this round has completions of an attempt that a signal stopped, which no total counts yet."""
        self._batches: dict[int, ScoredBatch] = {}
        self._generator: Generator | None = None
        counts = ("completions", "tokens", "truncated", "scored_rows", "scored_tokens", *SPAN_COUNTS)
        self._totals = dict.fromkeys(counts, 0)
        self._open: StageOpener | None = None
        self._paused: Callable[[], AbstractContextManager[object]] = nullcontext

    def using(self, opener: StageOpener) -> Rollouts:
        """Itself, with the stages of its training."""
        self._open = opener
        return self

    def close(self) -> None:
        """The training has ended. Its tokens are not needed any more once the student is saved."""
        self._batches.clear()
        self._generator = None
        ranks, folder = self._ranks, self._folder  # not `self`, with its models: saving needs memory

        def remove_completions() -> None:
            ranks.barrier()
            if ranks.is_first:
                shutil.rmtree(folder, ignore_errors=True)

        self._context.run.when_made(remove_completions)

    # batches

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one pass over the prompts, those with other data between them included."""
        return max(1, round(len(self._prompts) / (self._prompts_per_batch * self._policy.student_share)))

    def at(self, epoch: int, index: int) -> CausalBatch:
        return self._batches[epoch * self.batches_per_epoch + index]

    # rounds

    def is_due(self, position: Position) -> bool:
        return position.step // self._policy.sync_every != self._round

    def prepare(self, position: Position, paused: Callable[[], AbstractContextManager[object]]) -> None:
        self._paused = paused
        every, is_first = self._policy.sync_every, self._round < 0
        number, begun = position.step // every, position.step % every
        if is_first:
            self._restore(number, begun)
        self._round, self._batches, self._generated = number, {}, set()
        before = dict(self._totals)
        try:
            counted = is_first and begun > 0  # by the attempt before
            batches = self._batches_of_round(number, position, self._steps_left(position, every - begun), counted)
            log_mu = self._sampled_with(number, batches) if isinstance(self._teacher, ServerTeacher) else {}
            # The student's generation uses its budget, the teacher's work only if the settings say so, and only once.
            counts = self._context.spec.budget.counts_teacher and begun == 0
            with nullcontext() if counts else paused():
                self._score(batches, log_mu, repeats=begun > 0)
        except EndedBySignal:
            if begun == 0 and self._ranks.is_first:  # the checkpoint that follows has the weights of this round's start
                self._folder.mkdir(parents=True, exist_ok=True)
                write_json(self._totals_file(number), {**before, _IS_INTERRUPTED: True})
            raise
        self._continues = False
        if self._ranks.is_first:
            write_json(self._totals_file(number), dict(self._totals))
        self._report()

    def _steps_left(self, position: Position, of_round: int) -> int:
        """Steps of this round before the end of the training, where steps or epochs limit it."""
        budget = Budget(self._config, self.batches_per_epoch, self._config.accumulate * self._ranks.world)
        total = budget.total_steps(position)
        return of_round if total is None else max(1, min(of_round, total - position.step))

    def _batches_of_round(self, number: int, position: Position, steps: int, counted: bool) -> dict[int, CausalBatch]:
        """Of up to so many steps. Where a token budget may end in this round, the student writes it in parts: how many
        tokens a step trains on is known only then, and what is written beyond the end would be discarded."""
        limit, per_step = self._config.max_tokens, self._config.accumulate
        most = self._config.batch_size * self._context.spec.data.row_length * per_step * self._ranks.world
        batches: dict[int, CausalBatch] = {}
        tokens, done = float(position.tokens), 0
        while done < steps and (limit is None or tokens < limit):
            part = steps - done
            if limit is not None:
                # By the mean so far, or that of this round's parts if it is higher; at first by the most that fits.
                each = tokens / (position.step + done) if position.step + done else most
                each = max(each, (tokens - position.tokens) / done) if done else each
                part = min(part, math.ceil((limit - tokens) / each))
            places = range(done * per_step, (done + part) * per_step)
            found = self._micro_batches(
                number, [position.drawn + self._ranks.rank + self._ranks.world * place for place in places], counted
            )
            numbers = list(found)
            of_steps = [numbers[begin : begin + per_step] for begin in range(0, len(numbers), per_step)]
            sums = self._ranks.sum([float(sum(found[at].tokens for at in step)) for step in of_steps])
            for step, trained in zip(of_steps, sums, strict=True):
                if limit is None or tokens < limit:
                    batches |= {at: found[at] for at in step}
                    tokens += trained
            done += part
        return batches

    def _micro_batches(self, number: int, numbers: Sequence[int], counted: bool) -> dict[int, CausalBatch]:
        """`counted`: their spans were counted by an earlier attempt."""
        own = [at for at in numbers if self._others is None or self._is_students(at)]
        written, spans = self._completions(number, own), Counter[str]()
        found = {at: self._packed(written[at], spans) if at in written else self._other_batch(at) for at in numbers}
        if self._pair is not None and not counted:
            self._add(**{name: spans[name] for name in SPAN_COUNTS})
        return found

    def _restore(self, number: int, begun: int) -> None:
        """Counts of earlier attempts up to round `number`, of which `begun` steps are done. Later rounds were after the
        checkpoint: the training is repeated from there, and so is their generation."""
        totals = read_json(self._totals_file(number)) if self._totals_file(number).exists() else {}
        self._continues = begun == 0 and totals.pop(_IS_INTERRUPTED, False)
        last = number if begun or self._continues else number - 1
        if last < number:
            totals = read_json(self._totals_file(last)) if self._totals_file(last).exists() else {}
        self._totals.update(totals)
        if self._ranks.is_first:
            for path in self._folder.glob("round-*"):
                if int(path.stem.split("-")[1]) > last:
                    path.unlink()
        self._ranks.barrier()

    def _is_students(self, number: int) -> bool:
        """Drawn by seed and number alone, as resume and any number of ranks need it."""
        chance = np.random.default_rng([self._context.spec.seed, 1, number]).random()
        return bool(chance < self._policy.student_share)

    # student.generate

    def _completions(self, number: int, micro_batches: Sequence[int]) -> dict[int, list[_Written]]:
        """Prompts and completions of each of these micro-batches."""
        requests = [request for at in micro_batches for request in self._requests(at)]
        step = number * self._policy.sync_every
        identity = engine_identity(self._context.spec, f"{self._context.run.paths.run_id} at step {step}")
        by_pass: dict[int, list[_Request]] = {}
        for request in requests:
            by_pass.setdefault(request.number_of_pass, []).append(request)
        files = sorted(self._folder.glob(f"round-{number:06d}-*.jsonl"))
        known = read_completions(*files)
        written: dict[int, list[_Written]] = {at: [] for at in micro_batches}
        found, missing = _Answers(), list[tuple[GenerationSettings, list[_Request]]]()
        for number_of_pass, some in by_pass.items():
            settings, unknown = self._settings(number_of_pass), list[_Request]()
            for request in some:
                key = completion_key(identity, settings, request.prompt)
                if key in known:
                    found.append((request, known[key]))
                else:
                    unknown.append(request)
            missing += [(settings, unknown)] if unknown else []
        uncounted = found if self._continues else _Answers()
        # A rank whose completions are complete takes part: the others need its shard of the weights and its counts.
        if self._ranks.sum([float(bool(missing or uncounted))])[0]:
            found = found + self._generate(number, identity, missing, uncounted)
        for request, answers in found:
            written[request.micro_batch] += [_Written(request.prompt, answer) for answer in answers]
        return written

    def _requests(self, micro_batch: int) -> list[_Request]:
        first, count = self._students_before(micro_batch) * self._prompts_per_batch, self._prompts_per_batch
        found = []
        for place in range(first, first + count):
            number_of_pass, at = divmod(place, len(self._prompts))
            found.append(_Request(micro_batch, self._prompts[self._order(number_of_pass)[at]], number_of_pass))
        return found

    def _students_before(self, number: int) -> int:
        """Micro-batches of the student before this one: those with other data use no prompts."""
        if self._others is None:
            return number
        while len(self._before) <= number:
            self._before.append(self._before[-1] + self._is_students(len(self._before) - 1))
        return self._before[number]

    def _order(self, number_of_pass: int) -> Sequence[int]:
        """The prompts of a pass in random order."""
        if number_of_pass not in self._orders:
            random = np.random.default_rng([self._context.spec.seed, 2, number_of_pass])
            self._orders = {number_of_pass: random.permutation(len(self._prompts)).tolist()}
        return self._orders[number_of_pass]

    def _settings(self, number_of_pass: int) -> GenerationSettings:
        """Each pass samples with other random numbers."""
        answer = self._context.spec.generation.answer
        state = np.random.SeedSequence([self._context.spec.seed, answer.seed, number_of_pass]).generate_state(1)
        return answer.model_copy(update={"seed": int(state[0])})

    def _generate(
        self,
        number: int,
        identity: str,
        work: Sequence[tuple[GenerationSettings, list[_Request]]],
        uncounted: _Answers,
    ) -> _Answers:
        """Answers to the requests of `work`. `uncounted`: answers of an interrupted attempt, counted with them."""
        context, ranks = self._context, self._ranks
        assert self._open is not None
        path = self._folder / f"round-{number:06d}-{ranks.rank:04d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _Answers()
        self._return_memory()
        with self._open(*GENERATE) as stage:
            self._synchronize(number)

            def tick(progress: GenerationProgress) -> None:
                before = sum(len(answers) for _, answers in found)
                tokens = sum(len(one.ids) for _, answers in found for one in answers) + progress.generated_tokens
                context.run.progress.advance(
                    before + progress.answers, f"{self._totals['tokens'] + tokens:,} tokens so far"
                )
                if ranks.world == 1:  # other ranks would wait for this one
                    context.run.stop.check()

            for settings, requests in work:
                prompts = [request.prompt for request in requests]
                answers = generate_into(path, self._generator_for(settings, identity), prompts, tick)
                found += zip(requests, answers, strict=True)
            self._generated |= {request.micro_batch for request, _ in (*found, *uncounted)}
            every = [answer for _, answers in (*found, *uncounted) for answer in answers]
            if any(not answer.ids for answer in every):
                raise JoulelabError(
                    "the engine returned completions without their tokens, which on-policy trains on",
                    "use generation.engine=builtin",
                )
            truncated = sum(answer.finish_reason == "length" for answer in every)
            self._add(completions=len(every), tokens=sum(len(answer.ids) for answer in every), truncated=truncated)
            stage.count(samples=self._totals["completions"], tokens=self._totals["tokens"])
        self._release_large_decoder()
        self._return_memory()
        return found

    def _generator_for(self, settings: GenerationSettings, identity: str) -> Generator:
        """Its decoder lives as long as the training: compiling and capturing take longer than a round of generation,
        and captured steps read the weights of the copy, which are replaced in place."""
        if isinstance(self._generator, TransformersGenerator):
            self._generator = self._generator.renewed(settings.seed, identity)
        else:
            most = ENOUGH_ROWS if self._context.device.type == "cuda" else PADDED_PROMPTS
            batch = min(self._context.spec.generation.batch_size or most, self._prompts_per_round)
            self._generator = local_generator(
                self._context, self._copy.model, self._context.tokenizer, identity, settings, batch, self._prompts,
                self._passes, self._setup,
            )  # fmt: skip
        return self._generator

    @contextmanager
    def _setup(self, activity: str) -> Iterator[None]:
        """Of the generation; like all setup it does not use the budget."""
        with self._paused(), self._context.run.setup(activity):
            yield

    @property
    def _prompts_per_round(self) -> int:
        """Of this rank, at most."""
        return self._prompts_per_batch * self._config.accumulate * self._policy.sync_every

    @property
    def _passes(self) -> float:
        """How often this rank answers all prompts, as far as the budget says it; an energy budget alone does not."""
        budget, config = self._context.spec.budget, self._config
        if budget.tokens is None:
            return 1.0
        trained = budget.tokens * ((1 - budget.start_share) if self._context.spec.sft_first else 1)
        batches = trained / (config.batch_size * self._context.spec.data.row_length * self._ranks.world)
        return batches * self._policy.student_share * self._prompts_per_batch / len(self._prompts)

    def _release_large_decoder(self) -> None:
        """Training needs the memory of a large cache more than the next round needs its decoder."""
        generator = self._generator
        if self._context.device.type != "cuda" or not isinstance(generator, TransformersGenerator):
            return
        if generator.cache_bytes > _KEPT_CACHE_SHARE * torch.cuda.mem_get_info(self._context.device)[1]:
            generator.release_decoder()

    def _return_memory(self) -> None:
        """Training and the decoder take turns: what torch keeps for one is not free for the other's estimate."""
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()

    def _document(self, written: _Written) -> EncodedDocument:
        return EncodedDocument.answered(encode_prompt(self._context.tokenizer, written.prompt), written.answer.ids)

    def _synchronize(self, number: int) -> None:
        self._copy.synchronize()
        self._synchronized = number

    def _sampled_with(self, number: int, batches: Mapping[int, CausalBatch]) -> dict[int, Tensor]:
        """Log-probability of every token at the time of sampling. Kept on disk: after a resume the weights of the
        round's start are gone."""
        assert self._open is not None
        # Of all ranks: a run that is resumed on another number of them divides the micro-batches in another way.
        files = sorted(self._folder.glob(f"round-{number:06d}-*.pt"))
        kept: dict[int, Tensor] = {}
        for path in files:
            if not matches_its_sum(path):
                raise CorruptedFile(
                    f"{path} is corrupted: it has the probabilities that the answers of round {number} were sampled "
                    "with",
                    "delete it and resume: the resumed weights give other probabilities for the rest of this round",
                )
            kept |= torch.load(path, weights_only=True)
        missing = {at: batch for at, batch in batches.items() if at not in kept}
        if not self._ranks.sum([float(bool(missing))])[0]:
            return kept
        words, chunk = self._context.compared_words, self._context.spec.chunk
        with self._open(*GENERATE):
            if self._synchronized != number:
                self._synchronize(number)
            if not missing.keys() <= self._generated:
                self._context.run.warn(
                    f"round {number}: the probabilities that its answers were sampled with are missing; those of the "
                    "resumed weights replace them, so the estimate for the rest of this round is biased"
                )
            for at, batch in missing.items():
                kept[at] = self._copy.log_probabilities(batch.to(self._context.device), words, chunk).cpu()
        name = f"round-{number:06d}-{self._ranks.rank:04d}"
        if missing:
            saved = save_summed(kept, self._folder, name)  # with what other ranks may need after another resume
            for path in files:
                if path.name.startswith(name) and path != saved:
                    path.unlink()
        return kept

    # rows

    def _packed(self, written: list[_Written], spans: Counter[str]) -> CausalBatch:
        """`spans`: where the tokens and spans of the completions are counted, if the teacher has another tokenizer."""
        context = self._context
        documents = DocumentList([self._document(one) for one in written], pad_id_of(context.tokenizer))
        packed = pack(documents, context.spec.data.row_length, seed=0)
        rows = len(packed)
        if self._config.compile != "off":
            # Every number of rows would be compiled separately; rows without a document fill the batch.
            rows = self._config.batch_size
            last = np.full(rows - len(packed), packed.first_pieces[-1])
            packed = replace(packed, first_pieces=np.concatenate([packed.first_pieces, last]))
        every = np.arange(rows, dtype=np.int64)
        if self._pair is None:
            return causal_batch(packed, every)
        theirs = [self._pair.completion(one.prompt, one.answer.ids) for one in written]
        return self._pair.batch(packed, every, DocumentList(theirs, pad_id_of(context.teacher_tokenizer)), spans)

    def _other_batch(self, number: int) -> CausalBatch:
        assert self._others is not None
        return self._others.at(*divmod(number, self._others.batches_per_epoch))

    # teacher.score

    def _score(self, batches: Mapping[int, CausalBatch], log_mu: Mapping[int, Tensor], repeats: bool) -> None:
        """`repeats`: the round was scored before the run was interrupted, so this is the start-up of its resume."""
        context = self._context
        assert self._open is not None
        with self._open(*SCORE) as stage:
            begin_ns, scored = clock.now().mono_ns, list[CausalBatch]()
            try:
                for number, batch in batches.items():
                    moved = batch.to(context.device)
                    own = {field.name: getattr(moved, field.name) for field in fields(CausalBatch)}
                    scored.append(moved)
                    if isinstance(self._teacher, ServerTeacher):
                        stop = context.run.stop.check if self._ranks.world == 1 else lambda: None
                        targets: Targets = self._teacher.targets(batch, log_mu[number], context.device, stop)
                    elif isinstance(moved, PairedBatch):
                        assert self._pair is not None
                        scored[-1] = moved.teacher
                        targets = self._pair.targets(moved, self._teacher.targets(moved.teacher))
                    else:
                        targets = self._teacher.targets(moved)
                    self._batches[number] = ScoredBatch(**own, targets=targets)
                    context.run.progress.advance(len(self._batches))
            except EndedBySignal:  # the scores so far are lost
                context.run.note_setup("load", begin_ns, clock.now().mono_ns)
                raise
            if context.device.type == "cuda":
                torch.cuda.synchronize(context.device)  # queued work belongs to this stage
            if repeats:
                context.run.note_setup("load", begin_ns, clock.now().mono_ns)
            else:
                rows, tokens = sum(one.samples for one in scored), sum(one.tokens for one in scored)
                self._add(scored_rows=rows, scored_tokens=tokens)
            stage.count(samples=self._totals["scored_rows"], tokens=self._totals["scored_tokens"])

    # counts

    def _add(self, **counts: int) -> None:
        """Counts of all ranks."""
        sums = self._ranks.sum([float(value) for value in counts.values()])
        for name, value in zip(counts, sums, strict=True):
            self._totals[name] += int(value)

    def _totals_file(self, number: int) -> Path:
        return self._folder / f"round-{number:06d}.json"

    def _report(self) -> None:
        totals, report = self._totals, self._context.runner.report
        count = max(1, totals["completions"])
        report("student.generate.generated_tokens", float(totals["tokens"]))
        report("student.generate.completions", float(totals["completions"]))
        report("student.generate.tokens_per_completion", totals["tokens"] / count)
        report("student.generate.truncated_share", totals["truncated"] / count)
        report("teacher.score.tokens", float(totals["scored_tokens"]))
        if self._pair is not None and totals["trained"]:
            spans = Counter({name: totals[name] for name in SPAN_COUNTS})
            report_spans(self._context, self._pair, spans, "the student's completions")
