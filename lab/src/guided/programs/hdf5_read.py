"""Reads one column of chunks from an HDF5 dataset, a chunk at a time, and prints a sum.

usage: hdf5_read.py FILE
"""

import sys

import h5py
import numpy as np

total = 0.0
with h5py.File(sys.argv[1], "r") as file:
    data = file["field"]
    side = data.chunks[1]
    for row in range(data.shape[0]):
        total += float(np.sum(np.sqrt(np.abs(data[row, :side]))))
print(f"{total:.6f}")
