"""Writes a ROOT file: one tree of several branches, each basket of about `basket` bytes.

usage: root_write.py FILE BRANCHES BASKETS BASKET_BYTES
"""

import sys

import numpy as np
import uproot

path, branches, baskets, basket_bytes = sys.argv[1], *map(int, sys.argv[2:5])
entries = basket_bytes // 8
names = [f"x{i}" for i in range(branches)]
random = np.random.default_rng(1)
with uproot.recreate(path, compression=None) as file:
    tree = file.mktree("events", {name: np.float64 for name in names})
    for _ in range(baskets):
        tree.extend({name: random.standard_normal(entries) for name in names})
