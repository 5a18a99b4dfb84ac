import sys
from pathlib import Path

for neighbor in ("docs",):  # for documents.py, shared by the tests of this folder
    sys.path.insert(0, str(Path(__file__).parent.parent / neighbor))
