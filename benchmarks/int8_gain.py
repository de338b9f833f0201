"""What int8 brings: time of a batch in float and quantised at load, and how alike the answers are.

    python benchmarks/int8_gain.py [--rounds 3]

An MLP of 70 MB and an encoder of 6 layers of 384 at 64 tokens, made here, in batches of 1, 8 and 32 rows, as served:
quantised dynamically by `precision` = "int8-dynamic", one instance, a thread for each core. Float and int8 take turns;
times are the best of ROUNDS, the cosine is the gate's own.

Predicted before the first run: mlp 3.5 times as fast (a quarter of the bytes; products of int8 where the processor has
VNNI or AMX) at a cosine above 0.999; encoder 1.8, since half of its time is what stays float, at 0.98. Aims: 2.5 and
1.5.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tensor_models import MLP_SIZES, encoder, mlp, write_model

from maitred.tensor.profiling import measured_times
from maitred.tensor.quantized import measured_error, served_file
from maitred.tensor.repository_files import read_model
from maitred.tensor.served_models import LoadedVersion, open_onnx

ROWS = (1, 8, 32)
LENGTH = 64
PARAMETERS = """parameters { key: "precision" value { string_value: "int8-dynamic" } }
parameters { key: "min_cosine" value { string_value: "0.9" } }
"""


def times_ms(loaded: LoadedVersion, length: int) -> dict[int, float]:
    (shape,) = measured_times(loaded, most_at_once=1, lengths=(length,)).shapes
    return {rows: took * 1e3 for rows, took in zip(shape.rows, shape.seconds, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"{'':10}{'cosine':>9}" + "".join(f"{f'{rows} rows':>26}" for rows in ROWS) + "   (ms float, int8; ratio)")
    with tempfile.TemporaryDirectory() as root:
        for name, made, length in (("mlp", mlp(MLP_SIZES), 0), ("encoder", encoder(), LENGTH)):
            folders = [write_model(Path(root), f"{name}-{kind}", made, more=more)
                       for kind, more in (("float", ""), ("int8", PARAMETERS))]  # fmt: skip
            models = [read_model(folder) for folder in folders]
            loaded = [open_onnx(model, model.versions[0]) for model in models]
            runs = [[times_ms(each, length) for each in loaded] for _ in range(rounds)]
            exact, rounded = ({rows: min(run[i][rows] for run in runs) for rows in ROWS} for i in (0, 1))
            error = measured_error(served_file(models[1], models[1].versions[0]))
            cells = (f"{exact[n]:10.2f} {rounded[n]:8.2f} {exact[n] / rounded[n]:6.2f}" for n in ROWS)
            cosine = error.cosine if error is not None else 0.0
            print(f"{name:10}{cosine:9.4f}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
