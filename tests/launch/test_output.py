"""What ranks print is put together from the bytes of their pipes."""

import pytest

from helpers.launch.output import MAX_OUTPUT_CHARACTERS, Output


def frame(stamp_ns, text, stream="o"):
    return f"\0{stamp_ns}{stream}\0{text}".encode()


def test_the_time_of_writing_decides_not_the_time_of_reading(capsys):
    output = Output(2, by_rank=False)
    output.feed(1, frame(30, "third\n") + frame(10, "first\n"))
    output.feed(0, frame(20, "second\n"))
    output.show(100)
    assert capsys.readouterr().out == "[rank 1] first\n[rank 0] second\n[rank 1] third\n"


def test_what_is_younger_than_the_look_waits(capsys):
    output = Output(1, by_rank=False)
    output.feed(0, frame(10, "old\n") + frame(50, "young\n"))
    assert output.show(40)
    assert capsys.readouterr().out == "[rank 0] old\n"
    assert not output.show(60)
    assert capsys.readouterr().out == "[rank 0] young\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_any_cut_between_reads_gives_the_same(size, capsys):
    data = frame(1, "é one\ntw") + frame(2, "o\n") + b"raw\n" + frame(3, "err\n", "e")
    output = Output(1, by_rank=False)
    for start in range(0, len(data), size):
        output.feed(0, data[start : start + size])
    output.finish(act=True)
    shown = capsys.readouterr()
    assert shown.out == "[rank 0] é one\n[rank 0] two\n[rank 0] raw\n"
    assert shown.err == "[rank 0] err\n"


def test_a_progress_bar_is_drawn_over_its_last_state_only(capsys):
    output = Output(2, by_rank=False)
    output.feed(0, frame(1, "\r 50%"))
    output.show(2)
    output.feed(0, frame(3, "\r100%"))
    output.feed(1, frame(4, "other\n"))
    output.feed(0, frame(5, "\n"))
    output.finish(act=True)
    assert capsys.readouterr().out == (
        "[rank 0]  50%\r[rank 0] 100%\n[rank 1] other\n[rank 0] 100%\n"
    )


def test_actions_have_their_turn_and_are_dropped_on_an_error(capsys):
    output = Output(1, by_rank=False)
    output.feed(0, frame(1, "one\n") + frame(3, "three\n"))
    output.call(2, 0, lambda: print("two"))
    output.finish(act=True)
    assert capsys.readouterr().out == "[rank 0] one\ntwo\n[rank 0] three\n"
    output.call(4, 0, lambda: print("four"))
    output.finish(act=False)
    assert capsys.readouterr().out == ""


def test_a_rank_alone_is_cut(capsys):
    output = Output(2, by_rank=False)
    output.feed(0, frame(1, "x" * MAX_OUTPUT_CHARACTERS) + frame(2, "lost\n"))
    output.feed(1, frame(3, "shown\n"))
    output.finish(act=True)
    shown = capsys.readouterr()
    assert "lost" not in shown.out and "[rank 1] shown\n" in shown.out
    assert "5 more characters of this rank are not shown" in shown.err
