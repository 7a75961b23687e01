"""Translation of lines: order, promptness, what is refused, what is cut, a line in chunks."""

import io
import os
import queue
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding import translate
from m4.eval.decoding.decode import Batch, BatchCounts, Translations
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.settings import Decoding
from m4.eval.decoding.translate import Line, Translator
from m4.model.transformer import Transformer
from m4.storage.checkpoints import Checkpoints
from tests.shared import small_model


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.model"
    texts = ["ola mundo", "hello world", "bo día", "good day", "o mundo", "the world"] * 3
    vocabulary.train(path, texts, 320, ["en", "gl", "sr_Latn"])
    return Vocabulary(path)


class Louder:
    """Stand-in for `translations` that returns capitals without tags, and notes what came together.

    The first source has no end.
    """

    def __init__(self):
        self.calls = []

    def __call__(self, trained, sources, *, on_cut, on_batch, **options):
        self.calls.append(sources)
        longest = trained.decoding.max_source_length
        for index, source in enumerate(sources):
            if len(source.split()) >= longest:
                on_cut(index, len(source.split()) + 1, longest)
            best_BT = np.full((2, 3), 5 if index == 0 else 1)
            on_batch(Batch([index], np.ones((2, 4), np.int32)), best_BT)
        return [Translations([source.partition(" ")[2].upper()], [-1.0]) for source in sources]


@pytest.fixture
def louder(monkeypatch):
    louder = Louder()
    monkeypatch.setattr(translate, "translations", louder)
    return louder


@pytest.fixture
def translator(pieces):
    return Translator(Transformer(vocab_size=pieces.size), {}, pieces, batch_rows=2)


def texts(translator, lines, to):
    return [each.texts[0] for each in translator.candidates(lines, to)]


def test_order_empty_lines_and_tags(translator, louder):
    assert texts(translator, ["ola", "", " \t", "mundo"], "en") == ["OLA", "", "", "MUNDO"]
    assert louder.calls == [["<2en> ola", "<2en> mundo"]]


@pytest.mark.parametrize(
    ("to", "hint"), [("galician", "gl"), ("sr-Latn", "sr_Latn"), ("eng", "en")]
)
def test_an_unknown_language_gets_a_hint(to, hint):
    with pytest.raises(ValueError, match=rf"Did you mean {hint} .*It knows: en, gl, sr_Latn$"):
        translate.check_language(to, ["en", "gl", "sr_Latn"])


def test_a_language_that_was_not_trained_into_is_refused(pieces, louder):
    # A model that was trained into English alone has the other languages' tags all the same.
    model = Transformer(vocab_size=pieces.size)
    translator = Translator(model, {}, pieces, batch_rows=2, trained=["gl-en"])
    assert texts(translator, ["ola"], "en") == ["OLA"]
    with pytest.raises(ValueError, match=r"to = 'gl': .* It knows: en$"):
        translator.candidates(["hello"], "gl")


class Answers(io.StringIO):
    """An output whose lines can be waited for, once they are flushed."""

    def __init__(self):
        super().__init__()
        self.lines = queue.Queue()

    def flush(self):
        self.lines.put(self.getvalue())
        self.seek(0)
        self.truncate()


def test_each_line_is_answered_before_the_next_is_typed(translator, louder):
    read, write = os.pipe()
    answers = Answers()
    worker = threading.Thread(target=translator.stream, args=(read, "en", answers), daemon=True)
    worker.start()
    for line in ("ola", "mundo"):
        os.write(write, f"{line}\n".encode())
        assert answers.lines.get(timeout=20) == f"{line.upper()}\n"
    # Half a line waits for its end, also in the middle of a character ('í' is two bytes).
    os.write(write, "bo d\u00ed".encode()[:-1])
    os.write(write, "\u00ed".encode()[1:] + b"a\r\n")
    assert answers.lines.get(timeout=20) == "BO D\u00cdA\n"
    os.write(write, b"last without an end")
    os.close(write)
    assert answers.lines.get(timeout=20) == "LAST WITHOUT AN END\n"
    worker.join(timeout=20)
    os.close(read)
    assert not worker.is_alive()


def piped(content):
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    return read


def test_waiting_lines_come_together(translator, louder):
    count = 11
    source = piped("".join(f"l{i}\n" for i in range(count)).encode())
    output = io.StringIO()
    assert translator.stream(source, "en", output) == count
    assert output.getvalue() == "".join(f"L{i}\n" for i in range(count))
    # Four batches of two rows at once.
    assert [len(call) for call in louder.calls] == [8, 3]
    os.close(source)


def test_a_line_that_is_not_utf8(translator, louder):
    source, output = piped(b"ola\n\xff\nmundo\n"), io.StringIO()
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        translator.stream(source, "en", output)
    assert output.getvalue() == "OLA\n"
    os.close(source)


def test_from_a_checkpoint(pieces, tmp_path, monkeypatch):
    sizes = {"heads": 1, "head_width": 8, "mlp_width": 8}
    model = small_model(vocab_size=pieces.size, moe=None, **sizes)
    ones = jnp.ones((1, 4), jnp.int32)
    init = jax.jit(partial(model.init, enable_dropout=False))
    params = init(jax.random.key(0), ones, ones, ones)["params"]
    with pytest.raises(ValueError, match="no checkpoints; train first"):
        restore_params(model, tmp_path / "checkpoints")
    with Checkpoints(tmp_path / "checkpoints") as store:
        store.save(3, {"params": params}, {"vocabulary": pieces.fingerprint})
    restored, step, note = restore_params(model, tmp_path / "checkpoints")
    assert step == 3
    assert note == {"vocabulary": pieces.fingerprint}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, restored))
    with pytest.raises(ValueError, match=r"is \(8, 8\) there and \(8, 9\) in the model"):
        restore_params(model.clone(mlp_width=9), tmp_path / "checkpoints")
    # Training saves step 5 and removes step 3, which is being read: step 5 is read.
    read = Checkpoints.restore

    def removed(self, step, items):
        if step == 3:
            with Checkpoints(tmp_path / "checkpoints", keep=1) as store:
                store.save(5, {"params": params}, {"vocabulary": pieces.fingerprint})
        return read(self, step, items)

    monkeypatch.setattr(Checkpoints, "restore", removed)
    assert restore_params(model, tmp_path / "checkpoints")[1] == 5


class Words:
    """A vocabulary of words, a piece each."""

    def encode_tagged(self, texts):
        return [[7] * len(text.split()) for text in texts]


def run(*texts, longest=4):
    """Returns translations, sums of counts, notes on long lines, and the progress.

    The model takes `longest` pieces: the tag, words and EOS.
    """
    said, progress = [], []
    translator = Translator(None, {}, Words(), Decoding(max_source_length=longest))  # pyright: ignore
    found = translate.translate_lines(
        translator, [Line(text, "gl") for text in texts], BatchCounts(), progress.append,
        lambda i, about: said.append(f"{i}: {about}"),
    )  # fmt: skip
    # A file's state has them, and refuses True, which equals 1.
    assert {type(count) for _, counts in found for count in counts.values()} == {int}
    sums = {name: sum(counts[name] for _, counts in found) for name in found[0][1]}
    return [each.texts[0] for each, _ in found], sums, said, progress


def test_blank_lines_stay_blank_and_others_have_a_translation(louder):
    found, counts, said, progress = run("one", "", "two three", "")
    assert found == ["ONE", "", "TWO THREE", ""]
    assert counts == {"lines": 4, "blank": 2, "split": 0, "cut": 0, "chunks": 2, "unended 3": 1}
    assert (said, progress) == ([], [2, 4])


def test_a_line_that_is_too_long_is_translated_by_sentences_and_named(louder):
    found, counts, said, _ = run("a b", "One two. Three! Four five six.")
    assert found == ["A B", "ONE TWO. THREE! FOUR FIVE SIX."]
    assert said == ["1: 8 pieces, translated in 4 chunks, 1 sentences cut to fit"]
    assert (counts["split"], counts["chunks"], counts["cut"]) == (1, 5, 1)


def test_what_no_cut_makes_fit_is_named_and_counted(louder):
    found, counts, said, _ = run("a", longest=2)
    assert (found, counts["shortened"]) == (["A"], 1)
    assert said[-1] == "0: 3 pieces, cut to 2"


def test_translations_of_chunks_are_joined_rank_by_rank():
    found = [Translations(["A.", "a."], [-1.0, -2.0]), Translations(["B\n."], [-3.0])]
    assert translate.together(found, "gl") == Translations(["A. B .", "a. B ."], [-2.0, -2.5])
    assert translate.together(found, "zh").texts == ["A.B .", "a.B ."]
    assert translate.together([], "gl") == Translations([""], [0.0])
    with_gains = [each._replace(utilities=[50.0, 40.0][: len(each.texts)]) for each in found]
    assert translate.together(with_gains, "gl").utilities == [50.0, 45.0]
