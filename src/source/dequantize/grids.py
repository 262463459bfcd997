"""Makes grids.bin: the codebooks of ggml's IQ1, IQ2 and IQ3 types, which are data of the format.

A codebook entry is a group of 8 elements (IQ1, IQ2: two bits each, four to a byte) or 4 elements (IQ3: four bits each, two to a
byte), least significant first; the bits index the few values that elements of the type take. The order is that of ORDER.

    pip install gguf==0.19.0
    python src/source/dequantize/grids.py
"""

from pathlib import Path

import numpy as np
from gguf import quants

ORDER = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S, quants.IQ1_S]


def packed(kind):
    kind.init_grid()
    grid = kind.grid.reshape(kind.grid_shape)
    index = np.stack([grid == value for value in kind.grid_map]).argmax(axis=0).astype(np.uint8)
    bits = 2 if len(kind.grid_map) == 3 else 4
    index = index.reshape(-1, 8 // bits) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(index, axis=1).astype(np.uint8).tobytes()


Path(__file__).with_name("grids.bin").write_bytes(b"".join(packed(kind) for kind in ORDER))
