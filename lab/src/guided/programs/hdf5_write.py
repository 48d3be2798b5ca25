"""Writes an HDF5 file with one chunked, two-dimensional dataset.

usage: hdf5_write.py FILE ROWS COLUMNS CHUNK_BYTES      (rows and columns of chunks)
"""

import sys

import h5py
import numpy as np

path, rows, columns, chunk_bytes = sys.argv[1], *map(int, sys.argv[2:5])
side = chunk_bytes // 8
random = np.random.default_rng(1)
with h5py.File(path, "w") as file:
    data = file.create_dataset("field", (rows, columns * side), "f8", chunks=(1, side))
    for row in range(rows):
        data[row] = random.standard_normal(columns * side)
