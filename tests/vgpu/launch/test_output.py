"""Ranks' output is reassembled from the bytes in their pipes, and shown in chronological order."""

import pytest
from cells import run

from vgpu.launch.processes import MAX_OUTPUT_CHARACTERS, RankOutput


def frame(stamp_ns, text, stream="o"):
    return f"\0{stamp_ns}{stream}\0{text}".encode()


def test_output_is_ordered_by_time_written_not_time_read(capsys):
    output = RankOutput(2)
    output.feed(1, frame(30, "third\n") + frame(10, "first\n"))
    output.feed(0, frame(20, "second\n"))
    output.show(100)
    assert capsys.readouterr().out == "[rank 1] first\n[rank 0] second\n[rank 1] third\n"


def test_lines_newer_than_the_last_read_wait_for_the_next_read(capsys):
    output = RankOutput(1)
    output.feed(0, frame(10, "old\n") + frame(50, "young\n"))
    assert output.show(40)
    assert capsys.readouterr().out == "[rank 0] old\n"
    assert not output.show(60)
    assert capsys.readouterr().out == "[rank 0] young\n"


def test_incomplete_lines_at_the_end_are_ordered_by_time(capsys):
    output = RankOutput(3)
    output.feed(0, frame(30, "third"))
    output.feed(1, frame(10, "first"))
    output.feed(2, frame(20, "second\n"))
    output.finish()
    assert capsys.readouterr().out == "[rank 1] first\n[rank 2] second\n[rank 0] third\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_output_does_not_depend_on_where_a_read_ends(size, capsys):
    data = frame(1, "é one\ntw") + frame(2, "o\n") + b"raw\n" + frame(3, "err\n", "e")
    output = RankOutput(1)
    for start in range(0, len(data), size):
        output.feed(0, data[start : start + size])
    output.finish()
    shown = capsys.readouterr()
    assert shown.out == "[rank 0] é one\n[rank 0] two\n[rank 0] raw\n"
    assert shown.err == "[rank 0] err\n"


def test_a_progress_bar_overwrites_only_its_own_previous_state(capsys):
    output = RankOutput(2)
    output.feed(0, frame(1, "\r 50%"))
    output.show(2)
    output.feed(0, frame(3, "\r100%"))
    output.feed(1, frame(4, "other\n"))
    output.feed(0, frame(5, "\n"))
    output.finish()
    assert capsys.readouterr().out == (
        "[rank 0]  50%\r[rank 0] 100%\n[rank 1] other\n[rank 0] 100%\n"
    )


def test_only_the_rank_over_the_limit_has_its_output_truncated(capsys):
    output = RankOutput(2)
    output.feed(0, frame(1, "x" * MAX_OUTPUT_CHARACTERS) + frame(2, "lost\n"))
    output.feed(1, frame(3, "shown\n"))
    output.finish()
    shown = capsys.readouterr()
    assert "lost" not in shown.out and "[rank 1] shown\n" in shown.out
    assert "5 more characters from this rank are not shown" in shown.err


def test_output_is_shown_chronologically_and_labeled_by_rank(capsys):
    run(
        """
        def main(rank, world_size):
            for turn in (2, 0, 1, 1, 0, 2):
                if turn == rank:
                    print("turn of", rank)
                dist.barrier()
        """,
        3,
    )
    order = (2, 0, 1, 1, 0, 2)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"[rank {rank}] turn of {rank}" for rank in order]


def test_errors_warnings_and_the_output_of_programs_are_shown(capsys):
    run(
        """
        def main(rank, world_size):
            warnings.warn("careful")
            print("to stderr", file=sys.stderr)
            sys.stdout.flush()
            os.system("echo from a program")
            print("no newline", end="")
        """,
        1,
    )
    shown = capsys.readouterr()
    assert "UserWarning: careful\n[rank 0]   warnings.warn" in shown.err
    assert "[rank 0] to stderr\n" in shown.err
    assert "[rank 0] from a program\n" in shown.out + shown.err
    assert "[rank 0] no newline\n" in shown.out


@pytest.mark.parametrize(
    "line",
    ["sys.stdout.close()", "sys.stderr.close()", "sys.stdout = None", "sys.stdout = object()"],
)
def test_a_result_arrives_even_if_the_function_closes_or_replaces_its_streams(line):
    assert run(f"def main(rank, world_size):\n    {line}\n    return rank", 2) == [0, 1]
