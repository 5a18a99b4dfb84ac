"""A judge of answers, and an engine that generates them."""

from joulelab.infer.generation.completions import Completion


def prefer_longest(prompt, answers, expected):
    return [float(len(answer)) for answer in answers]


class EchoEngine:
    """Answers with the tokens of the prompt, the n-th answer with one more of them. An engine for use would call the
    model."""

    energy_gap = None

    def __init__(self, model, tokenizer, settings, *, identity, batch_size):
        self.settings, self.identity, self.prompts_at_once = settings, identity, batch_size
        self._tokenizer = tokenizer

    def generate(self, prompts):
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            words = text.split()
            yield [self._completion(" ".join([*words, *words[:more]])) for more in range(self.settings.n)]

    def _completion(self, text):
        ids = tuple(self._tokenizer(text)["input_ids"])
        return Completion(text, (*ids, self._tokenizer.eos_token_id), "stop", len(ids) + 1)
