# HDF5 in parallel: datasets that all ranks write together and alone, contiguous and in chunks. What is read is checked.
import sys

import h5py
import numpy
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, ranks = comm.rank, comm.size
folders = sys.argv[1:]
path = folders[rank % len(folders)] + "/h5"
rows, columns = 24 * ranks, 130
mine = slice(rank * 24, rank * 24 + 24)
all_of = numpy.arange(rows * columns, dtype="i8").reshape(rows, columns)

with h5py.File(path, "w", driver="mpio", comm=comm) as file:
    whole = file.create_dataset("whole", (rows, columns), dtype="i8")
    chunks = file.create_dataset("chunks", (rows, columns), dtype="i8", chunks=(7, 90))
    turns = file.create_dataset("turns", (rows, columns), dtype="i8")
    with whole.collective, chunks.collective:
        whole[mine] = all_of[mine]
        chunks[mine] = all_of[mine]
    # Each row by another rank, without the others.
    for row in range(rank, rows, ranks):
        turns[row] = all_of[row]
    file.attrs["ranks"] = ranks
comm.Barrier()
with h5py.File(path, "r", driver="mpio", comm=comm) as file:
    assert file.attrs["ranks"] == ranks
    for name in ("whole", "chunks", "turns"):
        other = slice((rank + 1) % ranks * 24, (rank + 1) % ranks * 24 + 24)
        assert (file[name][other] == all_of[other]).all(), name
        with file[name].collective:
            assert (file[name][:, rank::ranks] == all_of[:, rank::ranks]).all(), name
comm.Barrier()
if rank == 0:
    print("good")
