import sys
from pathlib import Path

for neighbor in ("cli", "distill"):  # for perceptron.py, and for tiny_reviews.py next door
    sys.path.insert(0, str(Path(__file__).parent.parent / neighbor))
