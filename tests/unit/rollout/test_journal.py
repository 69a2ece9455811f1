import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.rollout.journal import (
    JOURNAL_NAME,
    GroupReader,
    Journal,
    JournalReader,
    parse_head,
    parse_samples,
    read_group,
    render_line,
)
from slurm_rl.rollout.samples import LINES_NAME, Sample, render_sample, write_samples
from slurm_rl.storage.fs import PosixFs


def group(index: int, reward: float = 0.5) -> list[Sample]:
    return [
        Sample(index, k, (1, 2), (3, k), (-0.25, -1e-7), (1, 1), prompt="ü", response="x", label=3,
               reward=reward, seed=9, metadata={"a": [1]})
        for k in range(2)
    ]  # fmt: skip


def write_journal(folder: Path, groups: dict[str, list[Sample]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / JOURNAL_NAME) as journal:
        for key, samples in groups.items():
            journal.append(key, samples)
    return folder / JOURNAL_NAME


def read_all(*folders: Path) -> dict[str, list[Sample]]:
    """What a fresh reader finds, later folders over earlier ones."""
    entries = list(JournalReader().poll(folders))
    found = {entry.key: read_group(entry) for entry in entries}
    assert all(found[e.key][0].group_index == e.group_index for e in entries)
    return found


def test_what_was_appended_is_taken_over(tmp_path: Path) -> None:
    write_journal(tmp_path / "a1", {"k0": group(0), "k1": group(1)})
    write_journal(tmp_path / "a2", {"k1": group(1, reward=1.0), "k2": group(2)})
    found = read_all(tmp_path / "a1", tmp_path / "none", tmp_path / "a2")
    assert found == {"k0": group(0), "k1": group(1, reward=1.0), "k2": group(2)}


def test_any_torn_end_loses_only_the_last_group(tmp_path: Path) -> None:
    path = write_journal(tmp_path, {"k0": group(0), "k1": group(1)})
    whole = path.read_bytes()
    first = len(render_line("k0", group(0)))
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        assert read_all(tmp_path) == {"k0": group(0)}
    path.write_bytes(whole)
    assert len(read_all(tmp_path)) == 2


def test_a_damaged_line_costs_its_group_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_journal(tmp_path, {f"k{k}": group(k) for k in range(3)})
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"reward":0.5', b'"reward":0.6')
    path.write_bytes(b"\n".join(lines))
    assert set(read_all(tmp_path)) == {"k0", "k2"}
    assert "journal.jsonl:2 is damaged" in caplog.text


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
    st.text(),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_line_gives_back_exactly_what_went_in(
    logprobs: list[float], text: str, reward: float
) -> None:
    samples = [
        Sample(
            0,
            0,
            (1,),
            (2, 3),
            tuple(logprobs),
            (1, 0),
            prompt=[{"content": text}],
            response=text,
            reward=reward,
        )
    ]
    line = render_line("key", samples)
    assert line.count(b"\n") == 1
    head = parse_head(line[:-1])
    assert head is not None and (head["key"], head["keep"]) == ("key", True)
    assert parse_samples(line[:-1]) == samples


def test_whole_numbers_of_any_size_come_back(tmp_path: Path) -> None:
    samples = [replace(s, label=-(2**70), metadata={"n": [10**19, 1e300]}) for s in group(0)]
    write_journal(tmp_path, {"k": samples})
    assert read_all(tmp_path) == {"k": samples}
    assert isinstance(read_all(tmp_path)["k"][0].label, int)


def test_a_reader_follows_what_is_appended(tmp_path: Path) -> None:
    reader, path = JournalReader(), tmp_path / JOURNAL_NAME
    lines = [render_line(f"k{k}", group(k), keep=bool(k % 2), reason="same") for k in range(4)]
    whole = b"".join(lines)
    seen: list[tuple[str, bool]] = []
    for size in range(0, len(whole) + 1, 97):
        path.write_bytes(whole[:size])
        seen += [(entry.key, entry.keep) for entry in reader.poll([tmp_path])]
    path.write_bytes(whole)
    seen += [(entry.key, entry.keep) for entry in reader.poll([tmp_path])]
    assert seen == [("k0", False), ("k1", True), ("k2", False), ("k3", True)]
    assert list(reader.poll([tmp_path])) == []


def test_a_long_journal_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_journal(tmp_path, {f"k{k}": group(k) for k in range(9)})
    whole = path.read_bytes()
    expected = list(JournalReader().poll([tmp_path]))
    for size in (1, 100, 1000, len(whole)):
        monkeypatch.setattr("slurm_rl.rollout.journal._BLOCK_BYTES", size)
        assert list(JournalReader().poll([tmp_path])) == expected
        reader = JournalReader()
        path.write_bytes(whole[:-5])  # torn, and then completed
        found = list(reader.poll([tmp_path]))
        path.write_bytes(whole)
        assert found + list(reader.poll([tmp_path])) == expected


def test_a_line_holds_the_samples_lines_as_they_are_sealed(tmp_path: Path) -> None:
    samples = [
        replace(s, response="tab\t, line\n and \u2028", token_versions=(3, 4)) for s in group(5)
    ]
    write_journal(tmp_path / "a", {"k": samples[::-1]})
    (entry,) = JournalReader().poll([tmp_path / "a"])
    with GroupReader() as reader:
        found = reader.read(entry)
    assert found == [(s, render_sample(s)) for s in samples]
    write_samples(tmp_path, samples)
    assert (tmp_path / LINES_NAME).read_bytes() == b"".join(line + b"\n" for _, line in found)


def test_a_group_whose_line_changed_is_not_read(tmp_path: Path) -> None:
    path = write_journal(tmp_path, {"k0": group(0), "k1": group(1)})
    first, second = JournalReader().poll([tmp_path])
    path.write_bytes(path.read_bytes().replace(b'"seed":9', b'"seed":8', 1))
    assert read_group(first) is None
    assert read_group(second) == group(1)
    path.unlink()
    assert read_group(second) is None


class SlowFs(PosixFs):
    """Counts what was synced, and may fail."""

    def __init__(self) -> None:
        self.synced: list[int] = []
        self.failure: OSError | None = None

    def fsync(self, path: Path) -> None:
        if self.failure is not None:
            raise self.failure
        super().fsync(path)
        self.synced.append(path.stat().st_size)


def test_lines_reach_the_disk_without_a_further_append(tmp_path: Path) -> None:
    import time

    fs = SlowFs()
    with Journal(tmp_path / JOURNAL_NAME, fs=fs, interval_s=0.02) as journal:
        journal.append("k", group(0))
        deadline = time.monotonic() + 60
        while not fs.synced and time.monotonic() < deadline:
            time.sleep(0.01)
        assert fs.synced == [len(render_line("k", group(0)))]
        time.sleep(0.1)
        assert len(fs.synced) == 1  # nothing new, nothing synced


def test_a_disk_that_fails_is_told_to_the_writer(tmp_path: Path) -> None:
    import time

    fs = SlowFs()
    with (
        pytest.raises(OSError, match="broken"),
        Journal(tmp_path / JOURNAL_NAME, fs=fs, interval_s=0.01) as journal,
    ):
        fs.failure = OSError(5, "broken")
        for _ in range(6000):
            journal.append("k", group(0))
            time.sleep(0.01)


def test_more_journals_than_may_be_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of hundreds of shards: the limit on open files must not lose a group."""
    monkeypatch.setattr("slurm_rl.rollout.journal._MOST_OPEN", 3)
    entries = []
    for k in range(8):
        write_journal(tmp_path / str(k), {"key": group(k)})
        entries += JournalReader().poll([tmp_path / str(k)])
    before = len(os.listdir("/proc/self/fd"))
    with GroupReader() as reader:
        for entry in [*entries, *reversed(entries)]:
            found = reader.read(entry)
            assert found is not None and found[0][0].group_index == entry.group_index
            assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert len(os.listdir("/proc/self/fd")) == before
