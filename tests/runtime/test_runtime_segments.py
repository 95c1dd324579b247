"""What a segment is, and what remains of it."""

import gc
import mmap
import os
import warnings

import pytest

from kvpp_dag.runtime import segments
from tests.runtime.shared_support import filled, memory_in_use_here, open_files, run_ranks


def test_a_segment_is_nameless_private_sealed_and_zeroed():
    owned = segments.Segments()
    memory = owned.allocate(10_000)
    file = owned.file(0)
    assert memory.shape == (10_000,)
    assert not bool(memory.any())
    assert os.fstat(file).st_mode & 0o777 == 0o600
    assert os.fstat(file).st_nlink == 0
    assert not os.get_inheritable(file)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(file, 10_000)
    with pytest.raises(PermissionError):
        os.write(file, b"x")
    memory.fill_(3)  # the owner still can
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = segments.map_segment(os.dup(file))
    assert bool((mapped == 3).all())
    owned.close()


def test_memory_outlives_the_list_of_segments_and_goes_with_its_last_tensor():
    others = memory_in_use_here()
    owned = segments.Segments()
    memory = owned.allocate(4096)
    view = memory[100:200].fill_(5)
    mine = memory_in_use_here() - others
    owned.close()
    del owned, memory
    gc.collect()
    assert view.unique().tolist() == [5]
    assert len(mine) == 1
    assert mine <= memory_in_use_here()
    del view
    gc.collect()
    assert not mine & memory_in_use_here()


def test_closing_gives_all_files_back():
    def work(transport):
        transport.prepare(filled(transport, 100, 1), 0)()

    run_ranks(3, work)
    gc.collect()
    before = open_files()
    for _ in range(3):
        run_ranks(3, work)
    gc.collect()
    assert open_files() == before
