"""Translation of lines: order, promptness, what is refused, what is cut."""

import contextlib
import errno
import io
import os
import queue
import re
import sys
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.eval.decoding import translate
from m4.eval.decoding.decode import Translations
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.eval.decoding.settings import Decoding
from m4.eval.decoding.translate import Translator, check_language
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
    """Stands in for `decode`: capitals, without tags, and a note of what came together."""

    def __init__(self):
        self.calls = []

    def __call__(self, trained, sources, *, on_cut, **options):
        self.calls.append(sources)
        settings = trained.decoding
        for index, source in enumerate(sources):
            if len(source.split()) >= settings.max_source_length:
                on_cut(index, len(source.split()) + 1, settings.max_source_length)
        return [Translations([source.split(" ", 1)[1].upper()], [-1.0]) for source in sources]


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


def test_a_line_that_is_too_long_is_named(pieces, louder, capsys):
    # Tag, three words of two pieces each and EOS are eight; the model takes four.
    translator = Translator(Transformer(pieces.size), {}, pieces, Decoding(max_source_length=4))
    translator.candidates(["a", "", "a b c", "b"], "gl", first_line=10)
    said = capsys.readouterr().err
    assert said.startswith("line 12: 8 pieces, translated in 3 chunks, ")
    assert said.endswith(" (Decoding.max_source_length)\n")


@pytest.mark.parametrize(
    ("to", "hint"),
    [
        ("galician", "Did you mean gl (Galician)?"),
        ("sr-Latn", "Did you mean sr_Latn (Serbian (Latin))?"),
        ("eng", "Did you mean en (English)?"),
    ],
)
def test_an_unknown_language_gets_a_hint(to, hint):
    with pytest.raises(ValueError, match=re.escape(hint)) as error:
        check_language(to, ["en", "gl", "sr_Latn"])
    assert str(error.value).endswith("It knows: en, gl, sr_Latn")
    assert "\n" not in str(error.value)


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


def test_without_stderr_warnings_are_lost_and_not_among_the_translations(
    pieces, louder, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stderr", None)
    translator = Translator(Transformer(pieces.size), {}, pieces, Decoding(max_source_length=4))
    assert texts(translator, ["a b c"], "gl") == ["A B C"]
    assert capsys.readouterr().out == ""


def test_one_text_in_the_place_of_a_list_is_refused(translator):
    with pytest.raises(TypeError, match="a list of texts"):
        translator.candidates("ola", "en")


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
    store = Checkpoints(tmp_path / "checkpoints")
    store.save(3, {"params": params}, {"vocabulary": pieces.fingerprint})
    store.close()
    restored, step, note = restore_params(model, tmp_path / "checkpoints")
    assert step == 3
    assert note == {"vocabulary": pieces.fingerprint}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, restored))
    with pytest.raises(ValueError, match="no checkpoint of step 4"):
        restore_params(model, tmp_path / "checkpoints", step=4)
    with pytest.raises(ValueError, match=r"is \(8, 8\) there and \(8, 9\) in the model"):
        restore_params(model.clone(mlp_width=9), tmp_path / "checkpoints")
    # Training saves step 5 and removes step 3, which is being read: step 5 is read.
    read = Checkpoints.restore

    def removed(self, step, items):
        if step == 3:
            with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=1)) as store:
                store.save(5, {"params": params}, {"vocabulary": pieces.fingerprint})
        return read(self, step, items)

    monkeypatch.setattr(Checkpoints, "restore", removed)
    assert restore_params(model, tmp_path / "checkpoints")[1] == 5
    translator = Translator(
        model, restored, pieces, Decoding(beams=2, max_target_length=6), batch_rows=2
    )
    lines = ["ola mundo", "", "bo día"]
    translated = texts(translator, lines, "en")
    assert translated[1] == ""
    assert texts(translator, lines[:1], "en") == translated[:1]
    assert texts(translator, lines, "gl") != translated


def test_output_that_takes_nothing_names_the_line_that_is_lost(translator, louder):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    source, end = os.pipe()
    os.write(end, b"w1\n")
    os.close(end)
    with pytest.raises(OSError, match="the translation of line 1"):
        translator.stream(source, "en", Full())
    os.close(source)


def test_input_that_cannot_be_read_is_one_line(translator, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ValueError, match="standard input cannot be read: Is a directory"):
        translator.stream(folder, "en", io.StringIO())
    os.close(folder)
