"""Makes the files of the held-out programs and reads them as scientists' scripts do: make KIND FOLDER SEED, read KIND FOLDER."""
import os
import random
import sys


def make_numpy(folder, seed):
    import numpy as np
    np.save(folder + "/array.npy", np.random.default_rng(seed).integers(0, 1 << 30, (6000, 2048), dtype="i4"))


def make_tree(folder, seed):
    rng = random.Random(seed)
    for d in range(10):
        os.makedirs(f"{folder}/tree/{rng.randrange(1 << 32):08x}")
    for d in sorted(os.listdir(folder + "/tree")):
        for _ in range(40):
            with open(f"{folder}/tree/{d}/{rng.randrange(1 << 32):08x}.txt", "wb") as f:
                f.write(rng.randbytes(rng.choice([2000, 9000, 30000, 70000])).hex().encode())


def make_sqlite(folder, seed):
    import sqlite3
    rng = random.Random(seed)
    db = sqlite3.connect(folder + "/events.db")
    db.execute("create table events (id integer primary key, name text, value integer)")
    rows = ((i, f"{rng.randrange(1 << 48):012x}", rng.randrange(1000)) for i in range(700_000))
    db.executemany("insert into events values (?, ?, ?)", rows)
    db.execute("create index names on events (name)")
    db.commit()


def make_hdf5(folder, seed):
    import h5py
    import numpy as np
    rng = np.random.default_rng(seed)
    with h5py.File(folder + "/field.h5", "w") as f:
        f.create_dataset("steps", data=rng.random((96, 256, 256), dtype="f4"))
        f.create_dataset("chunks", data=rng.random((2048, 4096), dtype="f4"), chunks=(128, 128))


def make_scattered(folder, seed):
    import h5py
    import numpy as np
    rng = np.random.default_rng(seed)
    rows = list(range(384))
    random.Random(seed).shuffle(rows)
    with h5py.File(folder + "/scattered.h5", "w") as f:
        table = f.create_dataset("table", (384, 32768), "f4", chunks=(1, 32768))
        for row in rows:
            table[row] = rng.random(32768, dtype="f4")


def make_text(folder, seed):
    rng = random.Random(seed)
    with open(folder + "/lines.txt", "w") as f:
        f.writelines(f"{rng.randrange(1 << 40):010x} {i}\n" for i in range(1_500_000))


def make_gzip(folder, seed):
    import gzip
    rng = random.Random(seed)
    with gzip.open(folder + "/lines.txt.gz", "wt", compresslevel=1) as f:
        f.writelines(f"{rng.randrange(1 << 40):010x} {i}\n" for i in range(1_500_000))


def make_xz(folder, seed):
    import lzma
    rng = random.Random(seed)
    with lzma.open(folder + "/lines.txt.xz", "wt", preset=0) as f:
        f.writelines(f"{rng.randrange(1 << 40):010x} {i}\n" for i in range(400_000))


def members(seed):
    rng = random.Random(seed)
    for _ in range(300):
        yield f"{rng.randrange(1 << 32):08x}.txt", rng.randbytes(rng.choice([2000, 9000, 30000, 70000])).hex().encode()


def make_zip(folder, seed):
    import zipfile
    with zipfile.ZipFile(folder + "/archive.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as f:
        for name, text in members(seed):
            f.writestr(name, text)


def make_tarball(folder, seed):
    import io
    import tarfile
    with tarfile.open(folder + "/archive.tar", "w") as f:
        for name, text in members(seed):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            f.addfile(member, io.BytesIO(text))


def make_twins(folder, seed):
    text = random.Random(seed).randbytes(24 << 20)
    for name in ["one", "other"]:
        with open(f"{folder}/{name}", "wb") as f:
            f.write(text)


def make_records(folder, seed):
    import csv
    import json
    rng = random.Random(seed)
    rows = [{"id": i, "name": f"{rng.randrange(1 << 48):012x}", "value": rng.randrange(1000)} for i in range(150_000)]
    with open(folder + "/records.json", "w") as f:
        json.dump(rows, f)
    with open(folder + "/records.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def make_binary(folder, seed):
    """Programs of the system: those that there are, one for each seed."""
    import shutil
    there = [path for path in map(shutil.which, ["git", "python3", "perl", "bash"]) if path]
    shutil.copyfile(os.path.realpath(there[seed % min(2, len(there))]), folder + "/program")


def make_zstd(folder, seed):
    make_text(folder, seed)
    os.system(f"zstd -q -1 --rm {folder}/lines.txt")


def make_git(folder, seed):
    make_tree(folder, seed)
    git = f"git -C {folder}/tree -c user.name=a -c user.email=a@b.c"
    os.system(f"{git} init -q && {git} config core.looseCompression 0 && {git} add . && {git} commit -q -m all")


def make_block(folder, seed):
    rng = random.Random(seed)
    with open(folder + "/block", "wb") as f:
        for _ in range(48):
            f.write(rng.randbytes(1 << 20))


def make_model(folder, seed):
    """As safetensors has it; HELD_OUT_MODEL_MB says how large."""
    import json
    import numpy as np
    rng = np.random.default_rng(seed)
    tensors = max(1, int(os.environ.get("HELD_OUT_MODEL_MB", "256")) // 8)
    size = 8 << 20
    names = {f"layers.{i}.weight": {"dtype": "F32", "shape": [2048, 1024], "data_offsets": [i * size, (i + 1) * size]}
             for i in range(tensors)}
    header = json.dumps(names).encode()
    with open(folder + "/model.safetensors", "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        for _ in range(tensors):
            f.write(rng.integers(0, 1 << 30, size // 4, dtype="i4").tobytes())


def make_root(folder, seed):
    import numpy as np
    import uproot
    rng = np.random.default_rng(seed)
    with uproot.recreate(folder + "/events.root", compression=uproot.ZLIB(1)) as f:
        tree = f.mktree("events", {f"b{i}": "f4" for i in range(24)})
        for _ in range(40):
            tree.extend({f"b{i}": np.round(rng.random(20_000, dtype="f4"), 3) for i in range(24)})


def make_parquet(folder, seed):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    rng = np.random.default_rng(seed)
    table = pa.table({f"c{i}": rng.random(480_000) for i in range(12)})
    pq.write_table(table, folder + "/table.parquet", row_group_size=20_000)


def read_model(folder):
    import json
    import numpy as np
    file = np.memmap(folder + "/model.safetensors", "u1", "r")
    start = 8 + int.from_bytes(file[:8].tobytes(), "little")
    places = (tensor["data_offsets"] for tensor in json.loads(file[8:start].tobytes()).values())
    return sum(int(np.bitwise_xor.reduce(file[start + a:start + b])) for a, b in places)


def read_root(folder):
    import uproot
    with uproot.open(folder + "/events.root") as f:
        arrays = f["events"].arrays(["b3", "b11", "b17"], library="np")
    return sum(float(array.astype("f8").sum()) for array in arrays.values())


def read_parquet(folder):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    file = pq.ParquetFile(folder + "/table.parquet")
    groups = (file.read_row_group(i, columns=["c2", "c7"]) for i in range(0, file.num_row_groups, 2))
    return sum(pc.sum(column).as_py() for group in groups for column in group.columns)


def read_memmap(folder):
    import numpy as np
    rows = np.load(folder + "/array.npy", mmap_mode="r")
    return sum(int(rows[i].sum()) for i in range(len(rows)))


def read_memmap_some(folder):
    import numpy as np
    rows = np.load(folder + "/array.npy", mmap_mode="r")
    return sum(int(rows[i:i + 8].sum()) for i in range(0, len(rows), 64))


def read_npload(folder):
    import numpy as np
    return int(np.load(folder + "/array.npy").sum())


def read_steps(folder):
    import h5py
    with h5py.File(folder + "/field.h5") as f:
        return sum(float(f["steps"][i, 64:192].sum()) for i in range(96))


def read_chunks(folder):
    import h5py
    with h5py.File(folder + "/field.h5") as f:
        return sum(float(f["chunks"][:, c:c + 128].sum()) for c in range(0, 4096, 512))


def read_scattered(folder):
    import h5py
    with h5py.File(folder + "/scattered.h5") as f:
        return sum(float(f["table"][row].sum()) for row in range(0, 384, 2))


def read_json(folder):
    import json
    with open(folder + "/records.json") as f:
        return sum(row["value"] for row in json.load(f))


def read_csv(folder):
    import csv
    with open(folder + "/records.csv", newline="") as f:
        return sum(int(row["value"]) for row in csv.DictReader(f))


def read_zip(folder):
    import zipfile
    with zipfile.ZipFile(folder + "/archive.zip") as f:
        return sum(sum(f.read(name)) for name in sorted(f.namelist())[::5])


def read_lookup(folder):
    import sqlite3
    db = sqlite3.connect(f"file:{folder}/events.db?mode=ro&immutable=1", uri=True)
    rng, total = random.Random(4), 0
    for _ in range(400):
        name = db.execute("select name from events where id = ?", (rng.randrange(700_000),)).fetchone()[0]
        total += db.execute("select value from events where name = ?", (name,)).fetchone()[0]
    return total


if __name__ == "__main__":
    act, kind, folder = sys.argv[1:4]
    if act == "make":
        globals()["make_" + kind](folder, int(sys.argv[4]))
    else:
        print(globals()["read_" + kind.replace("-", "_")](folder))
