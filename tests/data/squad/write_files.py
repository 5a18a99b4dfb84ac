"""Writes v1.json and v2.json beside it: paragraphs of our own in SQuAD's format, with the answers' places counted here.

    python tests/data/squad/write_files.py

The texts were written for these tests. They hold what tends to go wrong: letters outside ASCII before an answer, an
answer that occurs twice, several marked answers, numbers with a unit glued on, and a paragraph of several windows.
"""

import json
from pathlib import Path

KITE = (
    "The kite festival of Sønderby began in 1987, when the baker Åse Lind tied 12 kites to her shop. Today about 900 "
    "kites fly over the beach every June. The largest one, a red whale of 40m, was sewn by Åse Lind and her brother."
)
BRIDGE = (
    "Old Mill Bridge crosses the Tarn near the village of Hollin. It was built of oak in 1742 and rebuilt of stone in "
    "1803, after a flood had carried the first bridge away. A toll of two pennies was asked of every cart until 1851. "
    "The keeper of the bridge lived in a round house on the north bank, which is a museum now. Its oldest piece is a "
    "brass bell: the keeper rang the bell when the river rose. In the summer of 1911 the river fell so low that "
    "children walked across it, and a photograph of them hangs in the museum. The bridge was closed to cars in 1998."
)

# (id, question, marked answers with which occurrence of the text is meant)
ON_KITE = [
    ("kite-1", "When did the festival begin?", [("1987", 0), ("in 1987", 0)]),
    ("kite-2", "Who sewed the largest kite?", [("Åse Lind and her brother", 0), ("Åse Lind", 1)]),
    ("kite-3", "How many kites fly today?", [("about 900", 0), ("900", 0)]),
    ("kite-4", "How long is the whale?", [("40m", 0)]),
]
ON_BRIDGE = [
    ("bridge-1", "Which river does Old Mill Bridge cross?", [("the Tarn", 0), ("Tarn", 0)]),
    ("bridge-2", "What is the museum's oldest piece?", [("a brass bell", 0), ("brass bell", 0)]),
    ("bridge-3", "When was the bridge closed to cars?", [("1998", 0)]),
    ("bridge-4", "What was rung when the river rose?", [("the bell", 0), ("bell", 1)]),
]
UNTOLD = [
    ("kite-5", "What color was the baker's shop?", []),
    ("bridge-5", "Who built the stone bridge?", []),
]


def entry(context: str, identity: str, question: str, answers: list, version_2: bool) -> dict:
    marked = [{"text": text, "answer_start": place(context, text, number)} for text, number in answers]
    made = {"id": identity, "question": question, "answers": marked}
    return {**made, "is_impossible": not marked} if version_2 else made


def place(context: str, text: str, number: int) -> int:
    start = -1
    for _ in range(number + 1):
        start = context.index(text, start + 1)
    return start


def document(version_2: bool) -> dict:
    articles = []
    for title, context, requested in (("Sønderby", KITE, ON_KITE), ("Old Mill Bridge", BRIDGE, ON_BRIDGE)):
        untold = [row for row in UNTOLD if version_2 and row[0].split("-")[0] == requested[0][0].split("-")[0]]
        questions = [entry(context, *row, version_2) for row in (*requested, *untold)]
        articles.append({"title": title, "paragraphs": [{"context": context, "qas": questions}]})
    return {"version": "v2.0" if version_2 else "1.1", "data": articles}


if __name__ == "__main__":
    for name, version_2 in (("v1.json", False), ("v2.json", True)):
        text = json.dumps(document(version_2), indent=1, ensure_ascii=False)
        (Path(__file__).parent / name).write_text(text + "\n", encoding="utf-8")
