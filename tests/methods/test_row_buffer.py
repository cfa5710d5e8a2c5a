from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.methods.row_buffer import RowBuffer


@given(st.lists(st.tuples(st.sampled_from(["append", "drop", "truncate"]), st.integers(0, 9)), max_size=25))
def test_it_is_a_list_of_rows(changes: list[tuple[str, int]]) -> None:
    buffer, rows, start = RowBuffer(5), list[int](), 5
    buffer.append(torch.empty(2, 0, 3))
    for number, (change, count) in enumerate(changes):
        if change == "append":
            new = [100 * number + row for row in range(count)]
            buffer.append(torch.tensor(new, dtype=torch.float32).view(1, -1, 1).expand(2, -1, 3))
            rows += new
        elif change == "drop":
            buffer.drop_before(start + count)
            gone = min(count, len(rows))
            rows, start = rows[gone:], start + gone
        else:
            rows = rows[: max(0, len(rows) - count)]
            buffer.truncate(max(start, buffer.stop - count))
        assert (buffer.start, buffer.stop) == (start, start + len(rows))
        assert buffer.rows[0, :, 0].tolist() == rows
        assert torch.equal(buffer.rows[0], buffer.rows[1])
        middle = start + len(rows) // 2
        assert buffer.read(middle, buffer.stop)[1, :, 2].tolist() == rows[len(rows) // 2 :]


def test_memory_is_counted_and_bounded_by_what_stays() -> None:
    buffer = RowBuffer(0)
    assert buffer.nbytes == 0
    for _ in range(1000):
        buffer.append(torch.zeros(2, 10, 4))
        buffer.drop_before(buffer.stop - 20)
    assert buffer.stop == 10_000
    assert 2 * 20 * 4 * 4 <= buffer.nbytes <= 2 * 100 * 4 * 4
