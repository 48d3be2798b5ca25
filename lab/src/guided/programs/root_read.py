"""Reads some branches of many from a ROOT file, basket by basket, and prints a sum.

usage: root_read.py FILE [ORDER [BRANCH,...]]

ORDER is "forward" (default) or "shuffled": groups of 32 baskets are read in another order than they lie in, as when
the baskets of a cluster of entries (ROOT's own default: 30 MB) were flushed out of order.
"""

import sys

import numpy as np
import uproot

path = sys.argv[1]
order = sys.argv[2] if len(sys.argv) > 2 else "forward"
names = sys.argv[3].split(",") if len(sys.argv) > 3 else ["x0"]
# One reading thread and plain reads instead of a memory map.
with uproot.open(path, handler=uproot.MultithreadedFileSource, num_workers=1, use_threads=False) as file:
    branches = [file["events"][name] for name in names]
    numbers = np.arange(branches[0].num_baskets)
    if order == "shuffled":
        random = np.random.default_rng(2)
        for start in range(0, len(numbers), 32):
            random.shuffle(numbers[start : start + 32])
    total = 0.0
    for number in numbers:
        for branch in branches:
            basket = branch.basket(int(number))
            total += float(np.sum(np.sqrt(np.abs(basket.array(interpretation=branch.interpretation)))))
print(f"{total:.6f}")
