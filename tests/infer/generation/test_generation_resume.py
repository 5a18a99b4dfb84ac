"""A generation that was killed goes on, says the same words, and pays for nothing twice."""

import json

import pytest
from tiny_lm import make_model, make_tokenizer

from joulelab.infer.generation.completions import generate_into, read_completions
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings

PROMPTS = [f"w{k} w{k + 1} w{2 * k}" + " w3" * (k % 4) for k in range(9)]
SETTINGS = GenerationSettings(max_new_tokens=6, do_sample=True, n=2, seed=1)


class Counting(TransformersGenerator):
    """Counts what it is asked, and dies where it is told to."""

    requested = 0
    dies_after = None

    def generate(self, prompts):
        for answers in super().generate(prompts):
            if self.requested == self.dies_after:
                raise KeyboardInterrupt
            self.requested += 1
            yield answers


@pytest.fixture(scope="module")
def parts():
    return make_model(), make_tokenizer()


def make(parts, **settings):
    return Counting(*parts, SETTINGS.model_copy(update=settings), identity="tiny", batch_size=2)


def test_a_killed_generation_resumes_with_the_same_text(parts, tmp_path):
    whole = generate_into(tmp_path / "whole.jsonl", make(parts), PROMPTS)
    killed = make(parts)
    killed.dies_after = 5
    with pytest.raises(KeyboardInterrupt):
        generate_into(tmp_path / "killed.jsonl", killed, PROMPTS)
    with (tmp_path / "killed.jsonl").open("a") as file:
        file.write('{"key": "torn')  # a line the kill cut off
    resumed, seen = make(parts), []
    assert generate_into(tmp_path / "killed.jsonl", resumed, PROMPTS, seen.append) == whole
    assert resumed.requested == 5, "four prompts in two whole batches were there; the broken batch is made again"
    assert (seen[0].prompts, seen[-1].prompts) == (5, 9)
    assert seen[-1].generated_tokens == sum(one.tokens for some in whole for one in some)
    assert seen[-1].prompt_tokens == sum(len(prompt.split()) for prompt in PROMPTS)


def test_answers_are_found_by_content_and_not_by_place(parts, tmp_path):
    file = tmp_path / "answers.jsonl"
    first = generate_into(file, make(parts), PROMPTS)
    again = make(parts)
    assert generate_into(file, again, [*reversed(PROMPTS), PROMPTS[0]]) == [*reversed(first), first[0]]
    assert again.requested == 0
    other = make(parts, seed=2)
    generate_into(file, other, PROMPTS[:2])
    assert other.requested == 2, "another seed is another question"


def test_lines_are_only_ever_added(parts, tmp_path):
    file = tmp_path / "answers.jsonl"
    generate_into(file, make(parts), PROMPTS[:3])
    before = file.read_text()
    generate_into(file, make(parts), PROMPTS)
    assert file.read_text().startswith(before)
    assert len(read_completions(file)) == len(PROMPTS)
    assert {"key", "prompt", "answers"} == set(json.loads(before.splitlines()[0]))
