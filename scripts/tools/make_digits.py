#!/usr/bin/env python3
"""Writes scripts/data/digits.bin from scikit-learn's copy of the handwritten digits (see LICENSE-digits.txt there).

    python3 -m venv /tmp/v && /tmp/v/bin/pip install scikit-learn numpy && /tmp/v/bin/python scripts/tools/make_digits.py OUT

The file, little-endian: "DDPIMG1\\n", u16 channels, height, width, greatest value; u32 images for training, for testing;
then a record an image: a byte of label, then the pixels, 0..16. Those for training come first. The split is fixed: within each
class, images are put in the order of the SHA-256 of their bytes and place, and the first fifth (rounded so that the whole is
360) is for testing; both parts are then ordered by the same hash, so that classes are mixed.
"""
import hashlib
import struct
import sys

import numpy
from sklearn.datasets import load_digits

TEST = 360


def main(out):
    digits = load_digits()
    pixels, labels = digits.images.astype(numpy.uint8), digits.target.astype(numpy.uint8)
    assert pixels.shape == (1797, 8, 8) and pixels.max() == 16 and (pixels == digits.images).all()
    records = []
    for i, (image, label) in enumerate(zip(pixels, labels)):
        data = bytes([label]) + image.tobytes()
        records.append((hashlib.sha256(data + struct.pack("<I", i)).digest(), int(label), data))
    records.sort()
    classes = {c: [r for r in records if r[1] == c] for c in range(10)}
    # The largest remainders take what rounding down leaves.
    share = {c: len(rs) * TEST / len(records) for c, rs in classes.items()}
    count = {c: int(s) for c, s in share.items()}
    for c in sorted(share, key=lambda c: count[c] - share[c])[: TEST - sum(count.values())]:
        count[c] += 1
    test = sorted(r for c, rs in classes.items() for r in rs[: count[c]])
    train = sorted(r for c, rs in classes.items() for r in rs[count[c]:])
    with open(out, "wb") as f:
        f.write(b"DDPIMG1\n" + struct.pack("<4H2I", 1, 8, 8, 16, len(train), len(test)))
        for record in train + test:
            f.write(record[2])
    print(f"{out}: {len(train)} for training, {len(test)} for testing, a class: {count}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "scripts/data/digits.bin")
