"""Train a small digit classifier with plain PyTorch. The script does not know that it is measured.

joulelab measure -- python train_pytorch.py --epochs 3
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

CLASSES, PIXELS = 10, 8 * 8


def make_digits(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy copies of ten random patterns, with the number of the pattern as label."""
    patterns = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return patterns[labels] + 2.0 * torch.randn(count, PIXELS, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small digit classifier.")
    parser.add_argument("--epochs", type=int, default=3, help="Passes over the training data.")
    parser.add_argument("--samples", type=int, default=20_000, help="Number of training samples.")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    inputs, labels = make_digits(arguments.samples, generator)
    test_inputs, test_labels = make_digits(2_000, generator)
    model = nn.Sequential(nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, CLASSES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(arguments.epochs):
        for batch in torch.randperm(len(inputs), generator=generator).split(128):
            loss = nn.functional.cross_entropy(model(inputs[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            correct = model(test_inputs.to(device)).argmax(dim=1).cpu() == test_labels
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {correct.float().mean():.3f}")


if __name__ == "__main__":
    main()
