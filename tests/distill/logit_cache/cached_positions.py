"""A cache of a few positions from given logits, written to disk and read back."""

import numpy as np
import torch
from torch import nn

from joulelab.distill.logit_cache.cache_store import CacheWriter, LogitCache
from joulelab.distill.logit_cache.codecs import CacheManifest
from joulelab.distill.logit_cache.kd_loss import KdLoss
from joulelab.distill.logit_cache.target_encoding import document_key, encode_targets, select_targets


def make_manifest(codec="rs50", temperature=1.0, vocabulary=300, **more):
    names = {"teacher": "a teacher", "teacher_sha256": "ab", "tokenizer_sha256": "cd"}
    return CacheManifest(codec=codec, temperature=temperature, vocabulary=vocabulary, **names, **more)


def evenly_spread(count):
    """Instead of random numbers: an average over these is an integral, to within 1 / count."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def encoded(manifest, logits_NV, starts_N, targets):
    picked = select_targets(manifest.codec_spec, logits_NV, manifest.vocabulary, manifest.temperature, starts_N)
    arrays = {name: tensor.numpy() for name, tensor in picked.items()}
    return encode_targets(manifest.codec_spec, arrays, manifest.layout.record_bytes, targets)


def cached(folder, manifest, logits_NV, starts_N=None):
    """The positions of one piece; as many ids, and one more before them."""
    starts_N = evenly_spread(len(logits_NV)) if starts_N is None else starts_N
    key = document_key(np.arange(len(logits_NV) + 1))
    with CacheWriter(folder, manifest) as writer:
        writer.add([key], encoded(manifest, logits_NV, starts_N, [len(logits_NV)]))
    return LogitCache.open(folder).targets([key])


def against(targets, student_NV, labels_N, alpha=0.0, temperature=1.0, **more):
    """Sums, and the gradient by the student's logits: its head is the identity, and so its features are its logits."""
    words = student_NV.shape[1]
    features = nn.functional.pad(student_NV, (0, 0, 0, 1)).clone().requires_grad_()
    labels = torch.cat([torch.tensor([-100]), labels_N])[None]
    sums = KdLoss(alpha, temperature, **more)(features[None], torch.eye(words), targets, labels)
    sums.loss.backward()
    return sums, features.grad[:-1]
