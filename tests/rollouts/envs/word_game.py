import json
from pathlib import Path

import nltk
import verifiers as vf

WORDS = ["bread", "crane", "house", "plant", "stone", "table"]


def write_words(folder: Path) -> None:
    """Write NLTK's files for TextArena's Wordle: a list of words, and a tagger that only knows these words."""
    words, tagger = folder / "corpora/words", folder / "taggers/averaged_perceptron_tagger_eng"
    for folder_of_files in (words, tagger):
        folder_of_files.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(WORDS))
    for name, value in (("weights", {}), ("tagdict", dict.fromkeys(WORDS, "NN")), ("classes", ["NN"])):
        (tagger / f"{tagger.name}.{name}.json").write_text(json.dumps(value))


def load_environment(folder):
    nltk.data.path.insert(0, folder)
    parser = vf.XMLParser(["guess"], answer_field="guess")

    def found(completion, answer):
        return float(parser.parse_answer(completion) == f"[{answer}]")

    def green(completion):
        return parser.get_user_messages(completion)[-1]["content"].count("G ") / 10

    rubric = vf.Rubric(funcs=[found, green], parser=parser)
    feedback = lambda text: text.rpartition("[GAME]")[2]  # noqa: E731
    return vf.TextArenaEnv(game="Wordle-v0", num_train_examples=8, parser=parser, rubric=rubric, feedback_fn=feedback)
