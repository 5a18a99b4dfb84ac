"""Speech to text and answers about images: what is trained, what is heard and seen, and recordings of the user's."""

import json
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from joulelab.data.synthetic import COLORS, NOISE, SyntheticImageText, paint_fields, speak, spectrum
from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.objective import prepare
from joulelab.zoo.registry import WorkloadRequest, find_model
from joulelab.zoo.tasks.image_text import answer_loss, interleave
from joulelab.zoo.tasks.speech_to_text import transcription_loss


def tiny(name, **requested):
    return prepare(WorkloadRequest(find_model(name), size_name="tiny", **requested))


def first(workload):
    return workload.batches.at(0, 0).to(torch.device("cpu"))


def test_llava_trains_the_answer_and_nothing_before_it():
    workload = tiny("llava")
    batch = first(workload)
    whole = workload.model(input_ids=batch["input_ids"], pixel_values=batch["pixels"], use_cache=False).logits
    answers = batch["answers"]
    # the token after each of the last positions, the last of which is followed by the end of the answer
    following = torch.cat([batch["input_ids"][:, 1:], answers[:, -1:]], dim=1)
    assert torch.equal(following[:, -answers.shape[1] :], answers)
    expected = torch.nn.functional.cross_entropy(
        whole[:, -answers.shape[1] :].flatten(0, 1), answers.flatten(), reduction="sum"
    )
    output = answer_loss(workload.model, batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert output.count == answers.numel()


def test_the_prompt_holds_as_many_image_tokens_as_the_image_has_patches():
    workload = tiny("llava")
    batch, config = first(workload), workload.model.config
    patches = (56 // config.vision_config.patch_size) ** 2
    assert ((batch["input_ids"] == config.image_token_index).sum(1) == patches).all()
    assert not (batch["answers"] == config.image_token_index).any()


def test_the_answer_ends_the_sequence_and_its_last_token_is_only_a_target():
    ids = interleave(np.array([1, 2, 3]), np.array([9, 9]), np.array([[5, 6, 7], [7, 6, 5]]))
    assert ids.tolist() == [[1, 9, 9, 2, 3, 5, 6], [1, 9, 9, 2, 3, 7, 6]]


def test_the_answer_can_be_read_off_the_image():
    source = SyntheticImageText(range(10, 100), prompt_tokens=4, answer_tokens=8, seed=0)
    colors = source.colors(np.arange(5))
    pixels = paint_fields({"colors": torch.from_numpy(colors)}, side=30, seed=1)["pixels"]
    assert pixels.shape == (5, 3, 30, 30)
    means = torch.nn.functional.adaptive_avg_pool2d(pixels, 3).flatten(2)  # 3 x 3 fields hold 8 answers
    seen = ((means > 0).long() * torch.tensor([1, 2, 4])[:, None]).sum(1).numpy()
    assert np.array_equal(seen, colors)
    assert np.array_equal(source.names[seen[:, :8]], source.answers(colors))
    assert len(set(source.names.tolist()) | set(source.prompt.tolist())) == COLORS + 4


def test_the_image_decides_the_loss():
    workload = tiny("llava")
    batch = first(workload)
    blind = type(batch)(
        {**batch.tensors, "pixels": torch.zeros_like(batch["pixels"])}, batch.samples, count=batch.count
    )
    assert answer_loss(workload.model, batch).loss_sum != answer_loss(workload.model, blind).loss_sum


def test_a_size_may_keep_its_weights_in_bf16():
    entry = find_model("llava")
    kept = entry.sizes["7b-bf16"].settings["dtype"]
    size = replace(entry.sizes["tiny"], settings={**entry.sizes["tiny"].settings, "dtype": kept})
    workload = prepare(WorkloadRequest(replace(entry, sizes={"tiny": size})))
    output = answer_loss(workload.model, first(workload))
    output.loss_sum.backward()
    assert output.loss_sum.dtype == torch.float32 and output.loss_sum.isfinite()
    assert {p.dtype for p in workload.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in tiny("llava").model.parameters()} == {torch.float32}


def test_every_token_sounds_in_its_own_slot():
    targets = torch.tensor([[11, 400, 37], [37, 37, 11]])
    heard = speak({"targets": targets}, mels=80, frames=64, seed=3)["features"]
    assert heard.shape == (2, 80, 64)
    slots = heard[:, :, :63].unflatten(2, (3, 21)).mean(-1)
    assert (slots - spectrum(targets, 80)).abs().max() < 6 * NOISE / 21**0.5
    assert (spectrum(torch.tensor([[11]]), 80) - spectrum(torch.tensor([[400]]), 80)).abs().max() > 0.5
    again = speak({"targets": targets}, mels=80, frames=64, seed=3)["features"]
    assert torch.equal(heard, again)


def test_whisper_is_trained_on_every_target_and_sees_only_those_before():
    workload = tiny("whisper")
    batch = first(workload)
    targets, start_id = batch["targets"], workload.model.config.decoder_start_token_id
    assert torch.equal(batch["decoder_input_ids"][:, 1:], targets[:, :-1])
    assert (batch["decoder_input_ids"][:, 0] == start_id).all()
    assert transcription_loss(workload.model, batch).count == targets.numel()


@pytest.mark.parametrize(
    ("shape", "reported"),
    [({"tokens": 65}, "64 positions for text; 65 tokens"), ({"frames": 6}, "8 tokens do not fit into 6 frames")],
)
def test_a_shape_that_does_not_fit_is_refused(shape, reported):
    with pytest.raises(ConfigError, match=reported):
        tiny("whisper", requested_shape=shape)


def write_wav(path, seconds, rate_hz=16_000):
    samples = (3000 * np.sin(np.arange(int(seconds * rate_hz)) / 10)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(samples.tobytes())


def recordings(folder, texts, rate_hz=16_000):
    for number in range(len(texts)):
        write_wav(folder / f"{number}.wav", 0.3 + 0.1 * number, rate_hz)
    lines = [json.dumps({"audio": f"{number}.wav", "text": text}) for number, text in enumerate(texts)]
    (folder / "clips.jsonl").write_text("\n".join(lines))
    return str(folder / "clips.jsonl")


def test_recordings_train_on_their_texts_and_on_where_these_end(tmp_path):
    manifest = recordings(tmp_path, ["yes", "no", "maybe"])
    workload = tiny("whisper", dataset=manifest, requested_shape={"frames": 100}, batch_size=2)
    batch = first(workload)
    end_id = workload.model.config.eos_token_id
    assert batch["features"].shape == (2, 80, 100)
    trained = [[token for token in row if token != -100] for row in batch["targets"].tolist()]
    assert sorted(len(row) for row in trained) == [3, 4] and all(row[-1] == end_id for row in trained)
    assert batch.count == 7
    assert transcription_loss(workload.model, batch).loss_sum.isfinite()
    assert "bytes" in workload.notes[0]


def test_recordings_that_cannot_be_used_are_refused_with_the_way_out(tmp_path):
    manifest = recordings(tmp_path, ["yes", "no"], rate_hz=8_000)
    workload = tiny("whisper", dataset=manifest, requested_shape={"frames": 100})
    with pytest.raises(ConfigError, match="has 8000 Hz") as caught:
        first(workload)
    assert "ffmpeg" in caught.value.hint
    (tmp_path / "0.wav").unlink()
    with pytest.raises(NotFoundError, match=r"there is no file .*0\.wav"):
        first(workload)
    long = recordings(tmp_path, ["a text of many words", "no"])
    with pytest.raises(ConfigError, match="has 21 tokens; 8 are allowed"):
        tiny("whisper", dataset=long, requested_shape={"frames": 100})


def questions(folder, rows, name="questions.jsonl"):
    lines = []
    for number, (question, answer) in enumerate(rows):
        Image.new("RGB", (60 + number, 80), (40 * number, 90, 10)).save(folder / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "question": question, "answer": answer}))
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def test_questions_of_the_users_train_on_their_answers_alone(tmp_path):
    table = questions(tmp_path, [("red?", "no"), ("blue?", "yes"), ("?", "a")])
    workload = tiny("llava", dataset=table, batch_size=2)
    batch = first(workload)
    trained = [[token for token in row if token != -100] for row in batch["answers"].tolist()]
    end_id = workload.model.config.text_config.eos_token_id
    assert all(row[-1] == end_id for row in trained) and batch.count == sum(map(len, trained))
    assert (batch["input_ids"] == 319).sum().item() == 2 * 16
    assert batch["pixels"].shape == (2, 3, 56, 56)
    assert "bytes" in workload.notes[0]


def test_padding_in_front_of_a_question_changes_nothing(tmp_path):
    table = questions(tmp_path, [("red?", "no"), ("blueish?", "yes it is"), ("?", "a")])
    together = tiny("llava", dataset=table, batch_size=2, requested_shape={"prompt": 12, "answer": 12})
    batch = first(together)
    whole = answer_loss(together.model, batch).loss_sum
    alone = 0.0
    for place in range(2):
        seen = batch["attention_mask"][place].bool()
        output_text = batch["answers"][place] != -100
        row = {
            "input_ids": batch["input_ids"][place, seen][None],
            "answers": batch["answers"][place, output_text][None],
            "pixels": batch["pixels"][place][None],
        }
        alone += answer_loss(together.model, type(batch)(row, 1, count=int(output_text.sum()))).loss_sum
    assert torch.allclose(whole, alone, rtol=1e-5)


def test_questions_that_cannot_be_used_are_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="has 26 tokens; 7 are allowed") as caught:
        tiny("llava", dataset=questions(tmp_path, [("what is there in the image", "a"), ("?", "b")]))
    assert "prompt=27" in caught.value.hint
    table = questions(tmp_path, [("a?", "b"), ("b?", "c")])
    (tmp_path / "1.png").unlink()
    with pytest.raises(NotFoundError, match=r"there is no file .*1\.png"):
        tiny("llava", dataset=table)
