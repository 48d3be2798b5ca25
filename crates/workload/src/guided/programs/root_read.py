"""Reads one branch of many from a ROOT file, basket by basket, and prints a sum.

usage: root_read.py FILE [ORDER]

ORDER is "forward" (default) or "shuffled": groups of eight baskets are read in another order than they lie in, as
when baskets were flushed out of order.
"""

import sys

import numpy as np
import uproot

path = sys.argv[1]
order = sys.argv[2] if len(sys.argv) > 2 else "forward"
# One reading thread and plain reads instead of a memory map.
with uproot.open(path, handler=uproot.MultithreadedFileSource, num_workers=1, use_threads=False) as file:
    branch = file["events"]["x0"]
    numbers = np.arange(branch.num_baskets)
    if order == "shuffled":
        random = np.random.default_rng(2)
        for start in range(0, len(numbers), 8):
            random.shuffle(numbers[start : start + 8])
    total = 0.0
    for number in numbers:
        total += float(np.sum(np.sqrt(np.abs(branch.basket(int(number)).array(interpretation=branch.interpretation)))))
print(f"{total:.6f}")
